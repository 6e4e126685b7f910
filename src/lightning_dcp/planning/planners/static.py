"""The planner ``static``: one CP size for every micro-batch, the baseline to compare with."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from lightning_dcp.config.padding import longest_that_fits
from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.planners.lpt import Bins, fill
from lightning_dcp.planning.planners.packs import Pack, TimedPacks, best_fit, lay_out
from lightning_dcp.planning.request import PlanRequest

# More than rounding can make of a sum, as a part of it.
_ROUNDING = 1e-12


def plan_static(request: PlanRequest) -> list[Step]:
    """Plans with one CP size: ``context_parallel_size``, or the smallest that holds every sample.

    The samples go into as few steps as hold them. Within these, every micro-batch of every step
    gets about the same work (the longest sample first, to the micro-batch with the least), and a
    step runs micro-batches of similar time. If the batch has too few samples to give each group
    of each step one, the next larger CP size is taken for the whole plan, up to the whole pool.

    Args:
        request: The planning request.

    Returns:
        The steps.

    Raises:
        ValueError: ``context_parallel_size`` does not divide the pool in aligned groups, or a
            sample does not fit it.
    """
    for size in _sizes_from(request, _first_size(request)):
        bins = _pack(request, size)
        if bins is not None:
            return [lay_out(packs) for packs in _steps(request, size, bins)]
    raise AssertionError("one sample a step on the whole pool is always a plan")


def _static_sizes(request: PlanRequest) -> list[int]:
    return [size for size in request.cp_sizes if request.num_ranks % size == 0]


def _sizes_from(request: PlanRequest, first: int) -> list[int]:
    return [size for size in _static_sizes(request) if size >= first]


def _first_size(request: PlanRequest) -> int:
    asked = request.settings.context_parallel_size
    if asked is None:
        # Never empty: the whole pool divides itself and holds every sample.
        return _sizes_from(request, max(request.min_cp_sizes))[0]
    if asked not in _static_sizes(request):
        raise ValueError(
            f"context_parallel_size={asked} with {request.num_ranks} DPxCP ranks: it must be a "
            "power of two that divides them, or all of them; choose one of "
            f"{_static_sizes(request)}"
        )
    if asked >= max(request.min_cp_sizes):
        return asked
    sample = next(i for i in request.longest_first if request.min_cp_sizes[i] > asked)
    name = f"sample {sample} has"
    if request.units is not None:
        name = f"samples {list(request.units[sample])}, which keep_together joins, have"
    settings = request.settings
    cap = settings.max_seqlen_per_dp_cp_rank
    most = longest_that_fits(cap, asked, settings.tp_size, settings.padding)
    raise ValueError(
        f"{name} length {request.lengths[sample]}, but context_parallel_size={asked} holds at most "
        f"{most} tokens at max_seqlen_per_dp_cp_rank={cap}; use a larger context_parallel_size, or "
        "a dynamic planner such as planner='balanced'"
    )


def static_packs_below(request: PlanRequest, seconds: float) -> Iterator[TimedPacks]:
    """The packs of static plans, one for each size, that may take less than ``seconds``.

    Sizes whose work and fixed times alone take longer are not planned.

    Args:
        request: The planning request; its ``context_parallel_size`` is not used.
        seconds: Predicted time to stay below.
    """
    for size in _sizes_from(request, max(request.min_cp_sizes)):
        num_groups = request.num_ranks // size
        capacity = request.capacity[size] * num_groups
        num_steps = -(-int(request.row_table[request.cp_sizes.index(size)].sum()) // capacity)
        least = math.fsum(request.times[size]) / num_groups + num_steps * request.fixed[size]
        # Its sum is rounded in another way than a plan's: only what is clearly longer is left out.
        if least * (1.0 - _ROUNDING) < seconds:
            bins = _pack(request, size)
            if bins is not None:
                steps = _steps(request, size, bins)
                # The first pack of a step takes the longest.
                longest = [request.seconds(packs[0].sample_ids, size) for packs in steps]
                makespan = math.fsum(longest)
                yield steps, makespan
                seconds = min(seconds, makespan)


def _pack(request: PlanRequest, size: int) -> list[list[int]] | None:
    """As few non-empty micro-batches as fill whole steps; ``None`` if there are too few samples."""
    num_groups = request.num_ranks // size
    tight = best_fit(request, size, request.longest_first)
    num_bins = -(-len(tight) // num_groups) * num_groups
    if num_bins > len(request.lengths):
        return None
    # LPT evens the work out better, but may leave a sample without rows that best fit has.
    return _least_work_first(request, size, num_bins) or _spread(request, size, tight, num_bins)


def _least_work_first(request: PlanRequest, size: int, num_bins: int) -> list[list[int]] | None:
    bins = Bins()
    bins.open(request, size, num_bins)
    left = fill(request, bins, [0.0] * num_bins, request.longest_first, 0)
    return None if left or not all(bins.samples) else bins.samples


def _spread(
    request: PlanRequest, size: int, bins: list[list[int]], num_bins: int
) -> list[list[int]]:
    """The same micro-batches, the longest of which give samples to new ones."""
    heap = [(-request.seconds(samples, size), k) for k, samples in enumerate(bins)]
    heapq.heapify(heap)
    bins = [list(samples) for samples in bins]
    while len(bins) < num_bins:
        # There are at least as many samples as bins, so some bin holds two.
        # A bin of one sample has none to give: it does not come back.
        time, k = heapq.heappop(heap)
        if len(bins[k]) > 1:
            # Its shortest, as samples came longest first.
            moved = bins[k].pop()
            bins.append([moved])
            # Times are negated, for the longest on top: a sample that leaves is added.
            heapq.heappush(heap, (time + request.times[size][moved], k))
    return bins


def _steps(request: PlanRequest, size: int, bins: list[list[int]]) -> list[list[Pack]]:
    """Micro-batches that take about as long are neighbours in a step."""
    num_groups = request.num_ranks // size
    packs = [Pack(size, tuple(samples)) for samples in bins]
    # Ties by sample id: all ranks must lay the packs out alike.
    packs.sort(key=lambda pack: (-request.seconds(pack.sample_ids, size), pack.sample_ids[0]))
    return [packs[i : i + num_groups] for i in range(0, len(packs), num_groups)]
