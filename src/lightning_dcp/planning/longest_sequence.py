"""The planner ``longest_sequence``: the longest sequence of a micro-batch sets its CP size."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from lightning_dcp.planning.packs import Pack, steps_of
from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.problem import Problem, total_time


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


def plan_longest_sequence_below(problem: Problem, time: float) -> list[Step] | None:
    """:func:`plan_longest_sequence`; ``None`` where it cannot take less than ``time`` seconds."""
    steps = _first_fit(problem, _micro_batches(problem))
    if problem.execution == "lockstep" and _least_time(problem, steps) >= time:
        return None
    return _steps(problem, steps)


def _least_time(problem: Problem, steps: list[list[Pack]]) -> float:
    """Seconds that the steps take at least, however those with free ranks are spread over them."""
    fixed = np.array([problem.fixed[size] for size in problem.sizes])[:, None]
    fastest = (problem.time_table + fixed).min(axis=0)
    seconds = []
    for packs in steps:
        if sum([pack.size for pack in packs]) == problem.num_ranks:
            times = [total_time(problem, pack.sample_ids, pack.size) for pack in packs]
        else:
            times = [float(fastest[pack.sample_ids[0]]) for pack in packs]
        seconds.append(max(times))
    return math.fsum(seconds)


def _steps(problem: Problem, packs: list[list[Pack]]) -> list[Step]:
    return [step for some in packs for step in steps_of(problem, some)]


def _micro_batches(problem: Problem) -> list[Pack]:
    order = problem.order
    # Rows in the order of the samples, negated so that they ascend.
    negated = {size: [-problem.rows[size][i] for i in order] for size in set(problem.min_sizes)}
    # The next position that is left, from each on; halved paths make a look-up near constant.
    following = list(range(len(order) + 1))

    def next_left(position: int) -> int:
        while following[position] != position:
            following[position] = following[following[position]]
            position = following[position]
        return position

    packs = []
    position = next_left(0)
    while position < len(order):
        size = problem.min_sizes[order[position]]
        rows, room, samples = negated[size], problem.rooms[size], []
        while position < len(order):
            samples.append(order[position])
            room += rows[position]
            following[position] = position + 1
            position = next_left(bisect_left(rows, -room, lo=position + 1))
            # Rows ascend with the tokens of single samples, but not always with those of units.
            while position < len(order) and room < -rows[position]:
                position = next_left(position + 1)
        packs.append(Pack(size, tuple(samples)))
        position = next_left(0)
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
