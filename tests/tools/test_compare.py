"""The comparison's arithmetic, and one comparison as a user runs it."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from command_line import compare_in_workers
from lightning_dcp.tools.compare.command import compare, main, static_size
from lightning_dcp.tools.compare.comparison import TimedStep, compare_steps, describe
from lightning_dcp.tools.compare.measured_fit import MeasuredCLI
from lightning_dcp.tools.lightning_cli import cli_options


def run(*seconds: float, tokens: int = 100, loss: float = 2.0) -> list[TimedStep]:
    return [
        TimedStep(
            step=6 + i,
            seconds=time,
            predicted_seconds=2 * time,
            tokens=tokens - 4,
            sequence_tokens=tokens,
            loss=loss,
            cp_sizes={1: 2, 4: 1},
        )
        for i, time in enumerate(seconds)
    ]


def test_the_ratio_is_of_all_steps_and_its_spread_of_each():
    # Static 2 and 4 seconds on average, dynamic 1 and 4: 6 / 5; step by step 2 and 1.
    static = [run(1.0, 5.0), run(3.0, 3.0)]
    dynamic = [run(1.0, 4.0), run(1.0, 4.0)]
    comparison = compare_steps(static, dynamic)
    assert comparison.ratio == pytest.approx(6 / 5)
    assert comparison.ratio_quartiles == pytest.approx((1.25, 1.75))
    assert comparison.static_seconds == 3.0
    assert comparison.dynamic_seconds == 2.5
    assert comparison.static_tokens_per_second == pytest.approx(100 / 3.0)
    assert comparison.cp_sizes == {1: 4, 4: 2}
    assert comparison.predicted_ratio == pytest.approx(6 / 5)
    assert "1.200 times as fast" in describe(comparison)
    assert "plan predicts 1.200" in describe(comparison)


def test_losses_are_compared_step_by_step():
    comparison = compare_steps([run(1.0, 1.0)], [run(1.0, 1.0, loss=2.002)])
    assert comparison.mean_loss_difference == pytest.approx(1e-3)
    assert comparison.max_loss_difference == pytest.approx(1e-3)


def test_different_tokens_give_no_ratio():
    comparison = compare_steps([run(1.0)], [run(1.0, tokens=101)])
    assert comparison.ratio is None
    assert comparison.ratio_quartiles is None
    assert "no ratio: the runs processed different tokens, 100 and 101" in describe(comparison)
    # As many in all, but not the same in each step.
    mixed = [run(1.0, 1.0)]
    swapped = [
        [replace(mixed[0][0], sequence_tokens=99), replace(mixed[0][1], sequence_tokens=101)]
    ]
    assert compare_steps(mixed, swapped).ratio is None


def test_runs_that_cannot_be_compared():
    with pytest.raises(ValueError, match="different steps"):
        compare_steps([run(1.0, 1.0)], [run(1.0)])
    with pytest.raises(ValueError, match="at least one step"):
        compare_steps([[]], [[]])
    with pytest.raises(ValueError, match="1 static and 0 dynamic"):
        compare_steps([run(1.0)], [])


CONFIG = {
    "seed_everything": 0,
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "enable_model_summary": False,
        "strategy": {
            "class_path": "lightning_dcp.DynamicCPStrategy",
            "init_args": {"max_seqlen_per_dp_cp_rank": 64, "planner": "longest_sequence"},
        },
    },
    "model": {
        "class_path": "lightning_dcp.DynamicCPModule",
        "init_args": {"model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}},
    },
    "data": {
        "class_path": "lightning_dcp.SyntheticDataModule",
        "init_args": {
            "max_length": 128,
            "lengths": {"kind": "uniform", "low": 4, "high": 60},
            "global_batch_size": 6,
            "num_batches": 8,
            "num_workers": 0,
        },
    },
}


# What would not go together with what compare asks of the Trainer, or end or slow its steps.
CALLBACKS = [
    {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": options}
    for name, options in {
        "TQDMProgressBar": {},
        "ModelCheckpoint": {"every_n_train_steps": 1, "save_top_k": -1},
        "EarlyStopping": {"monitor": "nothing_logs_this"},
        "LearningRateMonitor": {},
        "DeviceStatsMonitor": {},
    }.items()
]


def test_a_comparison_from_one_checkpoint(tmp_path, capsys, monkeypatch):
    compare_in_workers(monkeypatch, 2)
    config = tmp_path / "config.yaml"
    content = copy.deepcopy(CONFIG)
    content["trainer"]["callbacks"] = [*CALLBACKS, {"class_path": "lightning_dcp.StepReport"}]
    logger = {"save_dir": str(tmp_path / "logs")}
    content["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": logger,
    }
    config.write_text(yaml.safe_dump(content))
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    comparison = compare(
        [str(config)], steps=2, warmup_steps=1, rounds=1, json=str(out), plot=str(picture)
    )
    assert comparison.ratio is not None
    assert comparison.num_steps == 2
    # The losses of the same step, from the same weights: the layout changes rounding alone.
    assert comparison.max_loss_difference < 1e-5
    runs = json.loads(out.read_text())["runs"]
    assert [step["step"] for step in runs["static"][0]] == [3, 4]
    assert all(set(step["cp_sizes"]) == {"2"} for step in runs["static"][0])
    assert any("1" in step["cp_sizes"] for step in runs["dynamic"][0])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "times as fast as static" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.yaml",
        out.name,
        picture.name,
    ]


@pytest.mark.parametrize(
    ("options", "config", "overrides"),
    [
        (["--config=a.yaml"], ["a.yaml"], []),
        (["--config=a.yaml", "-c", "b.yaml"], ["a.yaml", "b.yaml"], []),
        (["--config", "a.yaml", "--config", "b.yaml"], ["a.yaml", "b.yaml"], []),
        (
            ["--config=[a.yaml,b.yaml]", "--model.model.num_layers", "2", "--trainer.devices=2"],
            ["a.yaml", "b.yaml"],
            ["--model.model.num_layers", "2", "--trainer.devices=2"],
        ),
    ],
)
def test_the_command_takes_configs_and_options_of_fit(monkeypatch, options, config, overrides):
    seen = []

    @functools.wraps(compare)
    def watched(config, **given):
        seen.append((config, given))

    monkeypatch.setattr("lightning_dcp.tools.compare.command.compare", watched)
    main([*options, "--steps=3", "--json", "out.json"])
    ((files, given),) = seen
    assert (files, given["overrides"]) == (config, overrides)
    assert (given["steps"], given["json"]) == (3, "out.json")


def test_every_run_gets_all_configs_and_options(monkeypatch, tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    seen = []

    def run(command, **options):
        seen.append(command)
        return SimpleNamespace(returncode=1, stdout="", stderr="lightning-dcp fit: error: told\n")

    monkeypatch.setattr("lightning_dcp.tools.compare.command.subprocess.run", run)
    with pytest.raises(ValueError, match="told"):
        compare([str(config), str(config)], overrides=["--trainer.devices", "4"])
    assert seen[0][4:8] == [f"--config={config}", f"--config={config}", "--trainer.devices", "4"]


def test_a_run_that_fails_shows_what_it_printed(tmp_path):
    # The one run in a process of its own, as a user's are.
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "no_such_key": 1}))
    with pytest.raises(ValueError, match="no option --no_such_key"):
        compare([str(config)], steps=1, warmup_steps=0, rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": []}, "needs --config"),
        ({"config": ["nowhere.yaml"]}, "nowhere.yaml: there is no such file"),
        ({"steps": 0}, "steps=0 must be 1 or more"),
        ({"rounds": 0}, "rounds=0 must be 1 or more"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be 0 or more"),
    ],
)
def test_bad_options(options, message, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    with pytest.raises(ValueError, match=message):
        compare(**{"config": [str(config)], **options})


def test_a_static_size_that_the_config_does_not_tell(tmp_path):
    config = tmp_path / "config.yaml"
    trainer = {**CONFIG["trainer"], "devices": "auto"}
    config.write_text(yaml.safe_dump({**CONFIG, "trainer": trainer}))
    with pytest.raises(ValueError, match="give --context_parallel_size"):
        compare([str(config)])


def test_the_static_size_is_the_configs_or_its_pool(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(yaml.safe_dump(CONFIG))
    options = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}
    override = {"trainer": {"devices": 8, "strategy": {"init_args": options}}}
    second.write_text(yaml.safe_dump(override))
    assert static_size([str(first)]) == 2
    assert static_size([str(first), str(second)]) == 2
    # On the command line init_args can be left out.
    four = ["--trainer.devices", "16", "--trainer.strategy.tensor_model_parallel_size=4"]
    assert static_size([str(first), str(second)], four) == 2
    assert static_size([str(first)], ["--trainer.devices=8"]) == 8
    options["context_parallel_size"] = 4
    second.write_text(yaml.safe_dump(override))
    assert static_size([str(first), str(second)]) == 4


@pytest.mark.parametrize("name", ["quickstart", "static_cp", "mtp", "moe_small", "rl_r3"])
def test_every_small_config_can_be_measured(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-dcp"])
    path = Path(__file__).parents[2] / "configs" / f"{name}.yaml"
    cli = MeasuredCLI(**cli_options(), args=[f"--config={path}"], run=False)
    callbacks = [type(one).__name__ for one in cli.trainer.callbacks]
    assert "StepReport" in callbacks
    assert not {"ModelCheckpoint", "TQDMProgressBar", "LearningRateMonitor"} & set(callbacks)
    assert not cli.trainer.loggers
    assert not list(tmp_path.iterdir())
