"""Longest first, to the micro-batch with the most time left, under the cap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from lightning_dcp.planning.request import Problem


@dataclass(slots=True)
class Bins:
    """Micro-batches while they are filled.

    Attributes:
        size: CP size of each.
        load: Seconds of each, the fixed time included.
        room: Rows that a rank of each can still take.
        samples: Sample ids of each.
    """

    size: list[int] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)

    def open(self, problem: Problem, size: int, number: int = 1) -> range:
        """Adds ``number`` empty micro-batches of a CP size and returns their indices."""
        first = len(self.size)
        self.size += [size] * number
        self.load += [problem.fixed[size]] * number
        self.room += [problem.rooms[size]] * number
        self.samples += [[] for _ in range(number)]
        return range(first, first + number)

    def extend(self, other: Bins) -> None:
        """Adds the micro-batches of ``other``."""
        self.size += other.size
        self.load += other.load
        self.room += other.room
        self.samples += other.samples


class _Shelf:
    """The micro-batches of one CP size: first the one with the most time left that has the rows.

    Samples come longest first. A micro-batch whose room is short of a sample waits, and comes back
    for the first sample that it holds: it then holds all later ones, until one is put in.
    """

    __slots__ = ("ready", "rows", "size", "times", "waiting")

    def __init__(
        self, problem: Problem, bins: Bins, indices: list[int], targets: list[float]
    ) -> None:
        size = self.size = bins.size[indices[0]]
        self.ready = [(bins.load[index] - targets[index], index) for index in indices]
        heapify(self.ready)
        self.waiting: list[tuple[int, float, int]] = []
        self.rows = problem.rows[size]
        self.times = problem.times[size]


def fill(
    problem: Problem, bins: Bins, targets: list[float], samples: Iterable[int], first_soft: int
) -> list[int]:
    """Puts samples, longest first, into micro-batches with time left until their targets.

    Each goes to the smallest CP size that has a micro-batch with the rows and the time for it,
    there to the one with the most time left. If none has the time, a micro-batch takes longer than
    its target: one whose target is soft if the rows fit, where it overshoots least.

    Args:
        problem: The planning request.
        bins: The micro-batches; changed in place.
        targets: Of each micro-batch: the seconds that it should take.
        samples: Sample ids, longest first.
        first_soft: The micro-batches from this index on have soft targets.

    Returns:
        The samples that no micro-batch has the rows for.
    """
    kinds: dict[tuple[int, bool], list[int]] = {}
    for index, size in enumerate(bins.size):
        kinds.setdefault((size, index < first_soft), []).append(index)
    shelves = [_Shelf(problem, bins, kinds[kind], targets) for kind in sorted(kinds)]
    if len(shelves) == 1:
        return _fill_one(bins, shelves[0], samples)
    # What the loop needs of each shelf, without looking it up again for each sample.
    unpacked = [
        (shelf.size, kind[1], shelf.rows, shelf.times, shelf.ready, shelf.waiting)
        for kind, shelf in zip(sorted(kinds), shelves, strict=True)
    ]
    room, members, load = bins.room, bins.samples, bins.load
    left = []
    for sample in samples:
        best, best_size, least, forced = None, 0, 0.0, True
        for shelf in unpacked:
            size, is_hard, rows, times, ready, waiting = shelf
            if best is not None and least <= 0.0 and size > best_size:
                break
            need = rows[sample]
            while waiting and -waiting[0][0] >= need:
                _, over, index = heappop(waiting)
                heappush(ready, (over, index))
            while ready and room[ready[0][1]] < need:
                over, index = heappop(ready)
                heappush(waiting, (-room[index], over, index))
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
        room[index] -= rows[sample]
        load[index] += times[sample]
        members[index].append(sample)
    return left


def _fill_one(bins: Bins, shelf: _Shelf, samples: Iterable[int]) -> list[int]:
    """:func:`fill` with micro-batches of one kind, without the choice between kinds."""
    room, members, load = bins.room, bins.samples, bins.load
    rows, times, ready, waiting = shelf.rows, shelf.times, shelf.ready, shelf.waiting
    left = []
    for sample in samples:
        need = rows[sample]
        while waiting and -waiting[0][0] >= need:
            _, over, index = heappop(waiting)
            heappush(ready, (over, index))
        while ready and room[ready[0][1]] < need:
            over, index = heappop(ready)
            heappush(waiting, (-room[index], over, index))
        if not ready:
            left.append(sample)
            continue
        over, index = ready[0]
        time = times[sample]
        heapreplace(ready, (over + time, index))
        room[index] -= need
        load[index] += time
        members[index].append(sample)
    return left
