"""The command, the configs and the README's script.

One ``fit``, one that fails and the script are processes as a user starts them; everything else runs
in workers that have all imports.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml

from command_line import cli, run, script
from lightning_dcp.tools.lightning_cli import DynamicCPCLI

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


SMALL = {
    "trainer": {
        "max_steps": 2,
        "limit_val_batches": 1,
        "val_check_interval": 2,
        "strategy": {"init_args": {"max_seqlen_per_dp_cp_rank": 256}},
    },
    "model": {"init_args": {"model": {"hidden_size": 32, "num_layers": 1}}},
    "data": {
        "init_args": {
            "data": ["{stdlib}/json/*.py", "{stdlib}/email/*.py"],
            "max_length": 1024,
            "long_documents": "split",
            "global_batch_size": 6,
            "val_fraction": 0.2,
        }
    },
}


def small(name: str, folder: Path) -> list[str]:
    """The options that run a config on little data for two steps."""
    overrides = folder / "overrides.yaml"
    overrides.write_text(yaml.safe_dump(SMALL))
    return [f"--config={ROOT / 'configs' / name}.yaml", f"--config={overrides}"]


# The runs in processes of their own, and the script, have the workers of loaders.
NO_LOADERS = "--data.init_args.num_workers=0"


@pytest.mark.parametrize("name", ["quickstart", "static_cp", "mtp"])
def test_a_config_trains_validates_and_leaves_its_files(tmp_path, name):
    options = small(name, tmp_path)
    if name == "quickstart":
        # Two processes, and loaders' workers in each.
        two = ["--trainer.devices=2", "--trainer.strategy.init_args.max_seqlen_per_dp_cp_rank=512"]
        done = run(sys.executable, "-m", "lightning_dcp", "fit", *options, *two, cwd=tmp_path)
    else:
        done = cli("fit", *options, NO_LOADERS, cwd=tmp_path, world=4)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = re.findall(
        r"step (\d+) \| loss [\d.]+ \| [\d,]+ tokens \| .*CP sizes (.*)", done.stdout
    )
    assert [step for step, _ in steps] == ["1", "2"]
    if name == "static_cp":
        assert all(sizes.startswith("4 (") for _, sizes in steps)
    assert "Epoch 0" in done.stdout + done.stderr
    (metrics,) = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(metrics.open()))
    assert sum(bool(row["train_loss"]) for row in rows) == 2
    assert sum(bool(row["val_loss"]) for row in rows) == 1
    depths = {key for key in rows[0] if key.startswith("mtp_loss_")}
    assert depths == ({"mtp_loss_1", "mtp_loss_2"} if name == "mtp" else set())
    assert all(5 < float(row[key]) < 6 for row in rows if row["train_loss"] for key in depths)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    saved = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    validated = cli(
        "validate", *options, NO_LOADERS, f"--ckpt_path={checkpoint}", cwd=tmp_path, world=4
    )
    assert validated.returncode == 0, validated.stderr[-3000:]
    (loss,) = re.findall(r"val_loss\W+([\d.]+)", validated.stdout)
    assert float(loss) == pytest.approx(saved[0], rel=1e-5)


def test_rl_with_replayed_routes_trains(tmp_path):
    config = f"--config={ROOT / 'configs' / 'rl_r3.yaml'}"
    done = cli("fit", config, "--trainer.max_steps=2", NO_LOADERS, cwd=tmp_path, world=4)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = re.findall(r"step (\d+) \| loss (-?[\d.]+) \| ([\d,]+) tokens", done.stdout)
    assert [step for step, *_ in steps] == ["1", "2"]
    # Routes that are not the model's are refused: they are looked at.
    wrong = "--data.init_args.rollouts.num_layers=3"
    done = cli("fit", config, wrong, NO_LOADERS, cwd=tmp_path, world=4)
    assert done.returncode != 0
    assert "has [3, 2] values a token" in done.stderr


@pytest.mark.parametrize("name", ["moe_small"])
def test_a_small_twin_trains(tmp_path, name):
    config = str(ROOT / "configs" / f"{name}.yaml")
    options = ["--config", config, "--trainer.max_steps=2", NO_LOADERS]
    done = cli("fit", *options, cwd=tmp_path, world=4)
    assert done.returncode == 0, done.stderr[-3000:]
    (metrics,) = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(metrics.open()))
    assert len(rows) == 2
    assert all(float(row["train_loss"]) > 0 for row in rows)
    if name == "moe_small":
        assert all(0.9 < float(row["moe_aux_loss"]) < 2 for row in rows)


def test_the_published_layout_is_that_of_its_twin():
    large, small = (
        yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["trainer"]
        for name in ("moe_30b_a3b", "moe_small")
    )
    assert large["strategy"]["init_args"]["max_seqlen_per_dp_cp_rank"] == 4096
    for trainer in (large, small):
        options = trainer["strategy"]["init_args"]
        assert options["expert_model_parallel_size"] == trainer["devices"]
        assert "tensor_model_parallel_size" not in options


def test_predict_stores_log_probabilities_of_every_sample(tmp_path):
    data = '--data.init_args.data=["{stdlib}/json/*.py"]'
    train = "--data.init_args.predict_split=train"
    options = [*small("predict", tmp_path), data, train, NO_LOADERS]
    done = cli("predict", *options, cwd=tmp_path, world=4)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Predicting" in done.stdout + done.stderr
    table = pq.read_table(tmp_path / "runs" / "predictions.parquet").to_pydict()
    assert list(table) == ["sample_id", "input_ids", "entropies", "log_probs"]
    assert table["sample_id"] == list(range(len(table["sample_id"])))
    for ids, *outputs in zip(
        table["input_ids"], table["log_probs"], table["entropies"], strict=True
    ):
        for one in outputs:
            assert len(one) == len(ids)
            assert one[0] == 0
        assert all(value < 0 for value in outputs[0][1:])
        assert all(0 < value < 5.55 for value in outputs[1][1:])


def test_predict_without_a_writer_warns_and_keeps_nothing():
    command = object.__new__(DynamicCPCLI)
    seen = []
    command.trainer = SimpleNamespace(callbacks=[], predict=lambda **options: seen.append(options))
    with pytest.warns(UserWarning, match="Nothing stores the predictions"):
        command.predict(model=1)
    assert seen == [{"return_predictions": False, "model": 1}]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_parses(path, tmp_path):
    done = cli("fit", "--config", str(path), "--print_config", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = yaml.safe_load(done.stdout)
    assert parsed["trainer"]["strategy"]["class_path"].endswith("DynamicCPStrategy")


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("--trainer.strategy.init_args.max_seqlen=4", "max_seqlen"),
        ("--model.init_args.model.layers=3", "layers"),
        ("--data.init_args.path=x", "path"),
        ("--trainer.strategy=[dynamic_cp]", "strategy"),
        ("--trainer.strategy.init_args.max_seqlen_per_dp_cp_rank=0", "must be 1 or more"),
    ],
)
def test_an_option_that_does_not_exist_is_named(override, found, tmp_path):
    config = str(ROOT / "configs" / "quickstart.yaml")
    done = cli("fit", "--config", config, override, cwd=tmp_path)
    assert done.returncode != 0
    assert found in done.stderr


def test_an_unknown_key_of_a_config_is_named(tmp_path):
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["trainer"]["strategy"]["init_args"]["max_seqlen_per_rank"] = 4
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    done = cli("fit", "--config", str(path), cwd=tmp_path)
    assert done.returncode != 0
    assert "max_seqlen_per_rank" in done.stderr


@pytest.mark.parametrize("option", [[], ["--traceback"]])
def test_a_data_path_that_does_not_exist_stops_every_process(option, tmp_path):
    config = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"
    data = ["--data.init_args.data=[nowhere/*.txt]", "--data.init_args.max_length=2048"]
    wrong = [*option, config, "--trainer.devices=2", *data]
    if option:
        done = cli("fit", *wrong, cwd=tmp_path, world=2)
        assert done.returncode != 0
        assert "Traceback" in done.stderr
    else:
        done = run(sys.executable, "-m", "lightning_dcp", "fit", *wrong, cwd=tmp_path)
        assert done.returncode != 0
        # By rank 0, if the other one has not waited for it in vain.
        told = re.findall(r"lightning-dcp fit(?: \(rank 1\))?: error: ", done.stderr)
        assert len(told) == 1, done.stderr
        assert done.stderr.count("nowhere/*.txt") == 1
        # Megatron-Core's own notices at import stay away, too.
        assert "Warning" not in done.stderr
        assert "Transformer Engine" not in done.stderr
        assert "Traceback" not in done.stderr


def help_of(*arguments: str, cwd: Path) -> str:
    done = cli("fit", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("option", "target"),
    [
        ("--model.help", "lightning_dcp.DynamicCPModule"),
        ("--data.help", "lightning_dcp.TextDataModule"),
        ("--data.help", "lightning_dcp.SyntheticDataModule"),
        ("--data.help", "lightning_dcp.ParquetDataModule"),
        ("--trainer.strategy.help", "lightning_dcp.DynamicCPStrategy"),
    ],
)
def test_every_option_has_a_help_text(option, target, tmp_path):
    text = help_of(option, target, cwd=tmp_path)
    options = re.split(r"\n  (?=--)", text)[1:]
    assert len(options) > 3
    for described in options:
        # Without a text of our own only the type and default in parentheses would be there.
        words = re.sub(r"\((type|required).*", "", " ".join(described.split()))
        name = described.split()[0]
        assert len(words.split()) > 3, f"{name} has no help text: {described}"


def readme_script() -> str:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return script


def test_the_readmes_script_starts_its_processes(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(readme_script().replace("devices=4", "devices=2").replace("=512", "=1024"))
    done = run(sys.executable, str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"step \d+ \| loss", done.stdout)) == 6


def test_the_readmes_script_runs_as_printed_where_torchrun_starts_it(tmp_path):
    printed = readme_script()
    assert len(printed.splitlines()) <= 40
    path = tmp_path / "script.py"
    path.write_text(printed)
    done = script(path, cwd=tmp_path, world=4)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"step \d+ \| loss ([\d.]+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert list(tmp_path.rglob("*.ckpt"))
