"""Which CP size each sample gets, and how many steps that makes: estimates without a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.planning.planners.packs import largest_power_of_two
from lightning_dcp.planning.request import Problem

# The share of the rows of a step that whole samples can be expected to fill.
_FILL = 0.97
# Work with larger groups over work with the smallest: the most that is worth a try, and so little
# that the largest such groups are tried first.
_MAX_MORE_WORK, _LITTLE_MORE_WORK = 1.05, 1.02
# Steps whose longest sample is over the limit at any size, that are looked at one by one.
_MAX_OVER = 8
# Steps with a large group that are tried, over the fewest that have the rows for all samples.
_MORE_PARTS = (1.0, 1.1, 1.25, 1.5)


@dataclass(frozen=True, slots=True, order=True)
class Sizing:
    """One way to choose CP sizes, and what is expected of it.

    Attributes:
        seconds: The time that a plan would take if all but leading samples could be cut at will.
        num_steps: Steps of such a plan.
        limit: Samples get the smallest group on which they alone take this time at most.
        level: The expected time of steps without a leading sample: samples on the smallest groups
            that take longer lead steps too.
        base: Index of the smallest CP size that is used.
        top: Index of the largest that is used below the whole pool.
        shared: Ranks of groups that hold several leading samples, over those of the longest sample
            of their step; 0 for none.
        num_shared: Steps with such groups.
        num_parts: Of a pool that is no power of two: steps with a group of the largest power of two
            that hold all leading samples but those left over, which go on the whole pool; 0 if
            sizes are chosen sample by sample.
    """

    seconds: float
    num_steps: int
    limit: float
    level: float
    base: int
    top: int
    shared: float = 0.0
    num_shared: int = 0
    num_parts: int = 0


class Sizer:
    """Chooses CP sizes by a limit on the time that each sample takes alone."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes = np.array(problem.sizes)
        self.columns = np.arange(len(problem.lengths))
        self.room = problem.room_table[:, 0]
        fixed = np.array([problem.fixed[s] for s in problem.sizes])[:, None]
        fits = problem.fits
        self.alone = np.where(fits, problem.time_table + fixed, np.inf)
        self.fastest = self.alone.min(axis=0)
        self.smallest = fits.argmax(axis=0)

    def bases(self) -> list[int]:
        """Indices of the sizes that could be the smallest of a plan, the most promising first.

        Larger groups for short samples cost something, but mean fewer micro-batches that have to
        take equal times. Only sizes that cut the pool in equal groups, and add little work.
        """
        problem = self.problem
        least = self._work(self.smallest)
        cheap: list[int] = []
        others: list[int] = []
        for k, size in enumerate(problem.sizes[1:], start=1):
            more = self._work(np.maximum(self.smallest, k)) / least
            if problem.num_ranks % size == 0 and more <= _MAX_MORE_WORK:
                (cheap if more <= _LITTLE_MORE_WORK else others).append(k)
        return cheap[::-1] + others

    def _work(self, index: NDArray[np.int64]) -> float:
        """Seconds of all ranks for all samples."""
        # Not @: a sum by BLAS may differ between machines, and with it the plan.
        return float((self.sizes[index] * self.problem.time_table[index, self.columns]).sum())

    def tops(self) -> list[int]:
        """Indices of the sizes that could be the largest below the whole pool, the largest first.

        Of a pool that is no power of two, groups of some sizes leave ranks that only shorter
        samples can fill. Where these are too few, some large groups are better spread over the
        whole pool than all of them in turn.
        """
        odd = [k for k, size in enumerate(self.problem.sizes) if self.problem.num_ranks % size]
        return [k - 1 for k in reversed(odd)]

    def parts(self) -> list[Sizing]:
        """Of a pool that is no power of two: few steps without the whole pool.

        Each of them needs short samples for the ranks that its largest group leaves. Where these
        are few, the group should be full of longer ones.
        """
        problem, num_ranks = self.problem, self.problem.num_ranks
        largest = largest_power_of_two(num_ranks)
        if largest == num_ranks:
            return []
        # The largest power of two that cuts the other ranks in equal groups.
        base = problem.sizes.index(num_ranks & -num_ranks)
        small = problem.fits[base]
        most = int(small.sum()) * problem.sizes[base] // (num_ranks - largest)
        k = problem.sizes.index(largest)
        rows = int(problem.row_table[k, ~small & problem.fits[k]].sum())
        needed = -(-rows // problem.rooms[largest])
        numbers = {min(most, math.ceil(needed * more)) for more in _MORE_PARTS}
        return [
            Sizing(0.0, number, math.inf, math.inf, base, k, num_parts=number)
            for number in sorted(numbers)
            if number
        ]

    def limits(self, doublings: int) -> list[float]:
        """``2**doublings`` limits on a sample's time that are worth a try, a factor apart."""
        longest = float(self.alone[self.smallest, self.columns].max())
        mean = math.fsum(self.alone[0][self.smallest == 0].tolist()) / self.problem.num_ranks
        low = 0.5 * min(longest, max(mean, float(self.fastest.max())))
        # Square roots are exact to the last bit on every machine, other powers are not.
        factor = longest / low
        for _ in range(doublings):
            factor = math.sqrt(factor)
        limits = [low]
        while len(limits) < 2**doublings:
            limits.append(limits[-1] * factor)
        return limits

    def choose(self, limit: float, base: int, top: int) -> NDArray[np.int64]:
        """Index of the CP size of each sample, ``base`` to ``top`` or the whole pool.

        A sample that is over the limit at any size makes its step as long as it is. The samples
        that share this step get sizes by this time instead.
        """
        whole = len(self.sizes) - 1
        if math.isinf(limit):
            index = np.maximum(self.smallest, base)
            return np.where(index > top, whole, index)
        index = np.maximum(self._within(limit), base)
        left = np.ones(len(index), dtype=bool)
        for _ in range(_MAX_OVER):
            lead = float(self.fastest[left].max(initial=0.0))
            if lead <= limit:
                break
            loose = np.maximum(self._within(lead), base)
            times = np.where(left, self.alone[loose, self.columns], 0.0)
            order = np.argsort(-times, kind="stable")
            ranks = np.cumsum(self.sizes[loose[order]])
            members = order[(ranks <= self.problem.num_ranks) & left[order]]
            if not len(members):
                break
            index[members] = loose[members]
            left[members] = False
        return np.where(index > top, whole, index)

    def _within(self, limit: float) -> NDArray[np.int64]:
        index: NDArray[np.int64] = (self.alone <= np.maximum(limit, self.fastest)).argmax(axis=0)
        return index

    def estimate(self, limit: float, base: int = 0, top: int | None = None) -> Sizing:
        """What to expect of the sizes for a limit."""
        problem = self.problem
        top = len(self.sizes) - 1 if top is None else top
        groups = problem.num_ranks // problem.sizes[base]
        fixed = problem.fixed[problem.sizes[base]]
        index = self.choose(limit, base, top)
        times = self.alone[index, self.columns]
        order = np.argsort(-times, kind="stable")
        level = math.inf
        for _ in range(4):
            led = (index > base) | (times > level)
            leaders = order[led[order]]
            small = ~led
            work = float(problem.time_table[base, small].sum())
            rows = float(problem.row_table[base, small].sum())
            rate = work / rows if rows else 0.0
            seconds, num_led, taken = self._lead(index, times, leaders, base, rate)
            part = 1.0 - min(1.0, taken / (work * problem.sizes[base])) if work else 0.0
            work, rows = part * work, part * rows
            pure = math.ceil(rows / (_FILL * groups * int(self.room[base])) - 1e-9)
            if pure == 0:
                break
            last, level = level, fixed + work / groups / pure
            if level == last:
                break
        seconds += pure * fixed + work / groups
        return Sizing(seconds, num_led + pure, limit, level, base, top)

    def _lead(
        self,
        index: NDArray[np.int64],
        times: NDArray[np.float64],
        leaders: NDArray[np.int64],
        base: int,
        rate: float,
    ) -> tuple[float, int, float]:
        """Time and number of the steps that leaders fill, and their ranks' time left for others."""
        if not len(leaders):
            return 0.0, 0, 0.0
        problem = self.problem
        size = self.sizes[index[leaders]]
        ranks = np.cumsum(size)
        step = (ranks - size) // problem.num_ranks
        num_steps = int(step[-1]) + 1
        lead = times[leaders][np.searchsorted(step, np.arange(num_steps))]
        room = self.room[index[leaders]] - problem.row_table[index[leaders], leaders]
        idle = size * np.minimum(lead[step] - times[leaders], room * rate)
        free = num_steps * problem.num_ranks - int(ranks[-1])
        fixed = problem.fixed[problem.sizes[base]]
        open_time = min(float(lead[-1]) - fixed, rate * float(self.room[base]))
        return float(lead.sum()), num_steps, float(idle.sum()) + max(free, 0) * open_time
