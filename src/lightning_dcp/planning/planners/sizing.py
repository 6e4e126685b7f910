"""Which CP size each sample gets, and how many steps that makes: estimates without a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.planning.request import PlanRequest

# The share of the rows of a step that whole samples can be expected to fill.
_FILL = 0.97
# Work with larger groups over work with the smallest: the most that is worth a try, and so little
# that the largest such groups are tried first.
_MAX_MORE_WORK, _LITTLE_MORE_WORK = 1.05, 1.02
# Steps whose longest sample is over the limit at any size, that are looked at one by one.
_MAX_OVER = 8


@dataclass(frozen=True, slots=True, order=True)
class Sizing:
    """One way to choose CP sizes, and what is expected of it.

    Long samples open micro-batches of their own: those on more ranks than the smallest group, and
    those that take longer than the steps of short samples. Short samples fill up the rest.

    Attributes:
        seconds: The makespan of a plan in which short samples could be cut at will.
        num_steps: Steps of such a plan.
        limit: Samples get the smallest group on which they alone take this time at most.
        short_makespan: The expected time of a step without long samples.
        min_size: Index of the smallest CP size that is used.
        max_size: Index of the largest CP size that is used beside the whole pool.
        shared_size: CP size of groups beside the longest sample that other long ones share; 0 for
            none.
    """

    seconds: float
    num_steps: int
    limit: float
    short_makespan: float
    min_size: int
    max_size: int
    shared_size: int = 0


class Sizer:
    """Chooses CP sizes by a limit on the time that each sample takes alone.

    Attributes:
        seconds: Of each sample alone in a micro-batch, infinite where it does not fit;
            ``[num_sizes, num_samples]``.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.sizes = np.array(request.cp_sizes)
        self.columns = np.arange(len(request.lengths))
        self.capacity = request.capacity_table[:, 0]
        self.seconds = np.where(request.fits, request.time_table + request.fixed_table, np.inf)
        self.fastest = self.seconds.min(axis=0)
        self.smallest = request.fits.argmax(axis=0)

    def min_sizes(self) -> list[int]:
        """Indices of the sizes that could be the smallest of a plan, the most promising first.

        Larger groups for short samples cost something, but mean fewer micro-batches that have to
        take equal times. Only sizes that cut the pool in equal groups, and add little work.
        """
        request = self.request
        least = self._work(self.smallest)
        cheap: list[int] = []
        others: list[int] = []
        for k, size in enumerate(request.cp_sizes[1:], start=1):
            more = self._work(np.maximum(self.smallest, k)) / least
            if request.num_ranks % size == 0 and more <= _MAX_MORE_WORK:
                (cheap if more <= _LITTLE_MORE_WORK else others).append(k)
        return cheap[::-1] + others

    def max_sizes(self) -> list[int]:
        """Indices of the sizes that could be the largest beside the whole pool, the largest first.

        In a pool of 10, a group of 8 leaves two ranks that only short samples can fill. Where these
        are too few, long samples are better spread over the whole pool.
        """
        odd = [k for k, size in enumerate(self.request.cp_sizes) if self.request.num_ranks % size]
        return [k - 1 for k in reversed(odd)]

    def limits(self, doublings: int) -> list[float]:
        """``2**doublings`` limits on a sample's time that are worth a try, a factor apart."""
        longest = float(self.seconds[self.smallest, self.columns].max())
        mean = math.fsum(self.seconds[0][self.smallest == 0].tolist()) / self.request.num_ranks
        low = 0.5 * min(longest, max(mean, float(self.fastest.max())))
        # Square roots are exact to the last bit on every machine, other powers are not.
        factor = longest / low
        for _ in range(doublings):
            factor = math.sqrt(factor)
        limits = [low]
        while len(limits) < 2**doublings:
            limits.append(limits[-1] * factor)
        return limits

    def choose(self, limit: float, min_size: int, max_size: int) -> NDArray[np.int64]:
        """Index of the CP size of each sample, ``[num_samples]``: in the range, or the whole pool.

        A sample that is over the limit at any size makes its step as long as it is. The samples
        that share this step get sizes by this time instead.
        """
        if math.isinf(limit):
            return self._or_pool(np.maximum(self.smallest, min_size), max_size)
        index = np.maximum(self._within(limit), min_size)
        left = np.ones(len(index), dtype=bool)
        for _ in range(_MAX_OVER):
            makespan = float(self.fastest[left].max(initial=0.0))
            if makespan <= limit:
                break
            loose = np.maximum(self._within(makespan), min_size)
            times = np.where(left, self.seconds[loose, self.columns], 0.0)
            order = np.argsort(-times, kind="stable")
            ranks = np.cumsum(self.sizes[loose[order]])
            members = order[(ranks <= self.request.num_ranks) & left[order]]
            if not len(members):
                break
            index[members] = loose[members]
            left[members] = False
        return self._or_pool(index, max_size)

    def estimate(self, limit: float, min_size: int = 0, max_size: int | None = None) -> Sizing:
        """What to expect of the sizes for a limit."""
        request, columns = self.request, self.columns
        size = request.cp_sizes[min_size]
        max_size = len(self.sizes) - 1 if max_size is None else max_size
        num_groups, fixed = request.num_ranks // size, request.fixed[size]
        index = self.choose(limit, min_size, max_size)
        times = self.seconds[index, columns]
        order = np.argsort(-times, kind="stable")
        makespan = math.inf
        # Which samples are long depends on the makespan of the short ones' steps, and that on them.
        for _ in range(4):
            is_long = (index > min_size) | (times > makespan)
            work = float(request.time_table[min_size, ~is_long].sum())
            rows = float(request.row_table[min_size, ~is_long].sum())
            rate = work / rows if rows else 0.0
            long = order[is_long[order]]
            seconds, num_steps, slack = self._long_steps(index, times, long, min_size, rate)
            part = 1.0 - min(1.0, slack / (work * size)) if work else 0.0
            work, rows = part * work, part * rows
            short = math.ceil(rows / (_FILL * num_groups * int(self.capacity[min_size])) - 1e-9)
            if short == 0:
                break
            last, makespan = makespan, fixed + work / num_groups / short
            if makespan == last:
                break
        seconds += short * fixed + work / num_groups
        return Sizing(seconds, num_steps + short, limit, makespan, min_size, max_size)

    def _long_steps(
        self,
        index: NDArray[np.int64],
        times: NDArray[np.float64],
        long: NDArray[np.int64],
        min_size: int,
        rate: float,
    ) -> tuple[float, int, float]:
        """Of the steps that long samples fill: seconds, number, and all ranks' time for others."""
        if not len(long):
            return 0.0, 0, 0.0
        request = self.request
        size = self.sizes[index[long]]
        ranks = np.cumsum(size)
        step = (ranks - size) // request.num_ranks
        num_steps = int(step[-1]) + 1
        # The longest comes first in each step.
        makespan = times[long][np.searchsorted(step, np.arange(num_steps))]
        slack = self.capacity[index[long]] - request.row_table[index[long], long]
        idle = size * np.minimum(makespan[step] - times[long], slack * rate)
        free = num_steps * request.num_ranks - int(ranks[-1])
        fixed = request.fixed[request.cp_sizes[min_size]]
        open_time = min(float(makespan[-1]) - fixed, rate * float(self.capacity[min_size]))
        return float(makespan.sum()), num_steps, float(idle.sum()) + max(free, 0) * open_time

    def _or_pool(self, index: NDArray[np.int64], max_size: int) -> NDArray[np.int64]:
        return np.where(index > max_size, len(self.sizes) - 1, index)

    def _within(self, limit: float) -> NDArray[np.int64]:
        index: NDArray[np.int64] = (self.seconds <= np.maximum(limit, self.fastest)).argmax(axis=0)
        return index

    def _work(self, index: NDArray[np.int64]) -> float:
        """Seconds of all ranks for all samples."""
        # Not @: a sum by BLAS may differ between machines, and with it the plan.
        return float((self.sizes[index] * self.request.time_table[index, self.columns]).sum())
