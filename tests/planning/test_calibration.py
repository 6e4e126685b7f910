"""Fitting a cost model, and the file that keeps it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_dcp.planning import (
    H200,
    LLAMA_8B,
    QWEN3_30B_A3B,
    CostModel,
    MeasuredMicroBatch,
    fit_cost_model,
    predict,
    r_squared,
)
from lightning_dcp.planning.cost.calibration_file import Calibration, read_calibration

TRUTH = replace(CostModel.from_sizes(QWEN3_30B_A3B, H200, ep_size=8), thin_rows=100.0)
BASE = CostModel(thin_rows=100.0, model="small")


def measured(
    truth: CostModel, sizes: tuple[int, ...], *, noise: float = 0.0, seed: int = 0
) -> list[MeasuredMicroBatch]:
    """What a machine that follows ``truth`` would measure."""
    rng = np.random.default_rng(seed)
    result = []
    for size in sizes:
        for number in (1, 1, 2, 3, 4, 6):
            lengths = tuple(rng.integers(64, 4000 * size, number).tolist())
            one = MeasuredMicroBatch(lengths=lengths, size=size, seconds=1.0)
            seconds = float(predict(truth, [one])[0]) * (1 + noise * rng.standard_normal())
            result.append(replace(one, seconds=seconds))
    return result


def test_exact_times_are_found_again() -> None:
    truth = replace(TRUTH, overlap=0.0)
    fitted = fit_cost_model(measured(truth, (1, 2, 4, 8, 16)), base=BASE)
    for name in (
        "fixed_seconds",
        "seconds_per_row",
        "seconds_per_pair",
        "kv_seconds_per_row_within",
        "kv_seconds_per_row_across",
        "hop_seconds_within",
        "hop_seconds_across",
    ):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-6), name
    assert fitted.overlap == 0.0
    assert fitted.model == "small"


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.8])
def test_held_out_times_are_explained(overlap: float) -> None:
    truth = replace(TRUTH, overlap=overlap)
    fitted = fit_cost_model(measured(truth, (1, 2, 4, 8, 16), noise=0.03), base=BASE)
    assert r_squared(fitted, measured(truth, (1, 2, 4, 8, 16), noise=0.03, seed=1)) > 0.98


def test_figures_that_were_not_measured_are_the_bases() -> None:
    alone = fit_cost_model(measured(TRUTH, (1,)), base=BASE)
    assert alone.seconds_per_row == pytest.approx(TRUTH.seconds_per_row, rel=1e-6)
    for name in ("kv_seconds_per_row_within", "hop_seconds_within", "hop_seconds_across",
                 "overlap", "activation_bytes_per_row", "ranks_per_node"):  # fmt: skip
        assert getattr(alone, name) == getattr(BASE, name)
    node = fit_cost_model(measured(TRUTH, (1, 2, 4)), base=BASE)
    assert node.hop_seconds_across == BASE.hop_seconds_across
    assert node.hop_seconds_within == pytest.approx(TRUTH.hop_seconds_within, rel=0.2)


def test_no_figure_is_negative() -> None:
    """Times that shrink with the group size by more than the rows pull hops below zero."""
    odd = [
        MeasuredMicroBatch(lengths=(64 * k,), size=size, seconds=1e-3 * k / size**2)
        for size in (1, 2, 4)
        for k in (1, 2, 5, 9)
    ]
    fitted = fit_cost_model(odd, base=BASE)
    assert fitted.hop_seconds_within == 0.0


def test_too_few_measurements() -> None:
    with pytest.raises(ValueError, match="2 measured micro-batches for 3 figures to fit"):
        fit_cost_model(measured(TRUTH, (1,))[:2], base=BASE)


def test_times_that_do_not_grow() -> None:
    flat = [MeasuredMicroBatch(lengths=(n,), size=1, seconds=1.0) for n in (10, 100, 1000, 5000)]
    with pytest.raises(ValueError, match="do not grow with their rows"):
        fit_cost_model(flat, base=BASE)
    with pytest.raises(ValueError, match=r"4 measured .* all took the same time"):
        r_squared(BASE, flat)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": ()}, "lengths"),
        ({"lengths": (3, 0)}, "lengths"),
        ({"size": 0}, "size=0"),
        ({"seconds": 0.0}, "seconds=0.0"),
        ({"seconds": float("inf")}, "seconds=inf"),
    ],
)
def test_a_measurement_that_cannot_be(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeasuredMicroBatch(**{"lengths": (8,), "size": 1, "seconds": 1.0} | change)


# The file


def calibration(**changes: object) -> Calibration:
    return Calibration(**{
        "cost_model": CostModel.from_sizes(LLAMA_8B, H200), "model": LLAMA_8B, "num_ranks": 2,
        "tensor_model_parallel_size": 1, "precision": "32-true", "memory_bytes": 1e9,
        "r_squared": 0.9, "machine": {"name": "some"},
    } | changes)  # fmt: skip


def read(folder: Path, text: str, **options: object) -> Calibration:
    path = folder / "c.json"
    path.write_text(text)
    return read_calibration(str(path), **options)


def test_a_file_gives_the_same_calibration_back(tmp_path: Path) -> None:
    assert read(tmp_path, calibration().to_json()) == calibration()
    assert read(tmp_path, calibration().to_json(), model=LLAMA_8B, tp_size=1) == calibration()


def test_a_file_of_another_model_or_tensor_parallel_size(tmp_path: Path) -> None:
    text = calibration().to_json()
    with pytest.raises(ValueError, match=r"c.json is the calibration of another model: num_layers"):
        read(tmp_path, text, model=QWEN3_30B_A3B)
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=1, this is for 2"):
        read(tmp_path, text, tp_size=2)
    changed = calibration(cost_model=CostModel()).to_json()
    with pytest.raises(ValueError, match=r"is for the model \(unknown\), .* changed by hand"):
        read(tmp_path, changed)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_a_file_of_another_version(version: object, tmp_path: Path) -> None:
    content = json.loads(calibration().to_json())
    for changed in (
        content | {"format_version": version},
        content | {"cost_model": content["cost_model"] | {"format_version": version}},
    ):
        with pytest.raises(ValueError, match=f"format_version={version!r}, this release reads 1"):
            read(tmp_path, json.dumps(changed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"c.json is no JSON"),
        ("[1]", r"c.json is no calibration: .* found no object"),
        ('{"kind": "plan"}', r"c.json is no calibration: .* found kind='plan'"),
        (
            '{"kind": "lightning-dcp calibration", "format_version": 1, "speed": 3}',
            r"missing \['cost_model.* unknown \['speed'\]",
        ),
    ],
)
def test_a_file_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overlap": -1.0}, r"c.json: overlap=-1.0"),
        ({"speed": 3}, r"missing \[\], unknown \['speed'\]"),
    ],
)
def test_a_file_with_a_figure_that_cannot_be(change: dict, message: str, tmp_path: Path) -> None:
    content = json.loads(calibration().to_json())
    content["cost_model"] |= change
    with pytest.raises(ValueError, match=message):
        read(tmp_path, json.dumps(content))
