"""Local search for few samples: groups of a step are joined and split, samples change steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, count, permutations, product
from typing import NamedTuple

from lightning_dcp.planning.planners.packs import Pack, TimedPacks, makespan
from lightning_dcp.planning.request import PlanRequest

# Looks at a sample and a micro-batch for it, in all, some 10 ms of planning; and what dealing
# samples costs beside them.
# Counted, not timed: all ranks must stop at the same plan.
_MOST_LOOKS, _LOOKS_OF_CALL = 100_000, 100
_LOOKS_OF_EXCHANGE = 20
# Seconds, as a part of a plan's, that are no gain but rounding.
_ROUNDING = 1e-9


class _Step(NamedTuple):
    """A step and its makespan; no packs and 0 seconds if it has no samples."""

    seconds: float
    packs: list[Pack]

    @property
    def samples(self) -> list[int]:
        return [i for pack in self.packs for i in pack.sample_ids]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted((pack.size for pack in self.packs), reverse=True))


_EMPTY, _IMPOSSIBLE = _Step(0.0, []), _Step(math.inf, [])

type _Move = tuple[int, int, _Step, _Step]


def improve(request: PlanRequest, steps: Sequence[list[Pack]]) -> TimedPacks:
    """Steps that take no more time in lockstep than those at hand.

    Moves, each kept if all steps together get quicker: groups of a step are joined or split and its
    samples dealt again by LPT; two steps become one; a sample goes to another step, or changes
    places with one of another step.

    Args:
        request: The planning request.
        steps: The packs of each step; their sizes add up to the pool.
    """
    timed = [_Step(makespan(request, [packs]), packs) for packs in steps]
    better = _Search(request).run(timed)
    return [step.packs for step in better], math.fsum(step.seconds for step in better)


class _Search:
    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.looks = _MOST_LOOKS
        self.dealt: dict[tuple[frozenset[int], tuple[int, ...]], _Step] = {}

    def run(self, steps: list[_Step]) -> list[_Step]:
        steps = [self._regrouped(step, step.samples, step.sizes, depth=2) for step in steps]
        while True:
            # Longest steps first: they have the most to gain before the looks run out.
            steps.sort(key=lambda step: -step.seconds)
            for a, b, new_a, new_b in self._moves(steps):
                if self.looks < 0:
                    return steps
                before = steps[a].seconds + steps[b].seconds
                if new_a.seconds + new_b.seconds < before * (1 - _ROUNDING):
                    kept = [step for k, step in enumerate(steps) if k not in (a, b)]
                    changed = [step for step in (new_a, new_b) if step.packs]
                    steps = kept + [
                        self._regrouped(step, step.samples, step.sizes, depth=2) for step in changed
                    ]
                    break
            else:
                return steps

    def _moves(self, steps: list[_Step]) -> Iterator[_Move]:
        """What two steps could become, those that take the longest first."""
        number = len(steps)
        for a, b in combinations(range(number), 2):
            both = steps[a].samples + steps[b].samples
            yield a, b, self._dealt(both, steps[a].sizes), _EMPTY
        for a, b in permutations(range(number), 2):
            for one in steps[a].samples:
                ours = [i for i in steps[a].samples if i != one]
                left = self._dealt(ours, steps[a].sizes) if ours else _EMPTY
                # Taking a sample in hardly makes the other step quicker: the gain must be here.
                if left.seconds < steps[a].seconds:
                    yield a, b, left, self._dealt([*steps[b].samples, one], steps[b].sizes)
        for a, b in combinations(range(number), 2):
            for one, other in product(steps[a].samples, steps[b].samples):
                ours = [other if i == one else i for i in steps[a].samples]
                theirs = [one if i == other else i for i in steps[b].samples]
                new_a = self._dealt(ours, steps[a].sizes)
                yield a, b, new_a, self._dealt(theirs, steps[b].sizes)

    def _longest_first(self, samples: list[int]) -> list[int]:
        return sorted(samples, key=lambda i: (-self.request.lengths[i], i))

    def _dealt(self, samples: list[int], sizes: tuple[int, ...]) -> _Step:
        """The samples on groups of these sizes or similar ones."""
        key = frozenset(samples), sizes
        # Most pairs of steps are as they were before the last move.
        if key not in self.dealt:
            first = self._lpt(samples, sizes)
            # One change of groups: candidates are many. Those that are kept get two (run).
            self.dealt[key] = self._regrouped(first, samples, sizes, depth=1)
        return self.dealt[key]

    def _regrouped(
        self, step: _Step, samples: list[int], sizes: tuple[int, ...], *, depth: int
    ) -> _Step:
        """The step with groups joined and split, ``depth`` at a time, while that is quicker."""
        gained = True
        while gained:
            gained = False
            # An ordered set: of equally quick ones the first counts, on every rank alike.
            near: dict[tuple[int, ...], None] = {sizes: None}
            for _ in range(depth):
                near = dict.fromkeys(n for one in near for n in self._regroupings(one))
                tried = ((self._lpt(samples, n), n) for n in near if self.looks > 0)
                found = min(tried, key=lambda f: f[0].seconds, default=None)
                if found and found[0].seconds < step.seconds * (1 - _ROUNDING):
                    (step, sizes), gained = found, True
                    break
        return self._exchanged(step) if depth > 1 and step.packs else step

    def _exchanged(self, step: _Step) -> _Step:
        """The step after samples of its slowest group changed places, while that is quicker."""
        request = self.request
        packs = list(step.packs)
        while True:
            load = [request.seconds(p.sample_ids, p.size) for p in packs]
            slow = max(range(len(packs)), key=load.__getitem__)
            gained = False
            # Only the slowest group sets the step's time.
            for k, one in product(range(len(packs)), packs[slow].sample_ids):
                for other in (None, *packs[k].sample_ids) if k != slow else ():
                    self.looks -= _LOOKS_OF_EXCHANGE
                    ours = self._with(packs[slow], one, other)
                    theirs = self._with(packs[k], other, one)
                    if ours and theirs and self._is_quicker(ours, theirs, load[slow]):
                        packs[slow], packs[k], gained = ours, theirs, True
                        break
                if gained:
                    break
            if not gained or self.looks < 0:
                return _Step(max(load), packs)

    def _with(self, pack: Pack, go: int | None, come: int | None) -> Pack | None:
        """The pack after one sample went and one came; None if it is empty or has too many rows."""
        ids = tuple(i for i in pack.sample_ids if i != go) + (() if come is None else (come,))
        rows = sum([self.request.rows[pack.size][i] for i in ids])
        return Pack(pack.size, ids) if ids and rows <= self.request.capacity[pack.size] else None

    def _is_quicker(self, ours: Pack, theirs: Pack, seconds: float) -> bool:
        least = seconds * (1 - _ROUNDING)
        return all(self.request.seconds(p.sample_ids, p.size) < least for p in (ours, theirs))

    def _regroupings(self, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Sizes, largest first, with two groups joined or one split in halves."""
        num_ranks = self.request.num_ranks
        for size in sorted(set(sizes)):
            rest = list(sizes)
            rest.remove(size)
            if size & (size - 1):
                # A pool that is no power of two, as the powers of two that add up to it.
                yield tuple(1 << k for k in reversed(range(size.bit_length())) if size >> k & 1)
            elif size > 1:
                yield tuple(sorted([*rest, size // 2, size // 2], reverse=True))
            if size in rest and 2 * size in self.request.rows:
                rest.remove(size)
                yield tuple(sorted([*rest, 2 * size], reverse=True))
        yield (num_ranks,)

    def _lpt(self, samples: list[int], sizes: tuple[int, ...]) -> _Step:
        """Longest sample first, each to the group that is done with it first.

        The time is infinite where a sample finds no rows, or there are fewer samples than groups.
        """
        request = self.request
        self.looks -= _LOOKS_OF_CALL + len(samples) * len(sizes)
        if self.looks < 0:
            return _IMPOSSIBLE
        load, slack = [request.fixed[s] for s in sizes], [request.capacity[s] for s in sizes]
        tables = [(request.times[s], request.rows[s]) for s in sizes]
        members: list[list[int]] = [[] for _ in sizes]
        num_empty = len(sizes)
        for left, i in zip(count(len(samples), -1), self._longest_first(samples), strict=False):
            best, least = -1, math.inf
            for b, (times, rows) in enumerate(tables):
                # The last samples are for the groups that have none.
                if left <= num_empty and members[b]:
                    continue
                if load[b] + times[i] < least and rows[i] <= slack[b]:
                    best, least = b, load[b] + times[i]
            if best < 0 or left < num_empty:
                return _IMPOSSIBLE
            num_empty -= not members[best]
            load[best] = least
            slack[best] -= tables[best][1][i]
            members[best].append(i)
        packs = [Pack(size, tuple(ids)) for size, ids in zip(sizes, members, strict=True)]
        return _Step(makespan(request, [packs]), packs)
