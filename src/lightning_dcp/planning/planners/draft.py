"""Drafts of plans for ``balanced``: steps of packs, made from a choice of CP sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_dcp.planning.planners.lpt import Bins, fill
from lightning_dcp.planning.planners.packs import Pack, complete, whole_pool_packs
from lightning_dcp.planning.planners.sizing import Sizer, Sizing
from lightning_dcp.planning.request import PlanRequest


@dataclass(frozen=True, slots=True)
class Draft:
    """Steps that still need their ranks.

    Attributes:
        packs: The packs of each step; their sizes add up to the pool.
        seconds: How long the steps take in lockstep.
        sizing: The sizes it was made from, with the number of steps that it has.
    """

    packs: list[list[Pack]]
    seconds: float
    sizing: Sizing


def make_draft(request: PlanRequest, sizer: Sizer, sizing: Sizing) -> Draft:
    """Steps with the sizes for a limit; see :func:`plan_balanced`, 2 to 4.

    Args:
        request: The planning request.
        sizer: Of the same request.
        sizing: The sizes, and the number of steps to make; more are made where these do not hold
            all samples.
    """
    index = sizer.choose(sizing.limit, sizing.min_size, sizing.max_size)
    alone = sizer.seconds[index, sizer.columns]
    is_long = ((index > sizing.min_size) | (alone > sizing.short_makespan)).tolist()
    sizes = sizer.sizes[index].tolist()
    bins = Bins()
    long = [i for i in request.longest_first if is_long[i]]
    short = [i for i in request.longest_first if not is_long[i]]
    if sizing.shared_size and long:
        long = _open_shared(request, bins, sizes, long, sizing.shared_size)
    by_load = _open_long(request, bins, sizes, long, sizing.limit)
    steps, free = _first_fit(request, bins, by_load, sizing.num_steps)
    size = request.cp_sizes[sizing.min_size]
    _fill_up(request, bins, steps, free, short, size, all_soft=math.isinf(sizing.short_makespan))
    _deal(bins, steps, size)
    packs, seconds = _packs(request, bins, steps)
    return Draft(packs, seconds, replace(sizing, num_steps=len(steps)))


def _open_shared(
    request: PlanRequest, bins: Bins, sizes: list[int], long: list[int], size: int
) -> list[int]:
    """A step of the longest sample and of groups that others share; the samples that are left.

    Each on the smallest group that holds it, few samples fit beside a giant, and the rest make the
    next steps long. On larger groups they take longer, but no longer than the giant does.
    """
    giant, *others = long
    bins.open(request, sizes[giant])
    bins.put(request, 0, giant)
    groups = bins.open(request, size, (request.num_ranks - sizes[giant]) // size)
    rows, times = request.rows[size], request.times[size]
    left = []
    for i in others:
        for b in groups:
            if rows[i] <= bins.slack[b] and bins.load[b] + times[i] <= bins.load[0]:
                bins.put(request, b, i)
                break
        else:
            left.append(i)
    return left


def _open_long(
    request: PlanRequest, bins: Bins, sizes: list[int], samples: list[int], limit: float
) -> list[int]:
    """Micro-batches of the long samples, next fit; those that take the longest first."""
    # What is open already is one step, and stays the first.
    first = len(bins.load)
    by_size: dict[int, list[int]] = {}
    for i in samples:
        by_size.setdefault(sizes[i], []).append(i)
    for size, some in sorted(by_size.items(), reverse=True):
        rows, times = request.rows[size], request.times[size]
        # Rows and time that the last micro-batch opened has left.
        slack, time_left = 0, 0.0
        for i in some:
            if rows[i] > slack or times[i] > time_left:
                bins.open(request, size)
                slack, time_left = request.capacity[size], limit - request.fixed[size]
            slack -= rows[i]
            time_left -= times[i]
            bins.put(request, -1, i)
    opened = range(first, len(bins.load))
    return [*range(first), *sorted(opened, key=lambda b: (-bins.load[b], b))]


def _first_fit(
    request: PlanRequest, bins: Bins, order: list[int], num_steps: int
) -> tuple[list[list[int]], list[int]]:
    """First fit of micro-batches to steps: for each step its micro-batches and its free ranks."""
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    free = [request.num_ranks] * num_steps
    # Ranks are only ever taken: no step before the last one that took a size takes it later.
    first = dict.fromkeys(request.cp_sizes, 0)
    for b in order:
        size = bins.size[b]
        k = first[size]
        while k < len(free) and free[k] < size:
            k += 1
        first[size] = k
        if k == len(free):
            steps.append([])
            free.append(request.num_ranks)
        steps[k].append(b)
        free[k] -= size
    return steps, free


def _fill_up(
    request: PlanRequest,
    bins: Bins,
    steps: list[list[int]],
    free: list[int],
    short: list[int],
    size: int,
    *,
    all_soft: bool,
) -> None:
    """Gives free ranks micro-batches of the smallest size, and fills all with the short samples."""
    longest = [max((bins.load[b] for b in step), default=0.0) for step in steps]
    short_makespan = _short_makespan(request, bins, steps, free, short, size)
    targets = [0.0] * len(bins.size)
    first_soft = None
    for k, step in enumerate(steps):
        for b in step:
            targets[b] = longest[k]
        if first_soft is None and not step:
            first_soft = len(bins.size)
        step.extend(bins.open(request, size, free[k] // size))
        targets += [longest[k] or short_makespan] * (free[k] // size)
    if all_soft:
        first_soft = 0
    left = fill(request, bins, targets, short, len(targets) if first_soft is None else first_soft)
    while left:
        # What no micro-batch has the rows for gets steps of its own.
        rows = sum(request.rows[size][i] for i in left)
        groups = request.num_ranks // size
        number = groups * math.ceil(rows / (groups * request.capacity[size]))
        extra = Bins()
        extra.open(request, size, number)
        left = fill(request, extra, [short_makespan] * number, left, 0)
        first = len(bins.size)
        bins.extend(extra)
        steps += [list(range(b, b + groups)) for b in range(first, first + number, groups)]


def _short_makespan(
    request: PlanRequest,
    bins: Bins,
    steps: list[list[int]],
    free: list[int],
    short: list[int],
    size: int,
) -> float:
    """The time of the steps of short samples alone, once these have filled the others' time."""
    fixed = request.fixed[size]
    work = math.fsum([request.times[size][i] for i in short])
    rows = sum([request.rows[size][i] for i in short])
    rate = work / rows if rows else 0.0
    # From here on in seconds of all ranks.
    work *= size
    ranks = 0
    for step, number in zip(steps, free, strict=True):
        if not step:
            ranks += number
            continue
        time = max([bins.load[b] for b in step])
        work -= number * min(time - fixed, rate * request.capacity[size])
        for b in step:
            work -= bins.size[b] * min(time - bins.load[b], rate * bins.slack[b])
    return fixed + max(work, 0.0) / ranks if ranks else fixed


