"""Moves and exchanges of samples between packs, and what they gain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.planning.planners.layout import Layout, measure, pack_seconds, split_slowest
from lightning_dcp.planning.planners.packs import Pack
from lightning_dcp.planning.request import Problem

# Exchanges of a sample whose time is worked out, of those that look best.
_MOST_EXCHANGES = 3
# Of packs with so many samples, two together are exchanged as well.
_FEW_MEMBERS = 3


class Exchange:
    """Estimates what it gains to move or exchange a sample.

    Besides the packs of the layout, it looks at pairs of them that could be put together: the
    slowest one of a step and a size with the one that has the most room.

    Attributes:
        members: Sample ids of each pack, then of each pair.
        step: The step of each pack, then of each pair.
        slowest: Of each step its slowest pack and the pair that this is in, if any.
    """

    def __init__(self, problem: Problem, layout: Layout) -> None:
        self.problem, self.layout = problem, layout
        sizes = problem.sizes
        self.fixed = np.array([problem.fixed[size] for size in sizes])
        by_step: list[list[int]] = [[] for _ in range(len(layout.longest))]
        for b, step in enumerate(layout.step.tolist()):
            by_step[step].append(b)
        for packs in by_step:
            packs.sort(key=lambda b: (-layout.load[b], b))
        self.pairs = [pair for packs in by_step for pair in self._pairs(packs)]
        first = len(layout.members)
        of_pack = {a: [k] for k, (a, _) in enumerate(self.pairs, start=first)}
        self.slowest = [[packs[0], *of_pack.get(packs[0], [])] for packs in by_step]
        joined = [layout.joined(*pair) for pair in self.pairs]
        self.members = [*layout.members, *(pack.sample_ids for pack in joined)]
        index, seconds, room = measure(problem, joined)
        self.step = [*layout.step.tolist(), *(int(layout.step[a]) for a, _ in self.pairs)]
        self.steps, self.index = np.array(self.step), np.append(layout.index, index).astype(int)
        self.load, self.room = np.append(layout.load, seconds), np.append(layout.room, room)
        # Seconds of the slowest other pack of the step.
        others = [_slowest_of(layout, by_step[self.step[b]], (b,)) for b in range(first)]
        others += [_slowest_of(layout, by_step[layout.step[a]], (a, b)) for a, b in self.pairs]
        self.others, self.by_step = np.array(others), by_step
        # A pack of 2, 4, 8, ... ranks may be split in two halves; -1 stands for none.
        halves = [k - 1 if s > 1 and not s & (s - 1) else -1 for k, s in enumerate(sizes)]
        self.half = np.array(halves)[self.index]
        sample = np.array([i for ids in self.members for i in ids])
        pack = np.repeat(np.arange(len(self.members)), list(map(len, self.members)))
        half, number = self.half[pack], len(self.members)
        misfits = (~problem.fits[half, sample]).astype(np.float64)
        self.misfits = np.bincount(pack, misfits, number)
        self.half_rows = np.bincount(pack, problem.row_table[half, sample], number)
        self.half_time = np.bincount(pack, problem.time_table[half, sample], number)
        self._make_items()

    def _make_items(self) -> None:
        """What can be exchanged: samples, and two of a pack that has few; the last one is none."""
        problem = self.problem
        self.items: list[tuple[int, ...]] = []
        pack: list[int] = []
        self.first_item = [0]
        for b, ids in enumerate(self.members):
            some: list[tuple[int, ...]] = [
                (i,) for i in sorted(ids, key=lambda i: (-problem.lengths[i], i))
            ]
            if 2 <= len(ids) <= _FEW_MEMBERS:
                some += itertools.combinations(sorted(ids), 2)
            self.items += some
            pack += [b] * len(some)
            self.first_item.append(len(self.items))
        # Each item for another one, and each pack without giving one up.
        self.items.append(())
        self.pack = np.append(pack, np.arange(len(self.members))).astype(int)
        number, none = len(pack), np.full(len(self.members), len(pack))
        self.item = np.append(np.arange(number), none)
        first = np.array([ids[0] if ids else 0 for ids in self.items])
        second = np.array([ids[-1] if ids else 0 for ids in self.items])
        one = np.array([len(ids) > 0 for ids in self.items], dtype=np.int64)
        two = np.array([len(ids) > 1 for ids in self.items], dtype=np.int64)
        misfits = 1 - problem.fits
        rows, times = problem.row_table, problem.time_table
        self.item_misfits = misfits[:, first] * one + misfits[:, second] * two
        self.item_rows = rows[:, first] * one + rows[:, second] * two
        self.item_time = times[:, first] * one + times[:, second] * two
        self.item_longest = np.maximum(times[:, first] * one, times[:, second] * two)
        self.item_number = one + two

    def _pairs(self, packs: list[int]) -> list[tuple[int, int]]:
        layout, problem = self.layout, self.problem
        of_size: dict[int, list[int]] = {}
        for b in packs:
            of_size.setdefault(problem.sizes[layout.index[b]], []).append(b)
        pairs = []
        for size, some in of_size.items():
            if len(some) > 1 and 2 * size in problem.rows:
                pairs.append((some[0], max(some[1:], key=lambda b: (layout.room[b], -b))))
        return pairs

    def items_of(self, here: int) -> range:
        """The items of a pack or pair."""
        return range(self.first_item[here], self.first_item[here + 1])

    def promising(self, item: int, here: int, least: float) -> list[tuple[int, int]]:
        """Items to exchange an item with, and their packs or pairs, the best first.

        Args:
            item: The item.
            here: Its pack or pair, the slowest of its step.
            least: Seconds that an exchange must gain.
        """
        layout, packs, back = self.layout, self.pack, self.item
        theirs_rows = self._change(self.item_rows, self.index[packs], item, back)
        ours_rows = self._change(self.item_rows, self.index[here], back, item)
        fits = (theirs_rows <= self.room[packs]) & (ours_rows <= self.room[here])
        # No pack may be left empty.
        fits &= len(self.members[here]) + self.item_number[back] > self.item_number[item]
        ours = self._seconds(here, back, item)
        theirs = self._seconds(packs, item, back)
        step = self.step[here]
        before = layout.longest[step] + layout.longest[self.steps[packs]]
        after = np.maximum(ours, self.others[here]) + np.maximum(theirs, self.others[packs])
        same = self.steps[packs] == step
        fits &= ~same | (np.maximum(ours, theirs) < layout.longest[step])
        for at in np.flatnonzero(fits & same).tolist():
            taken = {*self._packs_of(here), *self._packs_of(packs[at])}
            before[at] = layout.longest[step]
            # A pack is not exchanged with itself, or a part of itself.
            is_apart = len(taken) == len(self._packs_of(here)) + len(self._packs_of(packs[at]))
            rest = _slowest_of(layout, self.by_step[step], taken) if is_apart else math.inf
            after[at] = max(ours[at], theirs[at], rest)
        gain = np.where(fits, before - after, -np.inf)
        best = np.argsort(-gain, kind="stable")[:_MOST_EXCHANGES].tolist()
        return [(int(back[at]), int(packs[at])) for at in best if gain[at] > least]

    def made(self, item: int, here: int, other: int, there: int, least: float) -> Layout | None:
        """The layout after a move or an exchange; ``None`` if it gains less."""
        layout, sizes = self.layout, self.problem.sizes
        gone, come = set(self.items[item]), self.items[other]
        step, far = self.step[here], self.step[there]
        new, seconds = [], []
        for k, out, into in ((here, gone, come), (there, set(come), self.items[item])):
            ids = (*(i for i in self.members[k] if i not in out), *into)
            parts = split_slowest(self.problem, [Pack(sizes[self.index[k]], ids)])
            new.append(parts)
            seconds.append(max(pack_seconds(self.problem, p.sample_ids, p.size) for p in parts))
        taken = {*self._packs_of(here), *self._packs_of(there)}
        if step == far:
            rest = _slowest_of(layout, self.by_step[step], taken)
            gain = layout.longest[step] - max(*seconds, rest)
        else:
            gain = layout.longest[step] - max(seconds[0], self.others[here])
            gain += layout.longest[far] - max(seconds[1], self.others[there])
        if gain < least:
            return None
        changed = layout.copy()
        for k in {step, far}:
            kept = [layout.pack(b) for b in self.by_step[k] if b not in taken]
            parts = [*(new[0] if k == step else []), *(new[1] if k == far else [])]
            changed.replace(k, [*kept, *parts])
        return changed

    def _packs_of(self, k: int) -> tuple[int, ...]:
        """The pack, or the two of the pair."""
        first = len(self.layout.members)
        return (int(k),) if k < first else self.pairs[k - first]

    def _seconds(
        self,
        packs: NDArray[np.int64] | int,
        come: NDArray[np.int64] | int,
        go: NDArray[np.int64] | int,
    ) -> NDArray[np.float64]:
        """What packs take after an exchange at best: each as it is, or split in two halves."""
        index, half = self.index[packs], self.half[packs]
        whole = self.load[packs] + self._change(self.item_time, index, come, go)
        misfits = self.misfits[packs] + self._change(self.item_misfits, half, come, go)
        rows = self.half_rows[packs] + self._change(self.item_rows, half, come, go)
        total = self.half_time[packs] + self._change(self.item_time, half, come, go)
        halved = self.fixed[half] + np.maximum(0.5 * total, self.item_longest[half, come])
        can = (half >= 0) & (misfits == 0) & (rows <= 2 * self.problem.room_table[half, 0])
        seconds: NDArray[np.float64] = np.where(can, np.minimum(whole, halved), whole)
        return seconds

    @staticmethod
    def _change(
        table: NDArray[Any],
        index: NDArray[np.int64] | int,
        come: NDArray[np.int64] | int,
        go: NDArray[np.int64] | int,
    ) -> NDArray[Any]:
        """What the entries of items add and take away."""
        changed: NDArray[Any] = table[index, come] - table[index, go]
        return changed


def _slowest_of(layout: Layout, packs: list[int], but: Container[int]) -> float:
    """Seconds of the first of the packs, slowest first, that is not left out; 0 without any."""
    return next((float(layout.load[b]) for b in packs if b not in but), 0.0)
