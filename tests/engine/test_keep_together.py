"""Samples that must share a micro-batch, from a key of the batch to the plan."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import trainers
from distributed import run_distributed
from lightning_dcp.engine import DynamicCPEngine, PlanSettings
from lightning_dcp.parallel import ParallelSizes, setup_parallel

LENGTHS = [30, 4, 5, 29, 12, 7, 3, 11]
PAIRS = [0, 1, 2, 0, 3, 1, 2, 3]


def prepare(batches: list[dict], keep_together: str | None = "pair_ids"):
    """What each rank's own batch gives: pairs that share a group, and the micro-batch's extras."""
    context = setup_parallel(ParallelSizes(world_size=dist.get_world_size()))
    engine = DynamicCPEngine(
        context, PlanSettings.of_run(context.sizes, max_seqlen_per_dp_cp_rank=40)
    )
    ids = [torch.tensor(row) for row in trainers.random_batch(LENGTHS, seed=0)]
    batch = {"input_ids": torch.nested.nested_tensor(ids, layout=torch.jagged)}
    try:
        planned = engine.prepare(batch | batches[dist.get_rank()], keep_together=keep_together)
        held = [
            (micro_batch.sample_ids, micro_batch.extras["pair_ids"].tolist())
            for micro_batch in engine.micro_batches(planned)
        ]
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()
        context.destroy()
    return planned.plan.keep_together, held


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_pairs_share_a_micro_batch(dtype):
    batch = {"pair_ids": torch.tensor(PAIRS, dtype=dtype)}
    for found, held in run_distributed(prepare, 2, [batch, batch]):
        assert found == tuple(PAIRS)
        for sample_ids, pairs in held:
            assert [PAIRS[i] for i in sample_ids] == pairs
            assert all(pairs.count(pair) == 2 for pair in pairs)


def test_without_the_argument_they_are_free():
    batch = {"pair_ids": torch.tensor(PAIRS)}
    results = run_distributed(prepare, 2, [batch, batch], None)
    assert [found for found, _ in results] == [None, None]
    pairs = [pairs for _, held in results for _, pairs in held]
    assert any(some.count(pair) == 1 for some in pairs for pair in some)


def test_ranks_with_other_pairs_are_refused():
    batches = [{"pair_ids": torch.tensor(PAIRS)}, {"pair_ids": torch.tensor(PAIRS[::-1])}]
    batches[1]["pair_ids"][0] = 9
    for message in run_distributed(prepare, 2, batches):
        assert "The ranks hold different global batches" in message


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "keep_together='pair_ids': the batch has no such key"),
        ({"pair_ids": torch.zeros(8)}, "keep_together needs a tensor of ints, found torch.float32"),
        ({"pair_ids": torch.zeros(8, 2, dtype=torch.int64)}, "found a tensor of shape (8, 2)"),
        ({"pair_ids": torch.zeros(8, dtype=torch.int64)}, "puts 8 samples in one micro-batch"),
    ],
)
def test_units_that_cannot_work(batch, message):
    (found,) = run_distributed(prepare, 1, [batch])
    assert message in found
