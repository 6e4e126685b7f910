"""Plans of few samples that local search makes quicker, the smallest ones by hand."""

from __future__ import annotations

import math
import random

import pytest

from lightning_dcp.config.padding import longest_that_fits
from lightning_dcp.planning import (
    H200,
    QWEN3_30B_A3B,
    CostModel,
    Plan,
    PlanRequest,
    PlanSettings,
    lower_bound,
    plan_global_batch,
)
from lightning_dcp.planning.planners import balanced
from lightning_dcp.planning.planners.local_search import improve
from lightning_dcp.planning.planners.packs import Pack, lay_out, makespan, whole_pool_packs

FREE = {
    "seconds_per_pair": 0.0,
    "thin_rows": 0.0,
    "kv_seconds_per_row_within": 0.0,
    "kv_seconds_per_row_across": 0.0,
    "hop_seconds_within": 0.0,
    "hop_seconds_across": 0.0,
}
EXPERTS = CostModel.from_sizes(QWEN3_30B_A3B, H200, ep_size=8)


def request_of(
    lengths: list[int], num_ranks: int, cap: int, fixed_seconds: float = 0.0, **costs: float
) -> PlanRequest:
    """Where a row takes a second, and a micro-batch ``fixed_seconds``."""
    model = CostModel(seconds_per_row=1.0, fixed_seconds=fixed_seconds, **{**FREE, **costs})
    settings = PlanSettings(num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=cap, cost_model=model)
    return PlanRequest(tuple(lengths), settings)


def contents(steps: list[list[Pack]], lengths: list[int]) -> list[list[tuple[int, list[int]]]]:
    return sorted(
        sorted((p.size, sorted(lengths[i] for i in p.sample_ids)) for p in packs) for packs in steps
    )


def test_a_step_is_dealt_again() -> None:
    lengths = [6, 5, 4, 3]
    request = request_of(lengths, 2, 11)
    better, _ = improve(request, [[Pack(1, (0, 1)), Pack(1, (2, 3))]])
    assert makespan(request, better) == 9


def test_a_sample_goes_to_a_step_with_time_left() -> None:
    lengths = [5, 4, 6, 3]
    steps = [[Pack(1, (0, 1))], [Pack(1, (2,))], [Pack(1, (3,))]]
    request = request_of(lengths, 1, 9, fixed_seconds=1.0)
    better, _ = improve(request, steps)
    assert contents(better, lengths) == [[(1, [3, 6])], [(1, [4, 5])]]


def test_two_samples_change_places() -> None:
    lengths = [7, 4, 6, 5]
    steps = [[Pack(1, (0,)), Pack(1, (1,))], [Pack(1, (2,)), Pack(1, (3,))]]
    better, _ = improve(request_of(lengths, 2, 7, hop_seconds_within=100.0), steps)
    assert contents(better, lengths) == [[(1, [4]), (1, [5])], [(1, [6]), (1, [7])]]


def test_two_steps_become_one() -> None:
    lengths = [8, 8, 2, 2]
    steps = [[Pack(1, (0,)), Pack(1, (1,))], [Pack(1, (2,)), Pack(1, (3,))]]
    better, _ = improve(request_of(lengths, 2, 10, fixed_seconds=1.0), steps)
    assert contents(better, lengths) == [[(1, [2, 8]), (1, [2, 8])]]


def test_groups_are_joined_for_a_longer_sample() -> None:
    lengths = [12, 1, 1]
    steps = [[Pack(2, (0,))], [Pack(1, (1,)), Pack(1, (2,))]]
    request = request_of(lengths, 2, 10, fixed_seconds=4.0)
    assert makespan(request, steps) == 10 + 5
    better, _ = improve(request, steps)
    # 1 token takes 2 rows on each of two ranks.
    assert contents(better, lengths) == [[(2, [1, 1, 12])]]
    assert makespan(request, better) == 4 + 6 + 2 + 2


def test_groups_are_split_where_hops_make_them_slower() -> None:
    better, _ = improve(
        request_of([8] * 4, 4, 16, hop_seconds_within=1.0), [[Pack(4, (0, 1, 2, 3))]]
    )
    assert sorted(better[0]) == [Pack(1, (i,)) for i in range(4)]


def test_a_pool_that_is_no_power_of_two_is_split_in_powers_of_two() -> None:
    better, _ = improve(request_of([8, 4], 6, 2, hop_seconds_within=1.0), [[Pack(6, (0, 1))]])
    assert contents(better, [8, 4]) == [[(2, [4]), (4, [8])]]


def test_a_single_sample_stays() -> None:
    assert improve(request_of([4], 4, 4), [[Pack(4, (0,))]]) == ([[Pack(4, (0,))]], 2.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_stays_a_plan_and_gets_no_slower(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks, cap = rng.choice([1, 2, 3, 4, 6, 7, 10, 16]), rng.choice([8, 64, 512])
    most = longest_that_fits(cap, num_ranks)
    lengths = [max(1, int(most ** rng.random())) for _ in range(rng.randint(1, 40))]
    settings = PlanSettings(
        num_ranks=num_ranks,
        max_seqlen_per_dp_cp_rank=cap,
        cost_model=rng.choice([EXPERTS, CostModel()]),
    )
    request = PlanRequest(tuple(lengths), settings)
    # As poor as a plan can be: every step is one group.
    steps = [[pack] for pack in whole_pool_packs(request, range(len(lengths)))]
    better, seconds = improve(request, steps)
    Plan(
        steps=tuple(map(lay_out, better)),
        lengths=tuple(lengths),
        num_ranks=num_ranks,
        max_seqlen_per_dp_cp_rank=cap,
        planner="improve",
    ).validate()
    assert seconds == pytest.approx(makespan(request, better), rel=1e-12)
    assert lower_bound(request) <= seconds <= makespan(request, steps) * (1 + 1e-12)
    assert improve(request, steps) == (better, seconds)


def test_local_search_makes_plans_of_few_samples_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal samples on ten ranks: groups of 8 and 2 share them more evenly than groups of 2."""
    options = {"num_ranks": 10, "max_seqlen_per_dp_cp_rank": 8192}
    plan = plan_global_batch([4096] * 16, **options)
    monkeypatch.setattr(balanced, "improve", lambda request, packs: (packs, math.inf))
    without = plan_global_batch([4096] * 16, **options)
    assert plan.report.predicted_seconds < 0.95 * without.report.predicted_seconds
