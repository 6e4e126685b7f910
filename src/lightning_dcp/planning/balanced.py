"""The planner ``balanced``: the steps that are predicted to take the least time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from lightning_dcp.planning.evaluation import group_times, predicted_time, total_of
from lightning_dcp.planning.filling import Bins, fill
from lightning_dcp.planning.longest_sequence import plan_longest_sequence_below
from lightning_dcp.planning.megatron import plan_megatron_if_quick
from lightning_dcp.planning.packs import (
    Pack,
    complete,
    lay_out,
    lay_out_on_earliest_ranks,
    whole_pool_packs,
)
from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.problem import Problem, total_time
from lightning_dcp.planning.sizing import Sizer, Sizing
from lightning_dcp.planning.static import plan_static_below

# A draft whose bound is this part of its time is not worth another attempt.
_GOOD = 0.975
# Up to so many samples, many sizes are tried: at most so many attempts, and samples in all attempts
# together. For more samples, a few attempts keep planning at some 10 microseconds a sample; there
# the first ones are good, since micro-batches that take about equal times are easy to find.
_FEW_SAMPLES, _MOST_ATTEMPTS, _SAMPLES_IN_ATTEMPTS, _FEW_ATTEMPTS = 300, 60, 9000, 4
# An estimate this much below another is taken for better.
_CLEARLY = 0.99
# Limits on the time of a sample that are estimated, as powers of two: for few samples and many.
_LIMITS, _FEW_LIMITS = 4, 2


def plan_balanced(problem: Problem) -> list[Step]:
    """Plans the steps that are predicted to take the least time.

    1. Sizes. A limit on the time that a sample takes alone gives each sample the smallest group
       that keeps it. Limits are compared by an estimate in which short samples can be cut at
       will; the best few are tried.
    2. Steps. Leading samples, those on several ranks or longer than the rest of the plan will
       take, open micro-batches, which fill steps in the order of their times: a step is then made
       of micro-batches that take about as long. The other ranks of these steps, and as many
       further steps as the rows need, are left for short samples on single ranks.
    3. Filling. Short samples, longest first, go where the most time is left until the end of the
       step, on a larger group only if no single rank has the time and the rows.
    4. Single ranks' micro-batches are dealt to the steps again in the order of their times.
    5. Attempts with other limits and numbers of steps follow until the bound says that little is
       left to gain or the attempts for so many samples are used up.

    The result is compared with ``static`` at every size, ``longest_sequence`` and, where it is
    there and quick enough, Megatron-Core's scheduler; the best is taken.

    Args:
        problem: The planning request.

    Returns:
        The steps.
    """
    bound = problem.bound
    best = _Attempts(problem).run()
    steps, time = _lay_out(problem, best.packs)
    for alternative in _alternatives():
        if bound >= time:
            break
        other = alternative(problem, time)
        if other is not None:
            other_time = predicted_time(problem, other)
            if other_time < time:
                steps, time = list(other), other_time
    return steps


def _alternatives() -> Iterable[Callable[[Problem, float], Sequence[Step] | None]]:
    yield plan_static_below
    yield plan_longest_sequence_below
    yield plan_megatron_if_quick


def _lay_out(problem: Problem, steps: list[list[Pack]]) -> tuple[list[Step], float]:
    laid_out = [lay_out(packs) for packs in steps]
    times = group_times(problem, laid_out)
    time = total_of(problem, laid_out, times)
    if problem.execution == "free_running":
        # Long before short, so that the ranks end together.
        steps = sorted(steps, key=lambda packs: -max(_pack_time(problem, p) for p in packs))
        other = lay_out_on_earliest_ranks(problem, steps)
        other_time = predicted_time(problem, other)
        if other_time < time:
            return other, other_time
    return laid_out, time


@dataclass(frozen=True, slots=True)
class _Draft:
    """The packs of each step, and how long the steps take in lockstep."""

    packs: list[list[Pack]]
    seconds: float
    sizing: Sizing


class _Attempts:
    """Drafts of plans, until one is good enough or the attempts are used up."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizer = Sizer(problem)
        number = len(problem.lengths)
        many = number > _FEW_SAMPLES
        self.left = _FEW_ATTEMPTS if many else min(_MOST_ATTEMPTS, _SAMPLES_IN_ATTEMPTS // number)
        # Kept for other numbers of steps with the best sizes.
        self.spare = min(4, self.left // 6)
        self.best: _Draft | None = None
        self.tried: set[Sizing] = set()

    def run(self) -> _Draft:
        plain = self.sizer.estimate(math.inf)
        self._try(plain)
        if not self._good():
            self._try_others(plain)
        assert self.best is not None
        return self.best

    def _try_others(self, plain: Sizing) -> None:
        sizer = self.sizer
        many = len(self.problem.lengths) > _FEW_SAMPLES
        limits = sizer.limits(_FEW_LIMITS if many else _LIMITS)
        limited = sorted(map(sizer.estimate, limits))
        first = limited[0] if limited[0].seconds < _CLEARLY * plain.seconds else plain
        self._try(first)
        bases = sizer.bases()
        for base in bases:
            self._try(sizer.estimate(first.limit, base))
        self._try(first, level=math.inf)
        ways = [[plain, *limited]]
        if not many and not self._good():
            ways += [[sizer.estimate(x, base) for x in (math.inf, *limits)] for base in bases]
        # The best estimate with each smallest size, then the next best, and so on.
        for sizings in zip_longest(*map(sorted, ways)):
            for sizing in filter(None, sizings):
                self._try(sizing)
                self._try(sizing, level=math.inf)
        self._climb(1)
        self._climb(-1)

    def _good(self) -> bool:
        return self.best is not None and self.problem.bound >= _GOOD * self.best.seconds

    def _climb(self, way: int) -> None:
        """More or fewer steps, as long as that is better."""
        assert self.best is not None
        num_steps = self.best.sizing.num_steps
        by = way * max(1, round(0.03 * num_steps))
        # A few attempts are kept for this.
        while self._try(self.best.sizing, num_steps=num_steps + by, spare=0):
            num_steps += by

    def _try(
        self,
        sizing: Sizing,
        *,
        level: float | None = None,
        num_steps: int | None = None,
        spare: int | None = None,
    ) -> bool:
        """Makes a draft if that may be worth it; whether it is the best so far."""
        wanted = replace(
            sizing,
            seconds=0.0,
            level=sizing.level if level is None else level,
            num_steps=sizing.num_steps if num_steps is None else num_steps,
        )
        spare = self.spare if spare is None else spare
        if self._good() or self.left <= spare or wanted.num_steps < 1 or wanted in self.tried:
            return False
        self.left -= 1
        draft = _draft(self.problem, self.sizer, wanted)
        self.tried |= {wanted, draft.sizing}
        if self.best is not None and draft.seconds >= self.best.seconds:
            return False
        self.best = draft
        return True


def _draft(problem: Problem, sizer: Sizer, sizing: Sizing) -> _Draft:
    """A plan with the sizes for a limit, of the given number of steps or more."""
    index = sizer.choose(sizing.limit, sizing.base)
    base = problem.sizes[sizing.base]
    sizes = sizer.sizes[index].tolist()
    leads = ((index > sizing.base) | (sizer.alone[index, sizer.columns] > sizing.level)).tolist()
    bins = Bins()
    leaders = _open_leaders(problem, bins, sizes, leads, sizing.limit)
    steps, free = _place(problem, bins, leaders, sizing.num_steps)
    small = [i for i in problem.order if not leads[i]]
    _fill_up(problem, bins, steps, free, small, base, all_soft=math.isinf(sizing.level))
    _deal(bins, steps, base)
    packs, seconds = _finish(problem, bins, steps)
    return _Draft(packs, seconds, replace(sizing, num_steps=len(steps)))


def _open_leaders(
    problem: Problem, bins: Bins, sizes: list[int], leads: list[bool], limit: float
) -> list[int]:
    """Micro-batches of the leading samples, those that take the longest first."""
    by_size: dict[int, list[int]] = {}
    for i in problem.order:
        if leads[i]:
            by_size.setdefault(sizes[i], []).append(i)
    for size, samples in sorted(by_size.items(), reverse=True):
        rows, times = problem.rows[size], problem.times[size]
        # Of the last micro-batch opened: its room and time until the limit.
        room, slack = 0, 0.0
        for i in samples:
            if rows[i] <= room and times[i] <= slack:
                bins.put(problem, -1, i)
            else:
                bins.open(problem, size)
                bins.put(problem, -1, i)
                room, slack = problem.cap, limit - problem.fixed[size]
            room -= rows[i]
            slack -= times[i]
    load = bins.load
    return sorted(range(len(load)), key=lambda b: (-load[b], b))


def _place(
    problem: Problem, bins: Bins, leaders: list[int], num_steps: int
) -> tuple[list[list[int]], list[int]]:
    """First fit of micro-batches to steps: for each step its micro-batches and its free ranks."""
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    free = [problem.num_ranks] * num_steps
    first = dict.fromkeys(problem.sizes, 0)
    for b in leaders:
        size = bins.size[b]
        k = first[size]
        while k < len(free) and free[k] < size:
            k += 1
        first[size] = k
        if k == len(free):
            steps.append([])
            free.append(problem.num_ranks)
        steps[k].append(b)
        free[k] -= size
    return steps, free


def _fill_up(
    problem: Problem,
    bins: Bins,
    steps: list[list[int]],
    free: list[int],
    small: list[int],
    base: int,
    *,
    all_soft: bool,
) -> None:
    """Gives free ranks micro-batches of the base size, and fills all with the small samples."""
    longest = [max((bins.load[b] for b in step), default=0.0) for step in steps]
    level = _level(problem, bins, steps, free, small, base)
    targets = [0.0] * len(bins.size)
    first_soft = None
    for k, step in enumerate(steps):
        for b in step:
            targets[b] = longest[k]
        if first_soft is None and not step:
            first_soft = len(bins.size)
        step.extend(bins.open(problem, base, free[k] // base))
        targets += [longest[k] or level] * (free[k] // base)
    if all_soft:
        first_soft = 0
    left = fill(problem, bins, targets, small, len(targets) if first_soft is None else first_soft)
    while left:
        # What found no room gets steps of its own.
        rows = sum(problem.rows[base][i] for i in left)
        groups = problem.num_ranks // base
        number = groups * math.ceil(rows / (groups * problem.cap))
        extra = Bins()
        extra.open(problem, base, number)
        left = fill(problem, extra, [level] * number, left, 0)
        first = len(bins.size)
        bins.extend(extra)
        steps += [list(range(b, b + groups)) for b in range(first, first + number, groups)]


def _level(
    problem: Problem,
    bins: Bins,
    steps: list[list[int]],
    free: list[int],
    small: list[int],
    base: int,
) -> float:
    """The time of the steps without leaders, if the others are filled to the end with ``small``."""
    fixed = problem.fixed[base]
    work = math.fsum([problem.times[base][i] for i in small])
    rows = sum([problem.rows[base][i] for i in small])
    rate = work / rows if rows else 0.0
    # From here on in seconds of all ranks.
    work *= base
    ranks = 0
    for step, number in zip(steps, free, strict=True):
        if not step:
            ranks += number
            continue
        time = max([bins.load[b] for b in step])
        work -= number * min(time - fixed, rate * problem.cap)
        for b in step:
            work -= bins.size[b] * min(time - bins.load[b], rate * bins.room[b])
    return fixed + max(work, 0.0) / ranks if ranks else fixed


def _deal(bins: Bins, steps: list[list[int]], base: int) -> None:
    """Deals the micro-batches of the base size to the steps again, the longest to the longest."""
    load, size = bins.load, bins.size
    large = [[b for b in step if size[b] > base] for step in steps]
    longest = [max([load[b] for b in kept], default=0.0) for kept in large]
    rest = [b for step in steps for b in step if size[b] == base]
    rest.sort(key=lambda b: (-load[b], b))
    at = 0
    for k in sorted(range(len(steps)), key=lambda k: (-longest[k], k)):
        number = len(steps[k]) - len(large[k])
        steps[k] = large[k] + rest[at : at + number]
        at += number


def _finish(problem: Problem, bins: Bins, steps: list[list[int]]) -> tuple[list[list[Pack]], float]:
    """The packs of each step, in which no rank is left without a sample, and their time."""
    done: list[list[Pack]] = []
    seconds = []
    rest: list[int] = []
    size, samples, load = bins.size, bins.samples, bins.load
    for step in steps:
        packs = [Pack(size[b], tuple(samples[b])) for b in step if samples[b]]
        if len(packs) == len(step):
            done.append(packs)
            seconds.append(max([load[b] for b in step]))
            continue
        completed = complete(problem, packs) if packs else []
        if completed is None:
            rest += [i for pack in packs for i in pack.sample_ids]
        elif completed:
            done.append(completed)
            seconds.append(max(_pack_time(problem, pack) for pack in completed))
    for pack in whole_pool_packs(problem, rest):
        done.append([pack])
        seconds.append(_pack_time(problem, pack))
    return done, math.fsum(seconds)


def _pack_time(problem: Problem, pack: Pack) -> float:
    return total_time(problem, pack.sample_ids, pack.size)
