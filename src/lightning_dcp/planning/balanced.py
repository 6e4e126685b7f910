"""The planner ``balanced``: steps whose groups all take about the same time."""

from __future__ import annotations

import math
from bisect import bisect_left
from heapq import heappush, heapreplace

from lightning_dcp.planning.packs import (
    Pack,
    complete,
    largest_power_of_two,
    lay_out,
    whole_pool_packs,
)
from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.problem import Problem, total_time

# A larger group for the longest sample of a step must make the step this much more efficient for
# every doubling: the cost model does not price communication, which grows with the group.
_MIN_GAIN_PER_DOUBLING = 0.04
# The share of the rows that a step can be expected to fill with whole samples.
_FILL = 0.97
# How far a step may go over the mean time. On 1K to 16K lengths a limit of 1.0 leaves rows empty
# and makes 13 % more steps; limits above this one make no fewer.
_SLACK = 1.25


def plan_balanced(problem: Problem) -> list[Step]:
    """Plans steps whose groups take about the same predicted time.

    A step is led by the longest sample that is left. Its CP size sets the step's time, or, if
    that is longer, about the mean time that the remaining steps need. The other ranks are filled
    up to this time, longest samples first, each on the smallest group that holds it in time; what
    still fits then joins the groups that have time left. Of the leader's sizes the smallest is
    taken, unless a larger one makes the step clearly more efficient (work over ranks times time).

    Args:
        problem: The planning request.

    Returns:
        The steps.
    """
    left = problem.order
    steps = []
    while left:
        packs = _best_step(problem, left)
        steps.append(lay_out(packs))
        taken = {i for pack in packs for i in pack.sample_ids}
        left = [i for i in left if i not in taken]
    return steps


def _best_step(problem: Problem, left: list[int]) -> list[Pack]:
    """The packs of one step that holds ``left[0]``, as efficient as the leader's sizes allow."""
    num_steps = math.ceil(_least_rows(problem, left) / (_FILL * problem.num_ranks * problem.cap))
    mean_time = total_time(problem, left, 1) / (problem.num_ranks * num_steps)
    # Fallback: the whole pool holds any sample.
    best = whole_pool_packs(problem, left[:1])
    best_score = -math.inf
    first = problem.sizes.index(problem.min_sizes[left[0]])
    for doublings, size in enumerate(problem.sizes[first:]):
        filling = _Filling(problem, left, size)
        filling.fill(max(_SLACK * mean_time, problem.times[size][left[0]]))
        if num_steps == 1:
            # A step more would cost more than some imbalance.
            filling.fill(math.inf)
        packs = complete(problem, filling.packs())
        if packs is None:
            continue
        efficiency = _efficiency(problem, packs)
        score = efficiency - _MIN_GAIN_PER_DOUBLING * doublings
        if score > best_score:
            best, best_score = packs, score
        if efficiency + _MIN_GAIN_PER_DOUBLING > 1.0:
            break
    return best


def _efficiency(problem: Problem, packs: list[Pack]) -> float:
    """Work of the samples without CP over what all ranks could do until the slowest is done."""
    slowest = max(total_time(problem, pack.sample_ids, pack.size) for pack in packs)
    work = math.fsum(problem.times[1][i] for pack in packs for i in pack.sample_ids)
    return work / (problem.num_ranks * slowest)


def _least_rows(problem: Problem, samples: list[int]) -> int:
    """Rows over all ranks if each sample runs on the smallest group that holds it."""
    sizes = problem.min_sizes
    return sum(problem.rows[sizes[i]][i] * sizes[i] for i in samples)


class _Filling:
    """A step while it is filled: its groups, and for each size those with the least time first."""

    def __init__(self, problem: Problem, left: list[int], lead_size: int) -> None:
        self.problem = problem
        self.left = left
        self.free = problem.num_ranks
        self.taken: set[int] = set()
        self.samples: list[tuple[int, list[int]]] = []
        self.heaps: dict[int, list[tuple[float, int, int]]] = {}
        self._open(left[0], lead_size)

    def packs(self) -> list[Pack]:
        """The groups so far."""
        return [Pack(size, tuple(samples)) for size, samples in self.samples]

    def fill(self, limit: float) -> None:
        """Adds samples, longest first, as long as no group takes longer than ``limit``."""
        position = 0
        while position < len(self.left):
            sample = self.left[position]
            if sample in self.taken or self._place(sample, limit):
                position += 1
            else:
                position = self._next_that_fits(position + 1, limit)

    def _place(self, sample: int, limit: float) -> bool:
        size = self._size_to_open(sample, limit)
        if size:
            self._open(sample, size)
            return True
        size = self._size_to_join(sample, limit)
        if size:
            self._join(sample, size)
            return True
        return False

    def _size_to_open(self, sample: int, limit: float) -> int:
        """The smallest size of free ranks that runs the sample in time; 0 if none does."""
        size = self.problem.min_sizes[sample]
        most = largest_power_of_two(self.free) if self.free else 0
        while size <= most:
            if self.problem.times[size][sample] <= limit:
                return size
            size *= 2
        return 0

    def _size_to_join(self, sample: int, limit: float) -> int:
        """The size whose least busy group finishes soonest with the sample; 0 if none can."""
        soonest, best = math.inf, 0
        for size, heap in self.heaps.items():
            time, room, _ = heap[0]
            after = time + self.problem.times[size][sample]
            if self.problem.rows[size][sample] <= room and after <= limit and after < soonest:
                soonest, best = after, size
        return best

    def _open(self, sample: int, size: int) -> None:
        time = self.problem.times[size][sample]
        room = self.problem.cap - self.problem.rows[size][sample]
        heappush(self.heaps.setdefault(size, []), (time, room, len(self.samples)))
        self.samples.append((size, [sample]))
        self.taken.add(sample)
        self.free -= size

    def _join(self, sample: int, size: int) -> None:
        time, room, index = self.heaps[size][0]
        time += self.problem.times[size][sample]
        room -= self.problem.rows[size][sample]
        heapreplace(self.heaps[size], (time, room, index))
        self.samples[index][1].append(sample)
        self.taken.add(sample)

    def _next_that_fits(self, start: int, limit: float) -> int:
        """The first position from ``start`` on whose sample is short enough for some group."""
        places = [(size, heap[0][1], heap[0][0]) for size, heap in self.heaps.items()]
        if self.free:
            places.append((largest_power_of_two(self.free), self.problem.cap, 0.0))
        return min(self._first_below(start, *place, limit) for place in places)

    def _first_below(self, start: int, size: int, room: int, time: float, limit: float) -> int:
        rows, times = self.problem.rows[size], self.problem.times[size]

        def fits(sample: int) -> bool:
            return rows[sample] <= room and time + times[sample] <= limit

        # Longest first: once one fits, all after it do.
        return bisect_left(self.left, True, lo=start, key=fits)
