"""The planner ``longest_sequence``: the longest sequence of a micro-batch sets its CP size."""

from __future__ import annotations

from lightning_dcp.planning.packs import Pack, steps_of
from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.problem import Problem


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
    steps = [steps_of(problem, packs) for packs in _first_fit(problem, _micro_batches(problem))]
    return [step for some in steps for step in some]


def _micro_batches(problem: Problem) -> list[Pack]:
    left = problem.order
    packs = []
    while left:
        size = problem.min_sizes[left[0]]
        rows = problem.rows[size]
        room = problem.cap
        taken, rest = [], []
        for sample in left:
            if rows[sample] <= room:
                taken.append(sample)
                room -= rows[sample]
            else:
                rest.append(sample)
        packs.append(Pack(size, tuple(taken)))
        left = rest
    return packs


def _first_fit(problem: Problem, packs: list[Pack]) -> list[list[Pack]]:
    steps: list[list[Pack]] = []
    free: list[int] = []
    for pack in packs:
        index = next((k for k, ranks in enumerate(free) if pack.size <= ranks), len(steps))
        if index == len(steps):
            steps.append([])
            free.append(problem.num_ranks)
        steps[index].append(pack)
        free[index] -= pack.size
    return steps
