"""The bound, against every planner and against the best of all plans where these can be tried."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_workloads import COST_MODELS, predictions, workloads

from lightning_dcp.config.padding import PackPadding, longest_that_fits
from lightning_dcp.planning import PlanRequest, PlanSettings, lower_bound, plan_global_batch
from lightning_dcp.planning.planners.balanced import plan_balanced
from lightning_dcp.planning.report import predicted_seconds

# What rounding may add up to.
EXACT = 1 + 1e-9


@settings(max_examples=120, deadline=None)
@given(workload=workloads(), prediction=predictions())
def test_no_plan_is_below_the_bound_and_none_is_better_than_balanced(
    workload: dict, prediction: dict
) -> None:
    plans = {
        planner: plan_global_batch(**workload, **prediction, planner=planner)
        for planner in ("static", "longest_sequence", "balanced")
    }
    seconds = {name: plan.report.predicted_seconds for name, plan in plans.items()}
    assert all(0 < plan.quality <= EXACT for plan in plans.values())
    assert seconds["balanced"] <= min(seconds.values()) * EXACT


@settings(max_examples=60, deadline=None)
@given(workload=workloads(), prediction=predictions())
def test_balanced_is_no_worse_than_static_of_any_size(workload: dict, prediction: dict) -> None:
    best = plan_global_batch(**workload, **prediction).report.predicted_seconds
    num_ranks = workload["num_ranks"]
    for size in (s for s in (1, 2, 4, 8, 16, num_ranks) if num_ranks % s == 0):
        if max(workload["lengths"]) > longest_that_fits(
            workload["max_seqlen_per_dp_cp_rank"], size, workload["tp_size"]
        ):
            continue
        static = plan_global_batch(
            **workload, **prediction, planner="static", context_parallel_size=size
        )
        assert best <= static.report.predicted_seconds * EXACT


@settings(max_examples=40, deadline=None)
@given(workload=workloads(), prediction=predictions())
def test_waiting_only_for_the_group_is_never_slower(workload: dict, prediction: dict) -> None:
    prediction = {"cost_model": prediction["cost_model"]}
    lockstep = plan_global_batch(**workload, **prediction)
    free = plan_global_batch(**workload, **prediction, execution="free_running")
    assert free.report.predicted_seconds <= lockstep.report.predicted_seconds * EXACT


# All plans of a few samples


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for k, block in enumerate(smaller):
            yield [*smaller[:k], [first, *block], *smaller[k + 1 :]]


def least_seconds(request: PlanRequest) -> float:
    """The time of the quickest of all valid plans in lockstep, without the code under test."""
    best = float("inf")
    padding, tp_size = request.settings.padding, request.settings.tp_size

    def rows(pack: list[int], size: int) -> int:
        return padding.pack_rows(sum(request.rows[size][i] for i in pack), size, tp_size)

    def tail(pack: list[int], size: int) -> float:
        more = rows(pack, size) - sum(request.rows[size][i] for i in pack)
        return request.settings.cost_model.seconds_per_row * more

    for packs in partitions(list(range(len(request.lengths)))):
        choices = [
            [
                s
                for s in request.cp_sizes
                if rows(pack, s) <= request.settings.max_seqlen_per_dp_cp_rank
            ]
            for pack in packs
        ]
        for sizes in itertools.product(*choices):
            if sum(sizes) % request.num_ranks:
                continue
            times = [
                request.fixed[s] + sum(request.times[s][i] for i in pack) + tail(pack, s)
                for s, pack in zip(sizes, packs, strict=True)
            ]
            for steps in partitions(list(range(len(packs)))):
                # Powers of two that add up to the pool can always be aligned, longest first.
                if all(sum(sizes[k] for k in step) == request.num_ranks for step in steps):
                    best = min(best, sum(max(times[k] for k in step) for step in steps))
    return best


def request_of(lengths: Sequence[int], num_ranks: int, cap: int, **options: object) -> PlanRequest:
    settings = PlanSettings(num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=cap, **options)
    return PlanRequest(tuple(lengths), settings)


@st.composite
def tiny_requests(draw: st.DrawFn) -> PlanRequest:
    num_ranks = draw(st.integers(1, 6))
    cap = draw(st.sampled_from([2, 4, 6, 50, 512]))
    buckets = [None, 2, cap // 2 if cap % 4 == 0 else 2]
    padding = PackPadding(pad_to_length_bucket=draw(st.sampled_from(buckets)))
    most = longest_that_fits(cap, num_ranks, padding=padding)
    lengths = draw(st.lists(st.integers(1, most), min_size=1, max_size=4))
    model = draw(st.sampled_from(sorted(COST_MODELS)))
    request = request_of(lengths, num_ranks, cap, cost_model=COST_MODELS[model], padding=padding)
    pair = request.rows[num_ranks][0] + request.rows[num_ranks][-1]
    if len(lengths) > 1 and pair <= request.capacity[num_ranks] and draw(st.booleans()):
        units = ((0, len(lengths) - 1), *((i,) for i in range(1, len(lengths) - 1)))
        request = dataclasses.replace(request, units=units)
    return request


@settings(max_examples=120, deadline=None)
@given(tiny_requests())
def test_the_bound_is_below_the_best_of_all_plans(request: PlanRequest) -> None:
    best = least_seconds(request)
    steps = plan_balanced(request)
    assert lower_bound(request) <= best * EXACT
    assert best <= predicted_seconds(request, steps) * EXACT


def test_balanced_finds_nearly_the_best_of_all_plans() -> None:
    """On average over tiny workloads; single ones of a few samples may be further off."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(60):
        num_ranks, cap = int(rng.integers(1, 7)), int(rng.choice([600, 1000, 4096]))
        most = longest_that_fits(cap, num_ranks)
        lengths = tuple(rng.integers(1, most + 1, int(rng.integers(1, 5))).tolist())
        plan = plan_global_batch(lengths, num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=cap)
        best = least_seconds(request_of(lengths, num_ranks, cap))
        ratios.append(best / plan.report.predicted_seconds)
    assert np.mean(ratios) > 0.98


# Cases where it is exact


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_it_is_exact_for_full_equal_micro_batches(num_ranks: int) -> None:
    options = {"num_ranks": num_ranks, "max_seqlen_per_dp_cp_rank": 1024}
    plan = plan_global_batch([1024] * (3 * num_ranks), **options)
    assert plan.quality == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("num_ranks", [3, 5, 6, 7])
def test_it_knows_that_only_the_whole_of_an_odd_pool_is_left(num_ranks: int) -> None:
    """No sample fits fewer ranks than the largest power of two: the others would be empty."""
    lengths = [longest_that_fits(64, 1 << (num_ranks.bit_length() - 1))] * 4
    plan = plan_global_batch(lengths, num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=64)
    assert set(plan.cp_sizes()) == {num_ranks}
    assert plan.quality > 0.95


def test_it_counts_steps_by_samples_that_do_not_share_a_micro_batch() -> None:
    """More than half the cap each: as many micro-batches as samples, though the rows need fewer."""
    model = COST_MODELS["dense"]
    request = request_of((600,) * 4, 1, 1000, cost_model=model)
    work = 4 * model.sample_times(np.array([600]))[0]
    assert lower_bound(request) == pytest.approx(4 * model.fixed_seconds + work, rel=1e-6)
