"""Parallel sizes: what they imply, and what is refused with both sides of the arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_dcp.parallel import ParallelSizes

NAMES = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)


def test_defaults_are_one_pool():
    sizes = ParallelSizes(world_size=6)
    assert sizes.dp_cp_size == 6


@pytest.mark.parametrize(
    ("world", "tp", "cp", "pool"),
    [(1, 1, 1, 1), (8, 2, 1, 4), (8, 2, 4, 4), (6, 2, 3, 3), (12, 3, 2, 4)],
)
def test_pool_size(world, tp, cp, pool):
    sizes = ParallelSizes(world_size=world, tensor_model_parallel_size=tp, context_parallel_size=cp)
    assert sizes.dp_cp_size == pool


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -2])
def test_sizes_below_one(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be 1 or more"):
        ParallelSizes(**{"world_size": 4, name: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [2.0, "2", True, None])
def test_sizes_that_are_no_ints(name, value):
    with pytest.raises(TypeError, match=f"{name}={value!r} is a .*give an int"):
        ParallelSizes(**{"world_size": 4, name: value})


def test_pipeline_and_experts_shape_the_pool():
    sizes = ParallelSizes(
        world_size=8, pipeline_model_parallel_size=2, expert_model_parallel_size=4
    )
    assert sizes.dp_cp_size == 4
    assert sizes.execution == "lockstep"
    tensor_parallel = ParallelSizes(world_size=8, tensor_model_parallel_size=2)
    assert tensor_parallel.execution == "free_running"


def test_experts_that_the_ranks_of_a_stage_cannot_share():
    message = (
        r"4 ranks of a pipeline stage \(world size 8 / PP 2\) are not a multiple of "
        "expert_model_parallel_size=3"
    )
    with pytest.raises(ValueError, match=message):
        ParallelSizes(world_size=8, pipeline_model_parallel_size=2, expert_model_parallel_size=3)


def test_virtual_stages_without_a_pipeline():
    with pytest.raises(ValueError, match="virtual_pipeline_model_parallel_size=2 cuts the stages"):
        ParallelSizes(world_size=4, virtual_pipeline_model_parallel_size=2)


def test_sequence_parallelism_without_tensor_parallelism():
    with pytest.raises(ValueError, match="tensor_model_parallel_size is 1"):
        ParallelSizes(world_size=4, sequence_parallel=True)
    with pytest.raises(TypeError, match="sequence_parallel must be True or False, found 1"):
        ParallelSizes(world_size=4, tensor_model_parallel_size=2, sequence_parallel=1)


@pytest.mark.parametrize(("world", "tp"), [(3, 2), (8, 3), (2, 4)])
def test_tensor_parallel_size_that_does_not_divide_the_world(world, tp):
    message = f"world size {world} is not a multiple of .* = {tp} x 1 = {tp}"
    with pytest.raises(ValueError, match=message):
        ParallelSizes(world_size=world, tensor_model_parallel_size=tp)


def test_context_parallel_size_that_does_not_divide_the_pool():
    message = (
        r"DPxCP pool of 3 ranks \(world size 6 / TP 2 / PP 1\) is not a multiple of "
        "context_parallel_size=2"
    )
    with pytest.raises(ValueError, match=message):
        ParallelSizes(world_size=6, tensor_model_parallel_size=2, context_parallel_size=2)


def test_sizes_are_frozen():
    sizes = ParallelSizes(world_size=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sizes.world_size = 4
