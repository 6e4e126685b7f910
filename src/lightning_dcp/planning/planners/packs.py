"""Packs, the groups of a step before they have ranks, and how they come to fill the pool."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from lightning_dcp.planning.plan import Group, Step
from lightning_dcp.planning.request import PlanRequest


class Pack(NamedTuple):
    """Samples that form one micro-batch on a CP group of ``size`` ranks.

    A tuple, since it is made several times as fast as a frozen dataclass, and many are made.
    """

    size: int
    sample_ids: tuple[int, ...]


type TimedPacks = tuple[list[list[Pack]], float]
"""The packs of each step, and their makespan in lockstep."""


def lay_out(packs: Iterable[Pack]) -> Step:
    """Gives the packs of a step their ranks.

    Larger groups come first, then the one with the smaller sample id: the sizes before a group
    are then multiples of its own, so every power-of-two group starts at a multiple of its size.
    """
    groups = []
    first_rank = 0
    ordered = sorted([(-pack.size, tuple(sorted(pack.sample_ids))) for pack in packs])
    for negative, samples in ordered:
        groups.append(Group(first_rank, -negative, samples))
        first_rank -= negative
    return Step(tuple(groups))


def makespan(request: PlanRequest, steps: Iterable[Iterable[Pack]]) -> float:
    """Seconds of the steps in lockstep: each lasts as long as its slowest pack."""
    return math.fsum(max([request.seconds(p.sample_ids, p.size) for p in step]) for step in steps)


def complete(request: PlanRequest, packs: Iterable[Pack]) -> list[Pack] | None:
    """Spreads packs that take fewer ranks than the pool has over all of it.

    As long as ranks are free, the slowest pack that can use some is split in two, or, if it is a
    single sample that twice the ranks make faster, put on them. The ranks that are free then go
    to the single samples that take the least time on twice as many: hops make them slower there.

    Args:
        request: The planning request.
        packs: Power-of-two packs that take the pool or less, or one pack that takes it.

    Returns:
        Packs with the same samples whose sizes add up to the pool; ``None`` if this way leaves
        ranks over, as two single samples on a pool of 7 must.
    """
    heap = [_by_time(request, pack) for pack in packs]
    heapq.heapify(heap)
    free = request.num_ranks - sum(pack.size for *_, pack in heap)
    done = []
    while free and heap:
        *_, pack = heapq.heappop(heap)
        parts = _split(request, pack, free) or _sped_up(request, pack, free)
        if parts is None:
            # Fewer ranks are free from here on: what cannot use them now never can.
            done.append(pack)
            continue
        free += pack.size - sum(part.size for part in parts)
        for part in parts:
            heapq.heappush(heap, _by_time(request, part))
    done += [pack for *_, pack in heap]
    return _double(request, done, free) if free else done


def whole_pool_packs(request: PlanRequest, sample_ids: Iterable[int]) -> list[Pack]:
    """Packs on the whole pool, one a step, that hold the samples.

    Always possible, since every sample of a request fits the whole pool.
    """
    longest_first = sorted(sample_ids, key=lambda i: (-request.lengths[i], i))
    bins = best_fit(request, request.num_ranks, longest_first)
    return [Pack(request.num_ranks, tuple(samples)) for samples in bins]


def best_fit(
    request: PlanRequest, size: int, sample_ids: Iterable[int], most: float = math.inf
) -> list[list[int]]:
    """Samples in micro-batches under the cap, each to the one with the least slack that holds it.

    Args:
        request: The planning request.
        size: CP size of the micro-batches; every sample fits it.
        sample_ids: The samples, in the order in which they are put; longest first packs best.
        most: Micro-batches to make at most; samples that none of them holds are left out.

    Returns:
        The sample ids of each micro-batch.
    """
    rows = request.rows[size]
    bins: list[list[int]] = []
    slacks: list[tuple[int, int]] = []
    for sample in sample_ids:
        # -1 is before every bin: one whose slack is just enough counts.
        position = bisect_left(slacks, (rows[sample], -1))
        if position == len(slacks):
            if len(bins) >= most:
                continue
            bins.append([sample])
            insort(slacks, (request.capacity[size] - rows[sample], len(bins) - 1))
        else:
            slack, index = slacks.pop(position)
            bins[index].append(sample)
            insort(slacks, (slack - rows[sample], index))
    return bins


def lay_out_on_earliest_ranks(request: PlanRequest, steps: Iterable[Sequence[Pack]]) -> list[Step]:
    """Gives the packs of all steps their ranks, where a rank does not wait for the whole step.

    Within a step and a size, the pack that takes the longest goes to the ranks that are ready
    first.
    """
    ready = [0.0] * request.num_ranks
    laid_out = []
    for packs in steps:
        groups = []
        first_rank = 0
        # Larger groups first: each then starts at a multiple of its own size.
        by_size = sorted(packs, key=lambda pack: -pack.size)
        for size, some in groupby(by_size, key=lambda pack: pack.size):
            timed = [(-request.seconds(p.sample_ids, size), p.sample_ids) for p in some]
            ends = first_rank + size * len(timed)
            slots = [(max(ready[k : k + size]), k) for k in range(first_rank, ends, size)]
            for (time, samples), (start, k) in zip(sorted(timed), sorted(slots), strict=True):
                groups.append(Group(k, size, tuple(sorted(samples))))
                # time is negated, for the sort.
                ready[k : k + size] = [start - time] * size
            first_rank = ends
        laid_out.append(Step(tuple(sorted(groups, key=lambda group: group.first_rank))))
    return laid_out


def spread_out(request: PlanRequest, packs: Sequence[Pack]) -> list[list[Pack]]:
    """The packs of one step: completed, or as steps one after the other on the whole pool."""
    completed = complete(request, packs)
    if completed is not None:
        return [completed]
    samples = [i for pack in packs for i in pack.sample_ids]
    return [[pack] for pack in whole_pool_packs(request, samples)]


def largest_power_of_two(most: int) -> int:
    """The largest power of two that is at most ``most``, itself 1 or more."""
    return 1 << (most.bit_length() - 1)


def _by_time(request: PlanRequest, pack: Pack) -> tuple[float, int, Pack]:
    # Sample ids are distinct, so that the order never falls back on comparing packs.
    return -request.seconds(pack.sample_ids, pack.size), min(pack.sample_ids), pack


def _double(request: PlanRequest, packs: list[Pack], free: int) -> list[Pack] | None:
    """Single samples on twice their ranks until none is free; ``None`` if some stay free."""
    done: list[Pack] = []
    heap = [(_seconds_doubled(request, pack), pack.sample_ids, pack) for pack in packs]
    heapq.heapify(heap)
    while heap:
        seconds, _, pack = heapq.heappop(heap)
        if pack.size > free or math.isinf(seconds):
            done.append(pack)
            continue
        free -= pack.size
        larger = Pack(2 * pack.size, pack.sample_ids)
        heapq.heappush(heap, (_seconds_doubled(request, larger), larger.sample_ids, larger))
    return None if free else done


def _sped_up(request: PlanRequest, pack: Pack, free: int) -> list[Pack] | None:
    """The pack on twice its ranks if they are free and make it faster."""
    seconds = _seconds_doubled(request, pack)
    if pack.size > free or seconds >= request.seconds(pack.sample_ids, pack.size):
        return None
    return [Pack(2 * pack.size, pack.sample_ids)]


def _seconds_doubled(request: PlanRequest, pack: Pack) -> float:
    """The time of the pack on twice its ranks, infinite where it cannot be put there."""
    # Only single samples: small ones take more rows a rank at CP 2 than at CP 1, up to twice
    # (they are padded to 2 * tp_size rows), and then a full pack would not fit. The same holds for
    # the samples of a unit, which is one here.
    size, sample = 2 * pack.size, pack.sample_ids[0]
    if len(pack.sample_ids) > 1 or size not in request.rows:
        return math.inf
    if request.rows[size][sample] > request.capacity[size]:
        return math.inf
    return request.seconds(pack.sample_ids, size)


def _split(request: PlanRequest, pack: Pack, free: int) -> list[Pack] | None:
    """The pack on its own ranks and at most as many free ones; ``None`` for a single sample."""
    size = min(pack.size, largest_power_of_two(free))
    if len(pack.sample_ids) < 2:
        return None
    samples = sorted(pack.sample_ids, key=lambda i: (-request.lengths[i], i))
    # The shortest must fit there: it is what moves if no other does.
    if request.min_cp_sizes[samples[-1]] > size:
        return None
    kept: list[int] = []
    moved: list[int] = []
    kept_time = moved_time = 0.0
    moved_rows = 0
    for sample in samples:
        kept_after = kept_time + request.times[pack.size][sample]
        moved_after = moved_time + request.times[size][sample]
        rows_after = moved_rows + request.rows[size][sample]
        if moved_after < kept_after and rows_after <= request.capacity[size]:
            moved.append(sample)
            moved_time, moved_rows = moved_after, rows_after
        else:
            kept.append(sample)
            kept_time = kept_after
    if not moved:
        moved.append(kept.pop())
    if not kept:
        kept.append(moved.pop())
    return [Pack(pack.size, tuple(kept)), Pack(size, tuple(moved))]
