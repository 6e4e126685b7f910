"""What each planner is for."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_dcp.planning import (
    CostModel,
    Group,
    Plan,
    PlanRequest,
    PlanSettings,
    Step,
    plan_global_batch,
)
from lightning_dcp.planning.planners.packs import Pack, complete


def long_tail(seed: int, num_samples: int) -> np.ndarray:
    """Most lengths near 1K, some up to 16K."""
    pareto = np.random.default_rng(seed).pareto(1.2, num_samples)
    return np.clip(1024 * (1 + pareto), 1024, 16_384).astype(np.int64)


# static


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "size"),
    [
        ([4] * 8, 8, 1),
        ([8] * 8, 8, 2),
        ([16] * 8, 8, 4),
        ([9] * 12, 12, 4),
        ([17] * 12, 12, 12),
        ([5] * 6, 6, 2),
        ([9] * 6, 6, 6),
        ([4] * 7, 7, 1),
        ([5] * 7, 7, 7),
    ],
)
def test_static_takes_the_smallest_size_that_holds_the_longest(
    lengths: list[int], num_ranks: int, size: int
) -> None:
    plan = plan_global_batch(
        lengths, num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=4, planner="static"
    )
    assert list(plan.cp_sizes()) == [size]


def test_static_with_too_few_samples_takes_a_larger_size_for_all() -> None:
    plan = plan_global_batch(
        [4, 4, 4],
        num_ranks=8,
        max_seqlen_per_dp_cp_rank=4,
        planner="static",
        context_parallel_size=1,
    )
    assert plan.cp_sizes() == {4: 2}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_static_keeps_the_size_it_is_given(size: int) -> None:
    plan = plan_global_batch(
        [4] * 16,
        num_ranks=8,
        max_seqlen_per_dp_cp_rank=4,
        planner="static",
        context_parallel_size=size,
    )
    assert list(plan.cp_sizes()) == [size]


@pytest.mark.parametrize(
    ("num_ranks", "size", "choices"),
    [(8, 3, r"\[1, 2, 4, 8\]"), (6, 4, r"\[1, 2, 6\]"), (4, 8, r"\[1, 2, 4\]")],
)
def test_static_refuses_a_size_that_does_not_divide_the_pool(
    num_ranks: int, size: int, choices: str
) -> None:
    with pytest.raises(ValueError, match=f"context_parallel_size={size} .* {choices}"):
        plan_global_batch(
            [4] * 8,
            num_ranks=num_ranks,
            max_seqlen_per_dp_cp_rank=4,
            planner="static",
            context_parallel_size=size,
        )


def test_static_names_the_sample_that_does_not_fit_its_size() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has length 9, .*=2 holds at most 8") as error:
        plan_global_batch(
            [4, 9, 4, 4],
            num_ranks=4,
            max_seqlen_per_dp_cp_rank=4,
            planner="static",
            context_parallel_size=2,
        )
    assert "planner='balanced'" in str(error.value)


def test_static_takes_as_few_steps_as_hold_the_rows() -> None:
    # Least work first ends at 9 and 9 rows with a sample of 2 left; 6 + 4 and 3 + 3 + 2 + 2 fit.
    lengths = [6, 4, 3, 3, 2, 2]
    plan = plan_global_batch(lengths, num_ranks=2, max_seqlen_per_dp_cp_rank=10, planner="static")
    assert len(plan.steps) == 1


@pytest.mark.parametrize("seed", range(3))
def test_static_is_an_honest_baseline(seed: int) -> None:
    plan = plan_global_batch(
        long_tail(seed, 128), num_ranks=8, max_seqlen_per_dp_cp_rank=4096, planner="static"
    )
    assert plan.cp_sizes().keys() == {4}
    # Little of its loss is idle time: what it pays for is CP where none is needed.
    assert plan.report.idle_share < 0.03


@pytest.mark.parametrize("size", [1, 2, 4])
def test_static_spreads_samples_where_the_tightest_packing_has_too_few_micro_batches(
    size: int,
) -> None:
    lengths = [6 * size, 4 * size, 3 * size, 3 * size, 2 * size, 2 * size]
    options = {"num_ranks": 8, "max_seqlen_per_dp_cp_rank": 10 if size == 1 else 12}
    plan = plan_global_batch(lengths, **options, planner="static", context_parallel_size=size)
    assert len(plan.steps) == 1


# longest_sequence


def test_longest_sequence_rounds_up_to_a_power_of_two() -> None:
    plan = plan_global_batch(
        [20, 8, 8, 8, 8, 8], num_ranks=8, max_seqlen_per_dp_cp_rank=8, planner="longest_sequence"
    )
    # 20 tokens at cap 8 need 3 ranks, so 4 are taken: 6 rows of 24, and 8 tokens more fill them.
    alone = [Group(4 + i, 1, (2 + i,)) for i in range(4)]
    assert plan.steps == (Step((Group(0, 4, (0, 1)), *alone)),)


def test_longest_sequence_splits_packs_over_the_ranks_that_a_step_leaves_free() -> None:
    plan = plan_global_batch(
        [2] * 4, num_ranks=3, max_seqlen_per_dp_cp_rank=8, planner="longest_sequence"
    )
    assert plan.cp_sizes() == {1: 3}


@pytest.mark.parametrize("seed", range(3))
def test_longest_sequence_uses_several_sizes(seed: int) -> None:
    plan = plan_global_batch(
        long_tail(seed, 128),
        num_ranks=8,
        max_seqlen_per_dp_cp_rank=4096,
        planner="longest_sequence",
    )
    assert {1, 2, 4} <= plan.cp_sizes().keys()


# balanced


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8, 10, 16])
@pytest.mark.parametrize("seed", range(3))
def test_balanced_comes_close_to_the_bound(num_ranks: int, seed: int) -> None:
    cap = max(4096, 16_384 // num_ranks + 2)
    plan = plan_global_batch(
        long_tail(seed, 16 * num_ranks), num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=cap
    )
    assert plan.quality > 0.92


def sizes_of_samples(plan: Plan) -> dict[int, int]:
    return {i: group.size for step in plan.steps for group in step.groups for i in group.sample_ids}


@pytest.mark.parametrize("seed", range(3))
def test_balanced_leaves_short_samples_on_small_groups_where_larger_ones_cost(seed: int) -> None:
    costly = CostModel(hop_seconds_within=0.05, kv_seconds_per_row_within=1e-5, overlap=0.0)
    plan = plan_global_batch(
        long_tail(seed, 256), num_ranks=8, max_seqlen_per_dp_cp_rank=4096, cost_model=costly
    )
    sizes = sizes_of_samples(plan)
    short = [sizes[i] for i, length in enumerate(plan.lengths) if length <= 4096]
    longest = [sizes[i] for i, length in enumerate(plan.lengths) if length > 8192]
    assert np.mean(np.array(short) == 1) > 0.6
    assert min(longest) >= 4


def test_balanced_takes_larger_groups_where_they_pay() -> None:
    """Three equal samples on two ranks: one alone after two, or all three on both ranks."""
    options = {"num_ranks": 2, "max_seqlen_per_dp_cp_rank": 8192}
    plan = plan_global_batch([4096] * 3, **options)
    assert plan.cp_sizes() == {2: 1}
    costly = CostModel(hop_seconds_within=10.0)
    assert 1 in plan_global_batch([4096] * 3, **options, cost_model=costly).cp_sizes()


def test_balanced_fills_the_time_of_a_long_sample_with_short_ones() -> None:
    lengths = [16_384] + [1024] * 48
    plan = plan_global_batch(lengths, num_ranks=8, max_seqlen_per_dp_cp_rank=16_384)
    assert len(plan.steps) == 1
    assert plan.report.idle_share < 0.05


def test_balanced_runs_equal_short_samples_in_equal_micro_batches() -> None:
    plan = plan_global_batch([1024] * 72, num_ranks=8, max_seqlen_per_dp_cp_rank=4096)
    # 18 full packs would make 2 full steps and a nearly empty one.
    assert len({group.size for step in plan.steps for group in step.groups}) == 1
    assert plan.report.idle_share < 1e-9


def test_a_larger_pool_is_never_slower_for_its_long_samples() -> None:
    lengths = long_tail(0, 64)
    seconds = [
        plan_global_batch(lengths, num_ranks=n, max_seqlen_per_dp_cp_rank=16_384)
        .report.predicted_seconds
        for n in (1, 2, 4, 8)
    ]  # fmt: skip
    assert seconds == sorted(seconds, reverse=True)


def test_free_ranks_go_to_samples_that_hops_slow_down_least() -> None:
    settings = PlanSettings(
        num_ranks=4,
        max_seqlen_per_dp_cp_rank=4096,
        cost_model=CostModel(hop_seconds_within=1.0),
    )
    packs = complete(
        PlanRequest((4000, 100, 50), settings), [Pack(1, (sample,)) for sample in range(3)]
    )
    assert packs is not None
    assert sorted(packs) == [Pack(1, (0,)), Pack(1, (1,)), Pack(2, (2,))]
