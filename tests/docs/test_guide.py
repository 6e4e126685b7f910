"""Every command of the guide runs as printed, on small inputs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import yaml

from command_line import cli, compare_in_workers
from lightning_dcp.cli import main

ROOT = Path(__file__).parents[2]
RUN = {
    "seed_everything": 0,
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": 2,
        "max_epochs": 1,
        "logger": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "strategy": {
            "class_path": "lightning_dcp.DynamicCPStrategy",
            "init_args": {"max_seqlen_per_dp_cp_rank": 64},
        },
    },
    "model": {
        "class_path": "lightning_dcp.DynamicCPModule",
        "init_args": {
            # The vocabulary makes rows dear: calibrate sees times that grow on a busy machine too.
            "model": {
                "num_layers": 1,
                "hidden_size": 16,
                "num_attention_heads": 2,
                "vocab_size": 4096,
            }
        },
    },
    "data": {
        "class_path": "lightning_dcp.SyntheticDataModule",
        "init_args": {
            "max_length": 128,
            "lengths": {"kind": "uniform", "low": 4, "high": 60},
            "global_batch_size": 6,
            "num_batches": 20,
            "num_workers": 0,
        },
    },
}


def commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_the_guides_commands(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    (tmp_path / "lengths.csv").write_text("length,count\n60,300\n300,100\n500,10\n")
    monkeypatch.chdir(tmp_path)
    compare_in_workers(monkeypatch, 2)
    found = commands()
    assert {command[1] for command in found} == {"plan", "calibrate", "compare", "fit"}
    for command in found:
        assert command[0] == "lightning-dcp"
        if command[1] == "compare":
            main(command[1:])
            continue
        done = cli(*command[1:], cwd=tmp_path, world=1 if command[1] == "plan" else 2)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr[-3000:]}"
    for name in ("plan.png", "compare.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    compared = json.loads((tmp_path / "compare.json").read_text())["comparison"]
    assert compared["num_steps"] == 10
    assert compared["ratio"] is not None
    assert compared["max_loss_difference"] < 1e-5


def test_the_readme_links_the_guide():
    assert "(docs/guide.md)" in (ROOT / "README.md").read_text()
