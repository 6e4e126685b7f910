"""Drafts of plans for ``balanced``: steps of packs, made from a choice of CP sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from lightning_dcp.planning.planners.filling import Bins, fill
from lightning_dcp.planning.planners.packs import Pack, best_fit, complete, whole_pool_packs
from lightning_dcp.planning.planners.sizing import Sizer, Sizing
from lightning_dcp.planning.request import Problem, total_time


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


def make_draft(problem: Problem, sizer: Sizer, sizing: Sizing) -> Draft:
    """Steps with the sizes for a limit; see :func:`plan_balanced`, 2 to 4.

    Args:
        problem: The planning request.
        sizer: Of the same problem.
        sizing: The limit, the level, the smallest size, and the number of steps to make; more are
            made where these do not hold all samples.
    """
    index = sizer.choose(sizing.limit, sizing.base, sizing.top)
    base = problem.sizes[sizing.base]
    sizes = sizer.sizes[index].tolist()
    leads = ((index > sizing.base) | (sizer.alone[index, sizer.columns] > sizing.level)).tolist()
    bins = Bins()
    if sizing.num_parts:
        leaders = _open_parts(problem, bins, [i for i in problem.order if leads[i]], sizing)
    else:
        placed, times = _share_steps(problem, bins, sizes, leads, sizing)
        leaders = _open_leaders(problem, bins, sizes, leads, sizing.limit, placed, times)
    steps, free = _place(problem, bins, leaders, sizing.num_steps)
    small = [i for i in problem.order if not leads[i]]
    _fill_up(problem, bins, steps, free, small, base, all_soft=math.isinf(sizing.level))
    _deal(bins, steps, base)
    packs, seconds = _finish(problem, bins, steps)
    return Draft(packs, seconds, replace(sizing, num_steps=len(steps)))


def _share_steps(
    problem: Problem, bins: Bins, sizes: list[int], leads: list[bool], sizing: Sizing
) -> tuple[set[int], list[float]]:
    """Steps of the longest leading sample that is left and of groups that the next ones share.

    On the smallest groups that hold them, one each, fewer of them fit into its step, and the rest
    make the next steps long. On larger groups they take longer, but no longer than it does.
    Returns the samples that were placed, and of each micro-batch the time of its step.
    """
    placed: set[int] = set()
    times_of_steps: list[float] = []
    left = [i for i in problem.order if leads[i]] if sizing.num_shared else []
    for _ in range(sizing.num_shared):
        if not left:
            break
        size = int(sizes[left[0]] * sizing.shared)
        if size not in problem.rows or not problem.sizes[sizing.base] < size < problem.num_ranks:
            # The longest one gets a micro-batch like any other.
            del left[0]
            continue
        members = _share_step(problem, bins, sizes, left, size)
        first = len(times_of_steps)
        times_of_steps += [bins.load[first]] * (len(bins.load) - first)
        placed |= members
        left = [i for i in left if i not in members]
    return placed, times_of_steps


def _share_step(
    problem: Problem, bins: Bins, sizes: list[int], left: list[int], size: int
) -> set[int]:
    """One such step, first fit in the order of ``left``; the samples that it holds."""
    longest, first = left[0], len(bins.size)
    _open_with(problem, bins, sizes[longest], [longest])
    load, room = bins.load, bins.room
    members = {longest}
    free = problem.num_ranks - sizes[longest]
    rows, times = problem.rows[size], problem.times[size]
    for i in left[1:]:
        if problem.min_sizes[i] > size:
            continue
        for b in range(first + 1, len(load)):
            if rows[i] <= room[b] and load[b] + times[i] <= load[first]:
                break
        else:
            if free < size or problem.fixed[size] + times[i] > load[first]:
                continue
            b = bins.open(problem, size)[0]
            free -= size
        load[b] += times[i]
        room[b] -= rows[i]
        bins.samples[b].append(i)
        members.add(i)
    return members


def _open_parts(problem: Problem, bins: Bins, samples: list[int], sizing: Sizing) -> list[int]:
    """Micro-batches on the largest power of two, as many as parts, and for the rest on the pool."""
    size = problem.sizes[sizing.top]
    fitting = [i for i in samples if problem.min_sizes[i] <= size]
    for members in best_fit(problem, size, fitting, sizing.num_parts):
        _open_with(problem, bins, size, members)
    placed = set(chain.from_iterable(bins.samples))
    for pack in whole_pool_packs(problem, [i for i in samples if i not in placed]):
        _open_with(problem, bins, pack.size, pack.sample_ids)
    return sorted(range(len(bins.load)), key=lambda b: (-bins.load[b], b))


def _open_with(problem: Problem, bins: Bins, size: int, samples: Iterable[int]) -> None:
    b = bins.open(problem, size)[0]
    for i in samples:
        bins.load[b] += problem.times[size][i]
        bins.room[b] -= problem.rows[size][i]
        bins.samples[b].append(i)


def _open_leaders(
    problem: Problem,
    bins: Bins,
    sizes: list[int],
    leads: list[bool],
    limit: float,
    placed: set[int],
    times_of_steps: list[float],
) -> list[int]:
    """Micro-batches of the leading samples not yet placed, those that take the longest first."""
    by_size: dict[int, list[int]] = {}
    for i in problem.order:
        if leads[i] and i not in placed:
            by_size.setdefault(sizes[i], []).append(i)
    for size, samples in sorted(by_size.items(), reverse=True):
        rows, times = problem.rows[size], problem.times[size]
        # Of the last micro-batch opened: its room and time until the limit.
        room, slack = 0, 0.0
        for i in samples:
            if rows[i] > room or times[i] > slack:
                bins.open(problem, size)
                room, slack = problem.rooms[size], limit - problem.fixed[size]
            room -= rows[i]
            slack -= times[i]
            bins.load[-1] += times[i]
            bins.room[-1] = room
            bins.samples[-1].append(i)
    load = times_of_steps + bins.load[len(times_of_steps) :]
    return sorted(range(len(load)), key=lambda b: (-load[b], b))


def _place(
    problem: Problem, bins: Bins, leaders: list[int], num_steps: int
) -> tuple[list[list[int]], list[int]]:
    """First fit of micro-batches to steps: for each step its micro-batches and its free ranks."""
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    free = [problem.num_ranks] * num_steps
    first = dict.fromkeys(problem.sizes, 0)
    for b in leaders:
        size = bins.size[b]
        k = first[size]
        while k < len(free) and free[k] < size:
            k += 1
        first[size] = k
        if k == len(free):
            steps.append([])
            free.append(problem.num_ranks)
        steps[k].append(b)
        free[k] -= size
    return steps, free


def _fill_up(
    problem: Problem,
    bins: Bins,
    steps: list[list[int]],
    free: list[int],
    small: list[int],
    base: int,
    *,
    all_soft: bool,
) -> None:
    """Gives free ranks micro-batches of the base size, and fills all with the small samples."""
    longest = [max((bins.load[b] for b in step), default=0.0) for step in steps]
    level = _level(problem, bins, steps, free, small, base)
    targets = [0.0] * len(bins.size)
    first_soft = None
    for k, step in enumerate(steps):
        for b in step:
            targets[b] = longest[k]
        if first_soft is None and not step:
            first_soft = len(bins.size)
        step.extend(bins.open(problem, base, free[k] // base))
        targets += [longest[k] or level] * (free[k] // base)
    if all_soft:
        first_soft = 0
    left = fill(problem, bins, targets, small, len(targets) if first_soft is None else first_soft)
    while left:
        # What found no room gets steps of its own.
        rows = sum(problem.rows[base][i] for i in left)
        groups = problem.num_ranks // base
        number = groups * math.ceil(rows / (groups * problem.rooms[base]))
        extra = Bins()
        extra.open(problem, base, number)
        left = fill(problem, extra, [level] * number, left, 0)
        first = len(bins.size)
        bins.extend(extra)
        steps += [list(range(b, b + groups)) for b in range(first, first + number, groups)]


def _level(
    problem: Problem,
    bins: Bins,
    steps: list[list[int]],
    free: list[int],
    small: list[int],
    base: int,
) -> float:
    """The time of the steps without leaders, if the others are filled to the end with ``small``."""
    fixed = problem.fixed[base]
    work = math.fsum([problem.times[base][i] for i in small])
    rows = sum([problem.rows[base][i] for i in small])
    rate = work / rows if rows else 0.0
    # From here on in seconds of all ranks.
    work *= base
    ranks = 0
    for step, number in zip(steps, free, strict=True):
        if not step:
            ranks += number
            continue
        time = max([bins.load[b] for b in step])
        work -= number * min(time - fixed, rate * problem.rooms[base])
        for b in step:
            work -= bins.size[b] * min(time - bins.load[b], rate * bins.room[b])
    return fixed + max(work, 0.0) / ranks if ranks else fixed


def _deal(bins: Bins, steps: list[list[int]], base: int) -> None:
    """Deals the micro-batches of the base size to the steps again, the longest to the longest."""
    load, size = bins.load, bins.size
    large = [[b for b in step if size[b] > base] for step in steps]
    longest = [max([load[b] for b in kept], default=0.0) for kept in large]
    rest = [b for step in steps for b in step if size[b] == base]
    rest.sort(key=lambda b: (-load[b], b))
    at = 0
    for k in sorted(range(len(steps)), key=lambda k: (-longest[k], k)):
        number = len(steps[k]) - len(large[k])
        steps[k] = large[k] + rest[at : at + number]
        at += number


def _finish(problem: Problem, bins: Bins, steps: list[list[int]]) -> tuple[list[list[Pack]], float]:
    """The packs of each step, in which no rank is left without a sample, and their time."""
    done: list[list[Pack]] = []
    seconds = []
    rest: list[int] = []
    size, samples, load = bins.size, bins.samples, bins.load
    for step in steps:
        packs = [Pack(size[b], tuple(samples[b])) for b in step if samples[b]]
        if len(packs) == len(step):
            done.append(packs)
            seconds.append(max([load[b] for b in step]))
            if problem.has_tails:
                seconds[-1] = max(_pack_time(problem, pack) for pack in packs)
            continue
        completed = complete(problem, packs) if packs else []
        if completed is None:
            rest += [i for pack in packs for i in pack.sample_ids]
        elif completed:
            done.append(completed)
            seconds.append(max(_pack_time(problem, pack) for pack in completed))
    for pack in whole_pool_packs(problem, rest):
        done.append([pack])
        seconds.append(_pack_time(problem, pack))
    return done, math.fsum(seconds)


def _pack_time(problem: Problem, pack: Pack) -> float:
    return total_time(problem, pack.sample_ids, pack.size)
