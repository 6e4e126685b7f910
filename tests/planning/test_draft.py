"""Drafts for lengths whose long samples leave ranks over, the smallest cases by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lightning_dcp.planning import CostModel, PlanRequest, PlanSettings, plan_global_batch
from lightning_dcp.planning.planners import balanced
from lightning_dcp.planning.planners.draft import Draft, make_draft
from lightning_dcp.planning.planners.packs import Pack
from lightning_dcp.planning.planners.sizing import Sizer

ROWS_ONLY = CostModel(
    seconds_per_row=1.0,
    fixed_seconds=0.0,
    seconds_per_pair=0.0,
    thin_rows=0.0,
    kv_seconds_per_row_within=0.0,
    kv_seconds_per_row_across=0.0,
    hop_seconds_within=0.0,
    hop_seconds_across=0.0,
)


def sizer_of(lengths: list[int], num_ranks: int) -> Sizer:
    """A cap of 100 rows, each of which takes a second."""
    settings = PlanSettings(
        num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=100, cost_model=ROWS_ONLY
    )
    return Sizer(PlanRequest(tuple(lengths), settings))


def contents(draft: Draft) -> list[list[Pack]]:
    return [sorted(packs) for packs in draft.packs]


def test_long_samples_share_a_larger_group_beside_the_longest() -> None:
    sizer = sizer_of([400, 120, 120, 120], 8)
    apart = sizer.estimate(math.inf)
    # Two of the three, on two ranks each, are beside the one of 400; the third takes 60 s on two.
    assert make_draft(sizer.request, sizer, apart).seconds > 100
    shared = make_draft(sizer.request, sizer, replace(apart, shared_size=4))
    assert contents(shared) == [[Pack(4, (0,)), Pack(4, (1, 2, 3))]]
    assert shared.seconds == 100


def test_a_shared_group_takes_no_longer_than_the_longest() -> None:
    # Of 208 rows on four ranks 52 are each one's: two would take 104 s, as long as no rank may.
    sizer = sizer_of([400, 208, 208], 8)
    shared = make_draft(sizer.request, sizer, replace(sizer.estimate(math.inf), shared_size=4))
    assert Pack(4, (0,)) in shared.packs[0]
    assert len(shared.packs) == 2


def test_long_samples_of_an_odd_pool_go_on_all_of_it() -> None:
    # On four of six ranks each of 300 leaves two, and the short ones fill these of one step only.
    sizer = sizer_of([300, 300, 10, 10], 6)
    on_four = make_draft(sizer.request, sizer, sizer.estimate(math.inf))
    assert contents(on_four)[0] == [Pack(1, (2,)), Pack(1, (3,)), Pack(4, (0,))]
    [max_size] = sizer.max_sizes()
    on_all = make_draft(sizer.request, sizer, sizer.estimate(math.inf, max_size=max_size))
    assert on_all.packs[0] == [Pack(6, (0, 1))]


def test_pools_of_a_power_of_two_have_no_other_largest_size() -> None:
    assert sizer_of([300], 8).max_sizes() == []


def test_many_samples_get_more_attempts_where_the_bound_is_far_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A giant that needs a quarter of the pool, and 320 samples of a long tail."""
    tail = 512 * (1 + np.random.default_rng(1).pareto(1.2, 320))
    lengths = [16 * 4096, *tail.clip(1, 8 * 4096).astype(int).tolist()]
    options = {"num_ranks": 64, "max_seqlen_per_dp_cp_rank": 4096}
    plan = plan_global_batch(lengths, **options)
    monkeypatch.setattr(balanced, "_FAR_OFF", 0.0)
    without = plan_global_batch(lengths, **options)
    assert plan.report.predicted_seconds < 0.99 * without.report.predicted_seconds
