"""The planner ``static``: one CP size for every micro-batch, the baseline to compare with."""

from __future__ import annotations

import heapq
import math

from lightning_dcp.alignment import longest_that_fits
from lightning_dcp.planning.packs import Pack, lay_out
from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.problem import Problem, total_rows, total_time


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
    sample = problem.order[0]
    if problem.rows[asked][sample] > problem.cap:
        raise ValueError(
            f"sample {sample} has length {problem.lengths[sample]}, but context_parallel_size="
            f"{asked} holds at most {longest_that_fits(problem.cap, asked, problem.tp_size)} "
            f"tokens at max_seqlen_per_dp_cp_rank={problem.cap}; use a larger "
            "context_parallel_size, or a dynamic planner such as planner='balanced'"
        )
    return asked


def _pack(problem: Problem, size: int) -> list[list[int]] | None:
    """As few non-empty micro-batches as fill whole steps; ``None`` if there are too few samples."""
    num_groups = problem.num_ranks // size
    num_samples = len(problem.lengths)
    num_steps = max(
        1, math.ceil(total_rows(problem, problem.order, size) / (problem.cap * num_groups))
    )
    while num_steps * num_groups <= num_samples:
        bins = _balance(problem, size, num_steps * num_groups)
        if bins is not None:
            return bins
        num_steps += 1
    return None


def _balance(problem: Problem, size: int, num_bins: int) -> list[list[int]] | None:
    """``num_bins`` micro-batches of balanced time, or else a tight packing; ``None`` if neither."""
    return _least_work_first(problem, size, num_bins) or _first_fit(problem, size, num_bins)


def _least_work_first(problem: Problem, size: int, num_bins: int) -> list[list[int]] | None:
    rows, times = problem.rows[size], problem.times[size]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, index, problem.cap) for index in range(num_bins)]
    for sample in problem.order:
        full = []
        while heap and heap[0][2] < rows[sample]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        time, index, room = heap[0]
        heapq.heapreplace(heap, (time + times[sample], index, room - rows[sample]))
        bins[index].append(sample)
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _first_fit(problem: Problem, size: int, num_bins: int) -> list[list[int]] | None:
    rows = problem.rows[size]
    bins: list[list[int]] = []
    room: list[int] = []
    for sample in problem.order:
        index = next((k for k, left in enumerate(room) if rows[sample] <= left), len(bins))
        if index == num_bins:
            return None
        if index == len(bins):
            bins.append([])
            room.append(problem.cap)
        bins[index].append(sample)
        room[index] -= rows[sample]
    while len(bins) < num_bins:
        # There are at least as many samples as bins, so some bin holds two.
        heaviest = max(
            (samples for samples in bins if len(samples) > 1),
            key=lambda samples: total_time(problem, samples, size),
        )
        bins.append([heaviest.pop()])
    return bins


def _steps(problem: Problem, size: int, bins: list[list[int]]) -> list[Step]:
    num_groups = problem.num_ranks // size
    packs = [Pack(size, tuple(samples)) for samples in bins]
    packs.sort(key=lambda pack: (-total_time(problem, pack.sample_ids, size), pack.sample_ids[0]))
    return [lay_out(packs[i : i + num_groups]) for i in range(0, len(packs), num_groups)]
