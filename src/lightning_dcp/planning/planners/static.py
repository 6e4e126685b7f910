"""The planner ``static``: one CP size for every micro-batch, the baseline to compare with."""

from __future__ import annotations

import heapq
import math

from lightning_dcp.config.padding import longest_that_fits
from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.planners.filling import Bins, fill
from lightning_dcp.planning.planners.packs import Pack, best_fit, lay_out
from lightning_dcp.planning.report import predicted_time
from lightning_dcp.planning.request import Problem, total_time

# More than rounding can make of a sum, as a part of it.
_ROUNDING = 1e-12


def plan_static(problem: Problem) -> list[Step]:
    """Plans with one CP size: ``context_parallel_size``, or the smallest that holds every sample.

    The samples go into as few steps as hold them. Within these, every micro-batch of every step
    gets about the same work (the longest sample first, to the micro-batch with the least), and a
    step runs micro-batches of similar time. If the batch has too few samples to give each group
    of each step one, the next larger CP size is taken for the whole plan, up to the whole pool.

    Args:
        problem: The planning request.

    Returns:
        The steps.

    Raises:
        ValueError: ``context_parallel_size`` does not divide the pool in aligned groups, or a
            sample does not fit it.
    """
    for size in _sizes_from(problem, _first_size(problem)):
        bins = _pack(problem, size)
        if bins is not None:
            return _steps(problem, size, bins)
    raise AssertionError("one sample a step on the whole pool is always a plan")


def _static_sizes(problem: Problem) -> list[int]:
    return [size for size in problem.sizes if problem.num_ranks % size == 0]


def _sizes_from(problem: Problem, first: int) -> list[int]:
    return [size for size in _static_sizes(problem) if size >= first]


def _first_size(problem: Problem) -> int:
    asked = problem.context_parallel_size
    if asked is None:
        return _sizes_from(problem, max(problem.min_sizes))[0]
    if asked not in _static_sizes(problem):
        raise ValueError(
            f"context_parallel_size={asked} with {problem.num_ranks} DPxCP ranks: it must be a "
            "power of two that divides them, or all of them; choose one of "
            f"{_static_sizes(problem)}"
        )
    if asked >= max(problem.min_sizes):
        return asked
    sample = next(i for i in problem.order if problem.min_sizes[i] > asked)
    name = f"sample {sample} has"
    if problem.units is not None:
        name = f"samples {list(problem.units[sample])}, which keep_together joins, have"
    most = longest_that_fits(problem.cap, asked, problem.tp_size, problem.padding)
    raise ValueError(
        f"{name} length {problem.lengths[sample]}, but context_parallel_size={asked} holds at most "
        f"{most} tokens at max_seqlen_per_dp_cp_rank={problem.cap}; use a larger "
        "context_parallel_size, or a dynamic planner such as planner='balanced'"
    )


def plan_static_below(problem: Problem, time: float) -> tuple[list[Step], float] | None:
    """The quickest static plan and its time; ``None`` if none takes less than ``time`` seconds.

    Sizes whose work and fixed times alone take longer are not planned.

    Args:
        problem: The planning request; its ``context_parallel_size`` is not used.
        time: Predicted seconds to stay below.
    """
    best = None
    for size in _sizes_from(problem, max(problem.min_sizes)):
        num_groups = problem.num_ranks // size
        work = math.fsum(problem.times[size]) / num_groups
        least = work + _fewest_steps(problem, size) * problem.fixed[size]
        # Its sum is rounded in another way than a plan's: only what is clearly longer is left out.
        if least * (1.0 - _ROUNDING) >= time:
            continue
        bins = _pack(problem, size)
        if bins is None:
            continue
        if problem.execution == "lockstep":
            # Known without the steps: those of _steps() hold neighbours in this order.
            times = sorted([total_time(problem, samples, size) for samples in bins], reverse=True)
            if math.fsum(times[::num_groups]) >= time:
                continue
        steps = _steps(problem, size, bins)
        predicted = predicted_time(problem, steps)
        if predicted < time:
            best, time = (steps, predicted), predicted
    return best


def _fewest_steps(problem: Problem, size: int) -> int:
    capacity = problem.rooms[size] * (problem.num_ranks // size)
    return -(-int(problem.row_table[problem.sizes.index(size)].sum()) // capacity)


def _pack(problem: Problem, size: int) -> list[list[int]] | None:
    """As few non-empty micro-batches as fill whole steps; ``None`` if there are too few samples."""
    num_groups = problem.num_ranks // size
    tight = best_fit(problem, size, problem.order)
    num_bins = -(-len(tight) // num_groups) * num_groups
    if num_bins > len(problem.lengths):
        return None
    return _least_work_first(problem, size, num_bins) or _spread(problem, size, tight, num_bins)


def _least_work_first(problem: Problem, size: int, num_bins: int) -> list[list[int]] | None:
    bins = Bins()
    bins.open(problem, size, num_bins)
    left = fill(problem, bins, [0.0] * num_bins, problem.order, 0)
    return None if left or not all(bins.samples) else bins.samples


def _spread(problem: Problem, size: int, bins: list[list[int]], num_bins: int) -> list[list[int]]:
    """The same micro-batches, the longest of which give samples to new ones."""
    heap = [(-total_time(problem, samples, size), k) for k, samples in enumerate(bins)]
    heapq.heapify(heap)
    bins = [list(samples) for samples in bins]
    while len(bins) < num_bins:
        # There are at least as many samples as bins, so some bin holds two.
        time, k = heapq.heappop(heap)
        if len(bins[k]) > 1:
            moved = bins[k].pop()
            bins.append([moved])
            heapq.heappush(heap, (time + problem.times[size][moved], k))
    return bins


def _steps(problem: Problem, size: int, bins: list[list[int]]) -> list[Step]:
    num_groups = problem.num_ranks // size
    packs = [Pack(size, tuple(samples)) for samples in bins]
    packs.sort(key=lambda pack: (-total_time(problem, pack.sample_ids, size), pack.sample_ids[0]))
    return [lay_out(packs[i : i + num_groups]) for i in range(0, len(packs), num_groups)]
