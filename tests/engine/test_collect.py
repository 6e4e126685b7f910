"""Collected outputs: each sample once, or an error that names it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from distributed import run_distributed
from lightning_dcp.engine.collect import collect_outputs
from lightning_dcp.parallel import ParallelSizes, setup_parallel
from lightning_dcp.planning import plan_global_batch
from lightning_dcp.planning.plan import Group, Step

LENGTHS = [5, 3, 9]


def collect(ids, bucket=None, of_own_token=()):
    """What becomes of row numbers under a plan whose only step has the samples ``ids``."""
    context = setup_parallel(ParallelSizes(world_size=1))
    plan = plan_global_batch(
        LENGTHS, num_ranks=1, max_seqlen_per_dp_cp_rank=24, pad_to_length_bucket=bucket
    )
    plan = dataclasses.replace(plan, steps=(Step((Group(0, 1, ids),)),))
    rows = torch.cat([torch.arange(LENGTHS[sample]) + 10 * sample for sample in ids])
    if bucket is not None:
        rows = torch.cat([rows, rows.new_full((-len(rows) % bucket,), 99)])
    try:
        found = collect_outputs([{"rows": rows}], plan, context, of_own_token=of_own_token)["rows"]
    except ValueError as error:
        return str(error)
    finally:
        context.destroy()
    return [row.tolist() for row in found.unbind()]


@pytest.mark.parametrize("bucket", [None, 12])
def test_each_output_stands_at_the_token_after_its_row(bucket):
    (found,) = run_distributed(collect, 1, (1, 0, 2), bucket)
    assert found == [[0, 0, 1, 2, 3], [0, 10, 11], [0, *range(20, 28)]]


def test_an_output_of_the_rows_own_token_stands_there():
    (found,) = run_distributed(collect, 1, (1, 0, 2), of_own_token=["rows"])
    assert found == [[0, 1, 2, 3, 4], [10, 11, 12], [*range(20, 29)]]


@pytest.mark.parametrize(
    ("ids", "message"),
    [((0, 2), "Sample 1 is there 0 times"), ((2, 0, 1, 0), "Sample 0 is there 2 times")],
)
def test_a_sample_that_is_missing_or_there_twice(ids, message):
    assert message in run_distributed(collect, 1, ids)[0]