def _deal(bins: Bins, steps: list[list[int]], size: int) -> None:
    """Deals the smallest micro-batches to the steps again, the longest to the longest step."""
    load = bins.load
    large = [[b for b in step if bins.size[b] > size] for step in steps]
    longest = [max([load[b] for b in kept], default=0.0) for kept in large]
    rest = [b for step in steps for b in step if bins.size[b] == size]
    rest.sort(key=lambda b: (-load[b], b))
    at = 0
    for k in sorted(range(len(steps)), key=lambda k: (-longest[k], k)):
        number = len(steps[k]) - len(large[k])
        steps[k] = large[k] + rest[at : at + number]
        at += number


def _packs(
    request: PlanRequest, bins: Bins, steps: list[list[int]]
) -> tuple[list[list[Pack]], float]:
    """The packs of each step, in which no rank is left without a sample, and their makespan."""
    done: list[list[Pack]] = []
    seconds: list[float] = []
    rest: list[int] = []
    for step in steps:
        packs = [Pack(bins.size[b], tuple(bins.samples[b])) for b in step if bins.samples[b]]
        if len(packs) == len(step) and not request.fills_packs:
            done.append(packs)
            seconds.append(max([bins.load[b] for b in step]))
            continue
        if len(packs) < len(step):
            completed = complete(request, packs) if packs else []
            if completed is None:
                rest += [i for pack in packs for i in pack.sample_ids]
            packs = completed or []
        if packs:
            done.append(packs)
            seconds.append(max([request.seconds(p.sample_ids, p.size) for p in packs]))
    for pack in whole_pool_packs(request, rest):
        done.append([pack])
        seconds.append(request.seconds(pack.sample_ids, pack.size))
    return done, math.fsum(seconds)
