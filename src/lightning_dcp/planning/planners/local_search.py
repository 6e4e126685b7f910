"""Local search: packs of a plan are dissolved and samples exchanged as long as it gets quicker."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np

from lightning_dcp.planning.planners.exchange import Exchange
from lightning_dcp.planning.planners.layout import Layout, pack_seconds, split_slowest
from lightning_dcp.planning.planners.packs import Pack, complete
from lightning_dcp.planning.request import Problem, total_rows

# A step's slowest packs are dissolved together up to one that is quicker by this part of the step.
_GAP = 0.02
# A sample makes room for one that is longer, if it has at most this part of its tokens.
_EJECTED = 0.8
# Numbers that are looked at for each look that is allowed, at most: with many packs and samples
# there are fewer looks. An exchange is a few looks.
_NUMBERS_IN_LOOK, _LOOKS_OF_EXCHANGE = 800, 3
# Seconds, as a part of a plan's, that are no gain but rounding.
_ROUNDING = 1e-9


def improve(
    problem: Problem, steps: Sequence[Sequence[Pack]], looks: int = 1000
) -> list[list[Pack]]:
    """Steps that take less time in lockstep, from steps at hand.

    Two kinds of moves, each kept if all steps together get quicker:

    1. The slowest packs of a step, or all of them, are dissolved. The rest of the step takes their
       ranks. Their samples, longest first, go where the steps get least longer: into a pack with
       room, into one that gives up a shorter sample (which then looks for a place itself), or into
       two packs of a step put together.
    2. A sample of the slowest pack of a step, or two of one that holds few, goes elsewhere or
       changes places with any other; two packs of a step may be put together for that.

    A pack that is quicker as two packs of half its ranks is split whenever its samples change.

    Args:
        problem: The planning request.
        steps: The packs of each step; their sizes add up to the pool.
        looks: How often to look at all packs or samples for one that changes, at most; it takes
            some 50 microseconds each time.

    Returns:
        The packs of each step, as quick as ``steps`` or quicker.
    """
    search = _Search(problem, [split_slowest(problem, packs) for packs in steps], looks)
    gained = True
    while gained and search.looks > 0:
        gained = search.dissolve_packs()
        gained = search.exchange_samples() or gained
    return search.layout.steps()


class _Search:
    """The best layout so far, and how many looks are left."""

    def __init__(self, problem: Problem, steps: Sequence[Sequence[Pack]], looks: int) -> None:
        self.problem = problem
        self.sizes = np.array(problem.sizes)
        self.lengths = np.array(problem.lengths)
        # What a sample costs at least, wherever it goes.
        work = self.sizes[:, None] * problem.time_table / problem.num_ranks
        self.least_work = np.where(problem.fits, work, np.inf).min(axis=0)
        self.keep(Layout(problem, steps))
        numbers = len(problem.lengths) + len(self.layout.members)
        self.looks = min(looks, looks * _NUMBERS_IN_LOOK // numbers)

    def keep(self, layout: Layout) -> None:
        # Without the packs that were dissolved.
        self.layout = Layout(self.problem, layout.steps())
        self.seconds = self.layout.seconds

    def dissolve_packs(self) -> bool:
        """Tries to dissolve the slowest packs of each step; whether that gained time."""
        tried: set[tuple[int, ...]] = set()
        gained = False
        while True:
            for step, number in self._slowest_packs():
                if self.looks <= 0:
                    return gained
                packs = sorted(self.layout.packs_of(step), key=self._time)
                samples = tuple(sorted(i for p in packs[-number:] for i in p.sample_ids))
                if samples in tried:
                    continue
                tried.add(samples)
                layout = self._without(step, packs[:-number], samples)
                if layout is not None and layout.seconds < self.seconds * (1 - _ROUNDING):
                    self.keep(layout)
                    gained = True
                    break
            else:
                return gained

    def _slowest_packs(self) -> list[tuple[int, int]]:
        """Steps and how many of their slowest packs to dissolve, by what that may gain."""
        found = []
        for step in range(len(self.layout.longest)):
            times = sorted(map(self._time, self.layout.packs_of(step)), reverse=True)
            for number, (time, after) in enumerate(zip(times, [*times[1:], 0.0], strict=True), 1):
                if time - after > _GAP * times[0]:
                    found.append((after - times[0], step, number))
        return [(step, number) for _, step, number in sorted(found)]

    def _time(self, pack: Pack) -> float:
        return pack_seconds(self.problem, pack.sample_ids, pack.size)

    def _without(self, step: int, rest: list[Pack], samples: Iterable[int]) -> Layout | None:
        """A layout where ``rest`` has the ranks of the step; ``None`` if it is no quicker."""
        self.looks -= 1
        completed = complete(self.problem, rest) if rest else []
        if completed is None:
            return None
        layout = self.layout.copy()
        layout.replace(step, completed)
        touched = self._insert(layout, samples)
        if touched is None:
            return None
        for k in {step, *touched}:
            packs = layout.packs_of(k)
            if packs:
                layout.replace(k, split_slowest(self.problem, packs))
        return layout

    def _insert(self, layout: Layout, samples: Iterable[int]) -> set[int] | None:
        """Puts samples into packs; the steps of these, ``None`` as soon as it is no gain."""
        problem, touched = self.problem, set()
        queue = [(-problem.lengths[i], i) for i in samples]
        heapq.heapify(queue)
        while queue:
            _, sample = heapq.heappop(queue)
            self.looks -= 1
            more, b = self._least_put(layout, sample)
            if more > 0.0:
                ejecting, ejected = self._least_ejecting(layout, sample)
                joining, pair = self._least_joining(layout, sample)
                if min(more, ejecting, joining) == math.inf:
                    return None
                if joining < min(more, ejecting):
                    b = layout.join(*pair)
                elif ejecting < more:
                    b = int(layout.pack_of[ejected])
                    layout.eject(ejected)
                    heapq.heappush(queue, (-problem.lengths[ejected], ejected))
            layout.put(sample, b)
            touched.add(int(layout.step[b]))
            if layout.seconds >= self.seconds:
                return None
        return touched

    def _least_put(self, layout: Layout, sample: int) -> tuple[float, int]:
        """How much longer steps get with the sample in a pack with room, and the pack."""
        index = layout.index
        time = self.problem.time_table[index, sample]
        more = np.maximum(layout.load + time - layout.longest[layout.step], 0.0)
        more[self.problem.row_table[index, sample] > layout.room] = np.inf
        b = int(more.argmin())
        if more[b] == 0.0:
            b = int(np.where(more == 0.0, self.sizes[index] * time, np.inf).argmin())
        return float(more[b]), b

    def _least_ejecting(self, layout: Layout, sample: int) -> tuple[float, int]:
        """The same where a shorter sample makes room, with what that one costs; that sample."""
        times, rows = self.problem.time_table, self.problem.row_table
        placed = np.flatnonzero(
            (layout.pack_of >= 0) & (self.lengths < _EJECTED * self.lengths[sample])
        )
        if not len(placed):
            return math.inf, -1
        b = layout.pack_of[placed]
        index = layout.index[b]
        load = layout.load[b] - times[index, placed] + times[index, sample]
        more = np.maximum(load - layout.longest[layout.step[b]], 0.0) + self.least_work[placed]
        more[rows[index, sample] - rows[index, placed] > layout.room[b]] = np.inf
        at = int(more.argmin())
        return float(more[at]), int(placed[at])

    def _least_joining(self, layout: Layout, sample: int) -> tuple[float, tuple[int, int]]:
        """The same in two packs of a step put together; the packs."""
        problem = self.problem
        least, pair = math.inf, (-1, -1)
        # By step and size, the packs with the most room first.
        order = np.lexsort((-layout.room, layout.index, layout.step))
        order = order[layout.room[order] >= 0]
        key = layout.step[order] * len(self.sizes) + layout.index[order]
        is_first = np.append(True, key[1:] != key[:-1])
        has_second = np.append(~is_first[1:], False)
        for at in np.flatnonzero(is_first & has_second).tolist():
            a, b = int(order[at]), int(order[at + 1])
            size = 2 * problem.sizes[layout.index[a]]
            if size not in problem.rows:
                continue
            ids = (*layout.members[a], *layout.members[b], sample)
            if total_rows(problem, ids, size) > problem.rooms[size]:
                continue
            seconds = pack_seconds(problem, ids, size)
            more = max(seconds - float(layout.longest[layout.step[a]]), 0.0)
            if more < least:
                least, pair = more, (a, b)
        return least, pair

    def exchange_samples(self) -> bool:
        """Moves or exchanges samples of the slowest packs; whether that gained time."""
        gained = False
        while self.looks > 0:
            longest = self.layout.longest
            steps = sorted(range(len(longest)), key=lambda k: (-longest[k], k))
            exchange = Exchange(self.problem, self.layout)
            for step in steps:
                changed = self._exchange_in(step, exchange)
                if changed is not None:
                    self.keep(changed)
                    gained = True
                    break
            else:
                break
        return gained

    def _exchange_in(self, step: int, exchange: Exchange) -> Layout | None:
        """A layout that is quicker by one move or exchange of a sample of the step, if any."""
        least = _ROUNDING * self.seconds
        for here in exchange.slowest[step]:
            for item in exchange.items_of(here):
                if self.looks <= 0:
                    return None
                self.looks -= _LOOKS_OF_EXCHANGE
                for other, there in exchange.promising(item, here, least):
                    layout = exchange.made(item, here, other, there, least)
                    if layout is not None:
                        return layout
        return None
