"""A calibration file that every rank reads: the same on all of them, or an error on all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from distributed import run_distributed
from lightning_dcp.engine import read_cost_model
from lightning_dcp.planning import CPU, LLAMA_8B, CostModel
from lightning_dcp.planning.cost.calibration_file import Calibration


def read(folder, names, tp_size=1):
    path = f"{folder}/{names[dist.get_rank()]}.json"
    try:
        return read_cost_model(path, model=LLAMA_8B, tp_size=tp_size, group=dist.group.WORLD)
    except ValueError as error:
        return str(error)


@pytest.fixture
def folder(tmp_path):
    measured = Calibration(
        cost_model=CostModel.from_sizes(LLAMA_8B, CPU),
        model=LLAMA_8B,
        num_ranks=2,
        tensor_model_parallel_size=1,
        precision="32-true",
        memory_bytes=1e9,
        r_squared=0.99,
        machine={},
    )
    (tmp_path / "a.json").write_text(measured.to_json())
    slower = replace(measured, cost_model=replace(measured.cost_model, seconds_per_row=1.0))
    (tmp_path / "b.json").write_text(slower.to_json())
    return tmp_path


def test_the_same_file_gives_its_cost_model(folder):
    found = run_distributed(read, 2, str(folder), "aa")
    assert found == [CostModel.from_sizes(LLAMA_8B, CPU)] * 2


def test_other_figures_on_one_rank_are_an_error_on_all(folder):
    for message in run_distributed(read, 2, str(folder), "ab"):
        assert "holds other figures on rank 1 than on rank 0" in message


def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(folder):
    first, second = run_distributed(read, 2, str(folder), "ax")
    assert "Rank 1 refused cost_model=" in first
    assert "x.json cannot be read" in second
