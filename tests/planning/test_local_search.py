"""Plans that local search makes quicker, the smallest ones by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_dcp.config.padding import longest_that_fits
from lightning_dcp.data.lengths import LengthDistribution
from lightning_dcp.planning import (
    H200,
    LLAMA_8B,
    QWEN3_30B_A3B,
    CostModel,
    Plan,
    Problem,
    plan_global_batch,
)
from lightning_dcp.planning.planners import balanced
from lightning_dcp.planning.planners.layout import Layout, lockstep_seconds, split_slowest
from lightning_dcp.planning.planners.local_search import improve
from lightning_dcp.planning.planners.packs import Pack, lay_out, whole_pool_packs

FREE = {
    "seconds_per_pair": 0.0,
    "thin_rows": 0.0,
    "kv_seconds_per_row_within": 0.0,
    "kv_seconds_per_row_across": 0.0,
    "hop_seconds_within": 0.0,
    "hop_seconds_across": 0.0,
}
MODELS = {
    "8B": CostModel.from_sizes(LLAMA_8B, H200),
    "30B-A3B": CostModel.from_sizes(QWEN3_30B_A3B, H200, ep_size=8),
}


def problem(lengths: list[int], num_ranks: int, cap: int, fixed_seconds: float) -> Problem:
    """Where a row takes a second, and a micro-batch ``fixed_seconds``."""
    model = CostModel(seconds_per_row=1.0, fixed_seconds=fixed_seconds, **FREE)
    return Problem(tuple(lengths), num_ranks, cap, cost_model=model)


def contents(steps: list[list[Pack]], lengths: list[int]) -> list[list[tuple[int, list[int]]]]:
    return sorted(
        sorted((p.size, sorted(lengths[i] for i in p.sample_ids)) for p in packs) for packs in steps
    )


def test_a_sample_moves_to_a_pack_with_time_left() -> None:
    lengths = [5, 4, 3, 6, 6]
    steps = [[Pack(1, (0, 1)), Pack(1, (2,))], [Pack(1, (3,)), Pack(1, (4,))]]
    small = problem(lengths, 2, 9, 0.0)
    assert lockstep_seconds(small, steps) == 15
    better = improve(small, steps)
    assert lockstep_seconds(small, better) == 13
    assert [(1, [6]), (1, [6])] in contents(better, lengths)


def test_two_samples_change_places() -> None:
    lengths = [7, 4, 6, 5]
    steps = [[Pack(1, (0,)), Pack(1, (1,))], [Pack(1, (2,)), Pack(1, (3,))]]
    better = improve(problem(lengths, 2, 7, 0.0), steps)
    assert contents(better, lengths) == [[(1, [4]), (1, [5])], [(1, [6]), (1, [7])]]


def test_two_samples_together_change_places_with_one() -> None:
    # One 4 for any other sample is too many rows.
    lengths = [4, 4, 6, 7, 8]
    steps = [[Pack(1, (0, 1)), Pack(1, (2,))], [Pack(1, (3,)), Pack(1, (4,))]]
    better = improve(problem(lengths, 2, 8, 0.0), steps)
    assert contents(better, lengths) == [[(1, [4, 4]), (1, [8])], [(1, [6]), (1, [7])]]


def test_a_step_is_dissolved_where_others_have_the_rows() -> None:
    lengths = [8, 8, 2, 2]
    steps = [[Pack(1, (0,)), Pack(1, (1,))], [Pack(1, (2,)), Pack(1, (3,))]]
    better = improve(problem(lengths, 2, 10, 1.0), steps)
    assert contents(better, lengths) == [[(1, [2, 8]), (1, [2, 8])]]


def test_a_shorter_sample_makes_room() -> None:
    # 4 fits with 6 if 3 goes to 7.
    lengths = [7, 6, 3, 4]
    steps = [[Pack(1, (0,))], [Pack(1, (1, 2))], [Pack(1, (3,))]]
    better = improve(problem(lengths, 1, 10, 1.0), steps)
    assert contents(better, lengths) == [[(1, [3, 7])], [(1, [4, 6])]]


def test_two_packs_are_put_together_for_a_longer_sample() -> None:
    lengths = [12, 1, 1]
    steps = [[Pack(2, (0,))], [Pack(1, (1,)), Pack(1, (2,))]]
    small = problem(lengths, 2, 10, 4.0)
    assert lockstep_seconds(small, steps) == 10 + 5
    better = improve(small, steps)
    # 1 token takes 2 rows on each of two ranks.
    assert contents(better, lengths) == [[(2, [1, 1, 12])]]
    assert lockstep_seconds(small, better) == 4 + 6 + 2 + 2


def test_a_pack_is_split_where_half_its_ranks_are_quicker() -> None:
    # Hops make larger groups slower.
    model = CostModel(seconds_per_row=1.0, fixed_seconds=0.0, **{**FREE, "hop_seconds_within": 1.0})
    small = Problem((8, 8, 8, 8), 4, 16, cost_model=model)
    packs = split_slowest(small, [Pack(4, (0, 1, 2, 3))])
    assert sorted(packs) == [Pack(1, (i,)) for i in range(4)]
    assert split_slowest(small, [Pack(1, (0, 1))]) == [Pack(1, (0, 1))]


def test_a_pool_that_is_no_power_of_two_is_not_split_in_halves() -> None:
    small = problem([6, 6], 6, 4, 0.0)
    assert split_slowest(small, [Pack(6, (0, 1))]) == [Pack(6, (0, 1))]


def test_a_step_without_another_stays() -> None:
    small = problem([4], 4, 4, 0.0)
    assert improve(small, [[Pack(4, (0,))]]) == [[Pack(4, (0,))]]


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_stays_a_plan_and_gets_no_slower(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks, cap = rng.choice([1, 2, 3, 4, 6, 7, 10, 16]), rng.choice([8, 64, 512])
    most = longest_that_fits(cap, num_ranks)
    lengths = [max(1, int(most ** rng.random())) for _ in range(rng.randint(1, 60))]
    model = rng.choice([*MODELS.values(), CostModel()])
    some = Problem(tuple(lengths), num_ranks, cap, cost_model=model)
    # As poor as a plan can be: every step is one group.
    steps = [[pack] for pack in whole_pool_packs(some, range(len(lengths)))]
    better = improve(some, steps)
    Plan(
        steps=tuple(map(lay_out, better)),
        lengths=tuple(lengths),
        num_ranks=num_ranks,
        max_seqlen_per_dp_cp_rank=cap,
        planner="improve",
    ).validate()
    seconds = lockstep_seconds(some, better)
    assert some.bound <= seconds <= lockstep_seconds(some, steps) * (1 + 1e-12)
    assert improve(some, steps) == better
    assert Layout(some, better).seconds == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["bimodal", "long_tail"])
def test_pools_that_are_no_power_of_two_come_close_to_the_bound(kind: str, model: str) -> None:
    # Few samples fit the two ranks that groups of eight leave.
    source = LengthDistribution(kind=kind, low=1024, high=16_384)
    lengths = source.sample(64, np.random.default_rng(0))
    lengths = np.minimum(lengths, longest_that_fits(1024, 10))
    plan = plan_global_batch(
        lengths, num_ranks=10, max_seqlen_per_dp_cp_rank=1024, cost_model=MODELS[model]
    )
    assert plan.quality >= 0.91


def test_local_search_makes_plans_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    source = LengthDistribution(kind="long_tail", low=1024, high=16_384)
    lengths = np.minimum(source.sample(64, np.random.default_rng(0)), 10_240)
    options = {"num_ranks": 10, "max_seqlen_per_dp_cp_rank": 1024, "cost_model": MODELS["30B-A3B"]}
    plan = plan_global_batch(lengths, **options)
    monkeypatch.setattr(balanced, "improve", lambda problem, packs, looks: packs)
    without = plan_global_batch(lengths, **options)
    assert plan.report.predicted_seconds < 0.98 * without.report.predicted_seconds
