"""LPT under a cap: the longest sample first, to the micro-batch (bin) with the most time left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from lightning_dcp.planning.request import PlanRequest


@dataclass(slots=True)
class Bins:
    """Micro-batches while they are filled.

    Attributes:
        size: CP size of each.
        load: Seconds of each, the fixed time included.
        slack: Rows that a rank of each can still take.
        samples: Sample ids of each.
    """

    size: list[int] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    slack: list[int] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)

    def open(self, request: PlanRequest, size: int, number: int = 1) -> range:
        """Adds ``number`` empty micro-batches of a CP size and returns their indices."""
        first = len(self.size)
        self.size += [size] * number
        self.load += [request.fixed[size]] * number
        self.slack += [request.capacity[size]] * number
        self.samples += [[] for _ in range(number)]
        return range(first, first + number)

    def put(self, request: PlanRequest, index: int, sample: int) -> None:
        """Adds a sample to a micro-batch."""
        size = self.size[index]
        self.load[index] += request.times[size][sample]
        self.slack[index] -= request.rows[size][sample]
        self.samples[index].append(sample)

    def extend(self, other: Bins) -> None:
        """Adds the micro-batches of ``other``."""
        self.size += other.size
        self.load += other.load
        self.slack += other.slack
        self.samples += other.samples


class _Shelf:
    """The bins of one CP size: first the one with the most time left that has the rows.

    Samples come longest first. A bin whose slack is short of a sample waits, and comes back for the
    first sample that it holds: it then holds all later ones, until one is put in.
    """

    __slots__ = ("ready", "rows", "size", "times", "waiting")

    def __init__(
        self, request: PlanRequest, bins: Bins, indices: list[int], targets: list[float]
    ) -> None:
        size = self.size = bins.size[indices[0]]
        # (time over the target, bin): the first is the one with the most time left.
        # Ties go to the lower index, so that all ranks fill alike.
        self.ready = [(bins.load[index] - targets[index], index) for index in indices]
        heapify(self.ready)
        # (negated slack, time over, bin): the first has the rows for a sample the soonest.
        self.waiting: list[tuple[int, float, int]] = []
        self.rows = request.rows[size]
        self.times = request.times[size]


def fill(
    request: PlanRequest, bins: Bins, targets: list[float], samples: Iterable[int], first_soft: int
) -> list[int]:
    """Puts samples, longest first, into bins with time left until their targets.

    Each goes to the smallest CP size that has a bin with the rows and the time for it, there to the
    one with the most time left. If none has the time, a bin takes longer than its target: one whose
    target is soft if the rows fit, where it overshoots least.

    Args:
        request: The planning request.
        bins: The micro-batches; changed in place.
        targets: Of each micro-batch: the seconds that it should take.
        samples: Sample ids, longest first.
        first_soft: The micro-batches from this index on have soft targets: no long sample sets the
            makespan of their step.

    Returns:
        The samples that no micro-batch has the rows for.
    """
    kinds: dict[tuple[int, bool], list[int]] = {}
    for index, size in enumerate(bins.size):
        kinds.setdefault((size, index < first_soft), []).append(index)
    shelves = [_Shelf(request, bins, kinds[kind], targets) for kind in sorted(kinds)]
    if len(shelves) == 1:
        return _fill_one(bins, shelves[0], samples)
    # What the loop needs of each shelf, without looking it up again for each sample.
    unpacked = [
        (shelf.size, kind[1], shelf.rows, shelf.times, shelf.ready, shelf.waiting)
        for kind, shelf in zip(sorted(kinds), shelves, strict=True)
    ]
    slack, members, load = bins.slack, bins.samples, bins.load
    left = []
    for sample in samples:
        best, best_size, least, forced = None, 0, 0.0, True
        for shelf in unpacked:
            size, is_hard, rows, times, ready, waiting = shelf
            # Shelves come by size: a smaller one has the time, larger ones only take more ranks.
            if best is not None and least <= 0.0 and size > best_size:
                break
            need = rows[sample]
            while waiting and -waiting[0][0] >= need:
                _, over, index = heappop(waiting)
                heappush(ready, (over, index))
            while ready and slack[ready[0][1]] < need:
                over, index = heappop(ready)
                heappush(waiting, (-slack[index], over, index))
            if not ready:
                continue
            over = ready[0][0] + times[sample]
            # Time left is better than a soft target, and that better than a hard one.
            fallback = is_hard and over > 0.0
            if best is None or (fallback, over) < (forced, least):
                best, best_size, least, forced = shelf, size, over, fallback
        if best is None:
            left.append(sample)
            continue
        _, _, rows, times, ready, _ = best
        index = ready[0][1]
        heapreplace(ready, (least, index))
        slack[index] -= rows[sample]
        load[index] += times[sample]
        members[index].append(sample)
    return left


def _fill_one(bins: Bins, shelf: _Shelf, samples: Iterable[int]) -> list[int]:
    """:func:`fill` with micro-batches of one kind, without the choice between kinds."""
    slack, members, load = bins.slack, bins.samples, bins.load
    rows, times, ready, waiting = shelf.rows, shelf.times, shelf.ready, shelf.waiting
    left = []
    for sample in samples:
        need = rows[sample]
        while waiting and -waiting[0][0] >= need:
            _, over, index = heappop(waiting)
            heappush(ready, (over, index))
        while ready and slack[ready[0][1]] < need:
            over, index = heappop(ready)
            heappush(waiting, (-slack[index], over, index))
        if not ready:
            left.append(sample)
            continue
        over, index = ready[0]
        time = times[sample]
        heapreplace(ready, (over + time, index))
        slack[index] -= need
        load[index] += time
        members[index].append(sample)
    return left
