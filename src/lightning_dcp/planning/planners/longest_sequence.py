"""The planner ``longest_sequence``: the longest sequence of a micro-batch sets its CP size."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.planners.packs import Pack, lay_out, spread_out
from lightning_dcp.planning.report import predicted_time
from lightning_dcp.planning.request import Problem, total_time


def plan_longest_sequence(problem: Problem) -> list[Step]:
    """Plans with the smallest CP size that holds the longest sequence of each micro-batch.

    The longest sample that is left opens a micro-batch on the smallest power of two of ranks that
    holds it, or on the whole pool; the longest of the others that still fit join it, up to the
    cap. Micro-batches are put into steps first fit, in this order. Where a step leaves ranks
    free, its slowest micro-batches are split or spread over them.

    Args:
        problem: The planning request.

    Returns:
        The steps.
    """
    return _steps(problem, _first_fit(problem, _micro_batches(problem)))


def plan_longest_sequence_below(problem: Problem, time: float) -> tuple[list[Step], float] | None:
    """:func:`plan_longest_sequence` and its time; ``None`` if it takes ``time`` seconds or more."""
    steps = _first_fit(problem, _micro_batches(problem))
    if problem.execution != "lockstep":
        laid_out = _steps(problem, steps)
        predicted = predicted_time(problem, laid_out)
        return (laid_out, predicted) if predicted < time else None
    full = [packs for packs in steps if _num_ranks(packs) == problem.num_ranks]
    rest = [packs for packs in steps if _num_ranks(packs) < problem.num_ranks]
    seconds = _slowest(problem, full)
    fixed = np.array([problem.fixed[size] for size in problem.sizes])[:, None]
    fastest = (problem.time_table + fixed).min(axis=0)
    # However the packs are spread over the ranks that they leave free.
    least = [max([float(fastest[pack.sample_ids[0]]) for pack in packs]) for packs in rest]
    if math.fsum(seconds + least) >= time:
        return None
    spread = [some for packs in rest for some in spread_out(problem, packs)]
    predicted = math.fsum(seconds + _slowest(problem, spread))
    if predicted >= time:
        return None
    return [lay_out(packs) for packs in [*full, *spread]], predicted


def _num_ranks(packs: list[Pack]) -> int:
    return sum([pack.size for pack in packs])


def _slowest(problem: Problem, steps: list[list[Pack]]) -> list[float]:
    """Seconds of each step, those of its slowest pack."""
    return [max([total_time(problem, p.sample_ids, p.size) for p in packs]) for packs in steps]


def _steps(problem: Problem, packs: list[list[Pack]]) -> list[Step]:
    return [lay_out(step) for some in packs for step in spread_out(problem, some)]


def _micro_batches(problem: Problem) -> list[Pack]:
    order = problem.order
    # Rows in the order of the samples, negated so that they ascend.
    table = -problem.row_table[:, order]
    used = set(problem.min_sizes)
    negated = {s: table[k].tolist() for k, s in enumerate(problem.sizes) if s in used}
    # The next position that is left, from each on; halved paths make a look-up near constant.
    following = list(range(len(order) + 1))

    packs = []
    first, end = 0, len(order)
    while first < end:
        position = first
        size = problem.min_sizes[order[position]]
        rows, room, samples = negated[size], problem.rooms[size], []
        while position < end:
            # Rows ascend with the tokens of single samples, but not always with those of units.
            if room + rows[position] >= 0:
                samples.append(order[position])
                room += rows[position]
                following[position] = position + 1
            position = bisect_left(rows, -room, lo=position + 1)
            while following[position] != position:
                following[position] = following[following[position]]
                position = following[position]
        packs.append(Pack(size, tuple(samples)))
        while following[first] != first:
            first = following[first]
    return packs


def _first_fit(problem: Problem, packs: list[Pack]) -> list[list[Pack]]:
    steps: list[list[Pack]] = []
    free: list[int] = []
    # Ranks are only ever taken: no step before the last one that took a size takes it later.
    first = dict.fromkeys(problem.sizes, 0)
    for pack in packs:
        index = first[pack.size]
        while index < len(free) and free[index] < pack.size:
            index += 1
        first[pack.size] = index
        if index == len(steps):
            steps.append([])
            free.append(problem.num_ranks)
        steps[index].append(pack)
        free[index] -= pack.size
    return steps
