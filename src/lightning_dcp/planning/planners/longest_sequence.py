"""The planner ``longest_sequence``: the longest sequence of a micro-batch sets its CP size."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain

from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.planners.packs import (
    Pack,
    TimedPacks,
    lay_out,
    makespan,
    spread_out,
)
from lightning_dcp.planning.request import PlanRequest


def plan_longest_sequence(request: PlanRequest) -> list[Step]:
    """Plans with the smallest CP size that holds the longest sequence of each micro-batch.

    The longest sample that is left opens a micro-batch on the smallest power of two of ranks that
    holds it, or on the whole pool; the longest of the others that still fit join it, up to the
    cap. Micro-batches are put into steps first fit, in this order. Where a step leaves ranks
    free, its slowest micro-batches are split or spread over them.

    Args:
        request: The planning request.

    Returns:
        The steps.
    """
    steps = _first_fit(request, _micro_batches(request))
    return [lay_out(packs) for some in steps for packs in spread_out(request, some)]


def longest_sequence_packs_below(request: PlanRequest, seconds: float) -> Iterator[TimedPacks]:
    """The packs of :func:`plan_longest_sequence` if they may take less than ``seconds``."""
    steps = _first_fit(request, _micro_batches(request))
    is_full = [sum([p.size for p in packs]) == request.num_ranks for packs in steps]
    if request.settings.execution == "lockstep":
        fastest = (request.time_table + request.fixed_table).min(axis=0)
        least = [
            makespan(request, [packs])
            if full
            # However the packs are spread over the ranks that they leave free.
            else max([float(fastest[p.sample_ids[0]]) for p in packs])
            for packs, full in zip(steps, is_full, strict=True)
        ]
        if math.fsum(least) >= seconds:
            return
    spread = [
        [packs] if full else spread_out(request, packs)
        for packs, full in zip(steps, is_full, strict=True)
    ]
    packs_of_steps = list(chain.from_iterable(spread))
    yield packs_of_steps, makespan(request, packs_of_steps)


def _micro_batches(request: PlanRequest) -> list[Pack]:
    order = request.longest_first
    # Rows in the order of the samples, negated so that they ascend.
    table = -request.row_table[:, order]
    used = set(request.min_cp_sizes)
    negated = {s: table[k].tolist() for k, s in enumerate(request.cp_sizes) if s in used}
    # The next position that is left, from each on; halved paths make a look-up near constant.
    following = list(range(len(order) + 1))

    packs = []
    first, end = 0, len(order)
    while first < end:
        position = first
        size = request.min_cp_sizes[order[position]]
        rows, slack, samples = negated[size], request.capacity[size], []
        while position < end:
            # Rows ascend with the tokens of single samples, but not always with those of units.
            if slack + rows[position] >= 0:
                samples.append(order[position])
                slack += rows[position]
                following[position] = position + 1
            # On to the longest one that the slack holds; those in between are too long.
            position = bisect_left(rows, -slack, lo=position + 1)
            while following[position] != position:
                following[position] = following[following[position]]
                position = following[position]
        packs.append(Pack(size, tuple(samples)))
        while following[first] != first:
            first = following[first]
    return packs


def _first_fit(request: PlanRequest, packs: list[Pack]) -> list[list[Pack]]:
    steps: list[list[Pack]] = []
    free: list[int] = []
    # Ranks are only ever taken: no step before the last one that took a size takes it later.
    first = dict.fromkeys(request.cp_sizes, 0)
    for pack in packs:
        index = first[pack.size]
        while index < len(free) and free[index] < pack.size:
            index += 1
        first[pack.size] = index
        if index == len(steps):
            steps.append([])
            free.append(request.num_ranks)
        steps[index].append(pack)
        free[index] -= pack.size
    return steps
