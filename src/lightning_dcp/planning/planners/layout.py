"""The packs of a plan as arrays, for searches that change a few of them at a time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np

from lightning_dcp.planning.planners.packs import Pack
from lightning_dcp.planning.request import Problem, total_rows


class Layout:
    """The packs of a plan as arrays; packs that were dissolved stay, without room.

    Attributes:
        index: Index of the CP size of each pack.
        step: The step of each pack.
        load: Seconds of each pack, those of its rows to fill up with left out.
        room: Rows that a rank of each pack can still take; -1 if it was dissolved.
        members: Sample ids of each pack.
        pack_of: The pack of each sample; -1 while it has none.
        longest: Seconds of each step; 0 if it has no packs.
    """

    __slots__ = ("index", "load", "longest", "members", "pack_of", "problem", "room", "step")

    def __init__(self, problem: Problem, steps: Sequence[Sequence[Pack]]) -> None:
        self.problem = problem
        self.index = np.empty(0, dtype=np.int64)
        self.step = np.empty(0, dtype=np.int64)
        self.load = np.empty(0)
        self.room = np.empty(0, dtype=np.int64)
        self.members: list[tuple[int, ...]] = []
        self.pack_of = np.full(len(problem.lengths), -1)
        self.longest = np.zeros(len(steps))
        self._add([(k, pack) for k, packs in enumerate(steps) for pack in packs])

    def copy(self) -> Layout:
        """The same layout, to change."""
        other = Layout.__new__(Layout)
        other.problem = self.problem
        other.members = list(self.members)
        for name in ("index", "step", "load", "room", "pack_of", "longest"):
            setattr(other, name, getattr(self, name).copy())
        return other

    @property
    def seconds(self) -> float:
        """Seconds of all steps in lockstep."""
        return math.fsum(self.longest.tolist())

    def steps(self) -> list[list[Pack]]:
        """The packs of each step, without those that were dissolved."""
        found: list[list[Pack]] = [[] for _ in range(len(self.longest))]
        for b, k in enumerate(self.step.tolist()):
            if self.members[b]:
                found[k].append(self.pack(b))
        return [packs for packs in found if packs]

    def packs_of(self, step: int) -> list[Pack]:
        """The packs of a step."""
        return [self.pack(b) for b in self._alive(step)]

    def pack(self, b: int) -> Pack:
        """One pack."""
        return Pack(self.problem.sizes[self.index[b]], self.members[b])

    def replace(self, step: int, packs: Iterable[Pack]) -> None:
        """Gives a step other packs; samples that are in none of them have no pack."""
        for b in self._alive(step):
            self._dissolve(b)
        self.longest[step] = 0.0
        self._add([(step, pack) for pack in packs])

    def put(self, sample: int, b: int) -> None:
        """Puts a sample without a pack into one that has the rows."""
        k, problem = self.index[b], self.problem
        self.load[b] += problem.time_table[k, sample]
        self.room[b] -= problem.row_table[k, sample]
        self.members[b] += (sample,)
        self.pack_of[sample] = b
        self.longest[self.step[b]] = max(self.longest[self.step[b]], self.load[b])

    def eject(self, sample: int) -> None:
        """Takes a sample out of its pack; the time of the step is left as it is."""
        b, problem = int(self.pack_of[sample]), self.problem
        self.load[b] -= problem.time_table[self.index[b], sample]
        self.room[b] += problem.row_table[self.index[b], sample]
        self.members[b] = tuple(i for i in self.members[b] if i != sample)
        self.pack_of[sample] = -1

    def joined(self, a: int, b: int) -> Pack:
        """What two packs of one size make on the ranks of both."""
        return Pack(2 * self.problem.sizes[self.index[a]], self.members[a] + self.members[b])

    def join(self, a: int, b: int) -> int:
        """Puts two packs of one size in a step together; the new pack."""
        joined, step = self.joined(a, b), int(self.step[a])
        self._dissolve(a)
        self._dissolve(b)
        self._add([(step, joined)])
        return len(self.members) - 1

    def _alive(self, step: int) -> list[int]:
        found: list[int] = np.flatnonzero((self.step == step) & (self.room >= 0)).tolist()
        return found

    def _dissolve(self, b: int) -> None:
        self.pack_of[list(self.members[b])] = -1
        self.members[b] = ()
        self.room[b] = -1
        self.load[b] = 0.0

    def _add(self, placed: list[tuple[int, Pack]]) -> None:
        if not placed:
            return
        first = len(self.members)
        index, seconds, room = measure(self.problem, [pack for _, pack in placed])
        self.index = np.append(self.index, index)
        self.step = np.append(self.step, [k for k, _ in placed])
        self.load = np.append(self.load, seconds)
        self.room = np.append(self.room, room)
        for b, (k, pack) in enumerate(placed, start=first):
            self.members.append(pack.sample_ids)
            self.pack_of[list(pack.sample_ids)] = b
            self.longest[k] = max(self.longest[k], seconds[b - first])


def lockstep_seconds(problem: Problem, steps: Iterable[Iterable[Pack]]) -> float:
    """Seconds of steps in lockstep, without rows that fill packs up."""
    slowest = [max(pack_seconds(problem, p.sample_ids, p.size) for p in packs) for packs in steps]
    return math.fsum(slowest)


def measure(problem: Problem, packs: Iterable[Pack]) -> tuple[list[int], list[float], list[int]]:
    """Of each pack the index of its CP size, its seconds, and the rows that a rank still takes."""
    index, seconds, room = [], [], []
    index_of = {size: k for k, size in enumerate(problem.sizes)}
    rooms = problem.room_table[:, 0].tolist()
    for size, ids in packs:
        k = index_of[size]
        index.append(k)
        seconds.append(pack_seconds(problem, ids, size))
        room.append(rooms[k] - total_rows(problem, ids, size))
    return index, seconds, room


def pack_seconds(problem: Problem, sample_ids: Iterable[int], size: int) -> float:
    """Seconds of a pack without rows that fill it up."""
    times = problem.times[size]
    return problem.fixed[size] + math.fsum([times[i] for i in sample_ids])


def split_slowest(problem: Problem, packs: Iterable[Pack]) -> list[Pack]:
    """The packs of a step, of which the slowest is split in halves as long as that is quicker."""
    heap = [(-pack_seconds(problem, p.sample_ids, p.size), p.sample_ids, p) for p in packs]
    heapq.heapify(heap)
    while True:
        seconds, _, pack = heap[0]
        parts = _halves(problem, pack)
        times = [-pack_seconds(problem, part.sample_ids, part.size) for part in parts]
        if not parts or min(times) <= seconds:
            return [pack for *_, pack in heap]
        heapq.heappop(heap)
        for time, part in zip(times, parts, strict=True):
            heapq.heappush(heap, (time, part.sample_ids, part))


def _halves(problem: Problem, pack: Pack) -> list[Pack]:
    """The pack as two of half its ranks, none if it is not found to fit them."""
    size = pack.size // 2
    if len(pack.sample_ids) < 2 or size == 0 or pack.size & (pack.size - 1):
        return []
    rows, times = problem.rows[size], problem.times[size]
    parts: list[list[int]] = [[], []]
    load, room = [0.0, 0.0], [problem.rooms[size]] * 2
    for i in sorted(pack.sample_ids, key=lambda i: (-problem.lengths[i], i)):
        first = int(load[1] < load[0])
        part = first if rows[i] <= room[first] else 1 - first
        if rows[i] > room[part]:
            return []
        parts[part].append(i)
        load[part] += times[i]
        room[part] -= rows[i]
    return [Pack(size, tuple(part)) for part in parts] if all(parts) else []
