"""``plan --model run.yaml`` predicts the plans that ``fit --config run.yaml`` makes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jsonargparse import ArgumentParser

from lightning_dcp import DynamicCPModule, DynamicCPStrategy
from lightning_dcp.cli import main
from lightning_dcp.data.lengths import LengthDistribution
from lightning_dcp.planning import PlanSettings, make_plan, preset_of
from lightning_dcp.planning.cost.calibration_file import Calibration
from lightning_dcp.tools.plan.run import PredictedRun, RunOptions

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def settings_of_fit(content: dict[str, Any]) -> PlanSettings:
    """How ``fit`` plans: from the strategy and the module that the config makes."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(DynamicCPStrategy, "strategy")
    parser.add_subclass_arguments(DynamicCPModule, "model")
    trainer = content["trainer"]
    given = {"strategy": trainer["strategy"], "model": content["model"]}
    made = parser.instantiate(parser.parse_object(given))
    on_cpu = trainer["accelerator"] == "cpu"
    world_size = trainer["devices"] * trainer.get("num_nodes", 1)
    return made.strategy.plan_settings(
        made.strategy.parallel_sizes(world_size),
        made.model.model_config,
        device=preset_of("cpu") if on_cpu else preset_of("cuda", "NVIDIA H200"),
        max_length=content["data"]["init_args"].get("max_length"),
    )


def batches(content: dict[str, Any]) -> list[np.ndarray]:
    """A few batches of lengths as the config's data has them."""
    data = content["data"]["init_args"]
    most = data["max_length"]
    lengths = LengthDistribution(**data.get("lengths") or {"low": 64, "high": most})
    rng = np.random.default_rng(0)
    size = data["global_batch_size"]
    return [np.minimum(lengths.sample(size, rng), most) for _ in range(2)]


def check_same(path: Path, content: dict[str, Any], **options: Any) -> None:
    fit = settings_of_fit(content)
    run = PredictedRun.read(RunOptions(model=str(path), **options))
    size = run.options.context_parallel_size
    predicted = run.settings(str(run.planner), context_parallel_size=size)
    assert predicted == fit
    for lengths in batches(content):
        assert make_plan(lengths, predicted) == make_plan(lengths, fit)


def test_there_are_configs():
    assert len(CONFIGS) >= 8


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_planned_as_predicted(path):
    check_same(path, yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "changed",
    [
        {"max_seqlen_per_dp_cp_rank": "auto"},
        {"max_seqlen_per_dp_cp_rank": "auto", "pad_to_length_bucket": 96},
        {"pad_to_length": 1024},
        {"max_seqlen_per_dp_cp_rank": 2048, "fp8": "hybrid"},
        {"tensor_model_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 4096},
        {"pipeline_model_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 4096},
        {"planner": "longest_sequence", "recompute": {"granularity": "full"}},
        {"planner": "static", "context_parallel_size": 4},
        {"dynamic_context_parallel": False, "planner": None, "context_parallel_size": 4},
        {"context_parallel_size": 2},
    ],
    ids=str,
)
def test_every_option_that_plans_depend_on_is_read(tmp_path, changed):
    content = copy.deepcopy(yaml.safe_load(CONFIGS[-1].parent.joinpath("mtp.yaml").read_text()))
    content["trainer"]["strategy"]["init_args"].update(changed)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    check_same(path, content)


def json_of(path: Path, *arguments: str) -> dict[str, Any]:
    lengths = ["--lengths.low=64", "--lengths.high=1024", "--global_batch_size=8"]
    main(["plan", *lengths, "--num_batches=1", f"--json={path}", *arguments])
    return json.loads(path.read_text())


def test_options_override_the_config(tmp_path):
    config = CONFIGS[0].parent / "moe_small.yaml"
    path = tmp_path / "plan.json"
    as_configured = json_of(path, f"--model={config}")
    assert (as_configured["num_ranks"], as_configured["execution"]) == (4, "lockstep")
    changed = json_of(
        path, f"--model={config}", "--num_ranks=8", "--max_seqlen_per_dp_cp_rank=1024",
        "--execution=free_running", "--fp8",
    )  # fmt: skip
    assert (changed["num_ranks"], changed["max_seqlen_per_dp_cp_rank"]) == (8, 1024)
    assert (changed["execution"], changed["fp8"]) == ("free_running", True)
    assert changed["model"] == as_configured["model"]
    halved = json_of(path, f"--model={config}", "--tp_size=2")
    assert (halved["num_ranks"], halved["tp_size"]) == (2, 2)


def test_the_configs_calibration_is_used(tmp_path):
    content = yaml.safe_load((CONFIGS[0].parent / "quickstart.yaml").read_text())
    fit = settings_of_fit(content)
    run = PredictedRun.read(RunOptions(model=str(CONFIGS[0].parent / "quickstart.yaml")))
    measured = tmp_path / "calibration.json"
    text = Calibration(
        cost_model=fit.cost_model,
        model=run.model,
        num_ranks=4,
        tensor_model_parallel_size=1,
        precision="32-true",
        memory_bytes=64e9,
        r_squared=0.99,
        machine={"device": "CPU"},
    ).to_json()
    measured.write_text(text)
    content["trainer"]["strategy"]["init_args"]["cost_model"] = str(measured)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    check_same(path, content)
    assert PredictedRun.read(RunOptions(model=str(path))).calibration is not None
    # A device that is asked for takes its place.
    assert PredictedRun.read(RunOptions(model=str(path), device="h100")).calibration is None


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"devices": "auto"}, "how large is the pool"),
        ({"strategy": "dynamic_cp"}, "how large is the cap"),
        ({"devices": 3, "num_nodes": 1}, None),
    ],
)
def test_what_a_config_leaves_open_is_asked_for(tmp_path, capsys, changed, found):
    content = yaml.safe_load((CONFIGS[0].parent / "quickstart.yaml").read_text())
    content["trainer"] |= changed
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    if found is None:
        assert json_of(tmp_path / "plan.json", f"--model={path}")["num_ranks"] == 3
        return
    with pytest.raises(SystemExit) as stopped:
        json_of(tmp_path / "plan.json", f"--model={path}")
    assert found in str(stopped.value.code)


def test_fp8_pads_more(tmp_path):
    path = tmp_path / "plan.json"
    options = ["--num_ranks=4", "--max_seqlen_per_dp_cp_rank=1024"]
    plain, eight_bits = json_of(path, *options), json_of(path, *options, "--fp8")
    assert (plain["fp8"], eight_bits["fp8"]) == (False, True)
    for a, b in zip(plain["planners"], eight_bits["planners"], strict=True):
        assert b["padding_share"] > a["padding_share"]
