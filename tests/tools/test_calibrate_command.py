"""``lightning-dcp calibrate`` on two processes, and the strategy that reads its file."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from distributed import run_distributed
from lightning_dcp import DynamicCPModule, DynamicCPStrategy, ModelConfig, SyntheticDataModule
from lightning_dcp.cli import main
from lightning_dcp.config.padding import rows_per_rank
from lightning_dcp.data import LengthDistribution
from lightning_dcp.planning import evaluate
from lightning_dcp.planning.cost.calibration_file import read_calibration
from lightning_dcp.tools.calibrate.command import CalibrateOptions
from lightning_dcp.tools.calibrate.measuring import TimingJob, measure, shapes_to_time
from lightning_dcp.tools.options import parse_options

# The vocabulary makes rows dear, so that their times grow on a busy machine too.
MODEL = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=8192)
OTHER = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=8192)
NUMBERS = [
    f"--model_config.{name}={getattr(MODEL, name)}"
    for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """Folder with the files of a tiny calibration on two processes."""
    folder = tmp_path_factory.mktemp("calibration")
    main(
        ["calibrate", *NUMBERS, "--num_processes=2", "--max_seqlen_per_dp_cp_rank=512",
         "--shortest=64", "--repeats=2", f"--output={folder}/calibration.json",
         f"--plot={folder}/calibration.png"]
    )  # fmt: skip
    return folder


def test_the_file_names_the_model_and_what_was_measured(calibrated):
    path = str(calibrated / "calibration.json")
    calibration = read_calibration(path, model=MODEL.sizes, tp_size=1)
    assert calibration.model == MODEL.sizes
    assert calibration.cost_model.model == MODEL.sizes.fingerprint
    assert calibration.cost_model.seconds_per_row > 0
    assert (calibration.num_ranks, calibration.precision) == (2, "32-true")
    assert calibration.machine["torch"]
    assert np.isfinite(calibration.r_squared)
    assert json.loads(calibration.to_json()) == json.loads((calibrated / path).read_text())


def test_the_picture_is_a_png(calibrated):
    data = (calibrated / "calibration.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_plan_reads_the_file(calibrated, capsys):
    main(
        ["plan", "--num_ranks=2", "--max_seqlen_per_dp_cp_rank=512", "--lengths.low=64",
         "--global_batch_size=8", "--num_batches=2",
         f"--calibration={calibrated}/calibration.json"]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "balanced" in out
    assert "note:" not in out


def fit(path: str, model: ModelConfig, missing_on: int | None = None) -> tuple[str, str]:
    if missing_on == int(os.environ["RANK"]):
        path += ".gone"
    strategy = DynamicCPStrategy(max_seqlen_per_dp_cp_rank=256, cost_model=path)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = SyntheticDataModule(
        vocab_size=64, global_batch_size=4, num_batches=1, num_workers=0, max_length=512,
        lengths=LengthDistribution(low=32, high=512),
    )  # fmt: skip
    module = DynamicCPModule(model)
    try:
        trainer.fit(module, data)
    except ValueError as error:
        return "refused", str(error)
    assert module.last_step is not None
    plan = module.last_step.plan
    assert plan.report is not None
    assert plan.report == evaluate(
        plan, read_calibration(path).cost_model, execution="free_running"
    )
    assert plan.report != evaluate(plan)
    return "ran", str(plan.report.predicted_seconds)


def test_the_strategy_plans_with_the_calibrated_cost_model(calibrated):
    path = str(calibrated / "calibration.json")
    outcomes = run_distributed(fit, 2, path, MODEL, init_process_group=False)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == "ran"


def test_the_strategy_refuses_another_models_file_on_every_rank(calibrated):
    path = str(calibrated / "calibration.json")
    outcomes = run_distributed(fit, 2, path, OTHER, init_process_group=False)
    for kind, message in outcomes:
        assert kind == "refused"
        assert "num_layers=1 there and 2 here" in message


def test_a_file_that_is_missing_on_one_rank_stops_all(calibrated):
    path = str(calibrated / "calibration.json")
    outcomes = run_distributed(fit, 2, path, MODEL, 1, init_process_group=False)
    assert [kind for kind, _ in outcomes] == ["refused", "refused"]
    assert "Rank 1 refused cost_model=" in outcomes[0][1]
    assert "cannot be read" in outcomes[1][1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_grid_keeps_the_cap_and_varies_everything(num_ranks, tp_size):
    shapes = shapes_to_time(num_ranks, cap=512, tp_size=tp_size, shortest=32, seed=0)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        rows = sum(rows_per_rank(length, shape.size, tp_size) for length in shape.lengths)
        assert 0 < rows <= 512
    for size in {1, 2, num_ranks} & set(range(1, num_ranks + 1)):
        of_size = [shape.lengths for shape in shapes if shape.size == size]
        assert len({length for lengths in of_size for length in lengths}) > 5
        assert {len(lengths) for lengths in of_size} >= {1, 2}
        assert any(len(set(lengths)) > 1 for lengths in of_size)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], "which model?"),
        ([*NUMBERS, "--shortest=600"], "shortest=600 is above"),
        ([*NUMBERS, "--shortest=512", "--num_processes=1"], "too few to fit"),
        ([*NUMBERS, "--repeats=0"], "repeats=0 must be 1 or more"),
        ([*NUMBERS, "--quantile=10"], "quantile=10.0 must be 0 to 1"),
        ([*NUMBERS, "--num_processes=0"], "num_processes=0"),
        ([*NUMBERS, "--num_processes=3", "--tensor_model_parallel_size=2"], "world size 3"),
        ([*NUMBERS, "--tensor_model_parallel_size=4"], "does not divide"),
        ([*NUMBERS, "--plot=a.pdf"], ".png"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(options, found):
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate", "--max_seqlen_per_dp_cp_rank=512", *options])
    assert found in str(stopped.value.code)


def test_a_model_with_experts_in_some_layers_is_not_built(tmp_path):
    path = tmp_path / "config.json"
    config = {
        "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99,
        "intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="experts in 3 of 4 layers"):
        main(["calibrate", "--max_seqlen_per_dp_cp_rank=512", f"--model={path}"])


def times_of(model):
    shapes = shapes_to_time(1, cap=256, tp_size=1, shortest=64, seed=0)
    options = {"tp_size": 1, "dtype": torch.float32, "repeats": 1, "quantile": 0.5, "seed": 0}
    return [one.seconds for one in measure(TimingJob(model=model, shapes=shapes, **options))]


@pytest.mark.parametrize(
    "option", ["head=value", "mtp_num_layers=1", "moe={num_experts: 4, z_loss_coeff: 0.1}"]
)
def test_models_that_need_more_than_labels_or_none_are_measured_too(option):
    args = [*NUMBERS, f"--model_config.{option}", "--max_seqlen_per_dp_cp_rank=256"]
    (options,) = parse_options(
        args, command="calibrate", description="", classes=(CalibrateOptions,)
    )
    (seconds,) = run_distributed(times_of, 1, options.config(), init_process_group=False)
    assert min(seconds) > 0
