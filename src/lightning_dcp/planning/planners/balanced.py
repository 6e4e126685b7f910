"""The planner ``balanced``: the steps that are predicted to take the least time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import zip_longest

from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.planners.draft import Draft, make_draft
from lightning_dcp.planning.planners.layout import lockstep_seconds
from lightning_dcp.planning.planners.local_search import improve
from lightning_dcp.planning.planners.longest_sequence import plan_longest_sequence_below
from lightning_dcp.planning.planners.megatron import plan_megatron_below
from lightning_dcp.planning.planners.packs import Pack, lay_out, lay_out_on_earliest_ranks
from lightning_dcp.planning.planners.sizing import Sizer, Sizing
from lightning_dcp.planning.planners.static import plan_static_below
from lightning_dcp.planning.report import group_times, predicted_time, total_of
from lightning_dcp.planning.request import Problem, total_time

# A draft whose bound is this part of its time is not worth another attempt.
_GOOD = 0.975
# Up to so many samples, many sizes are tried: at most so many attempts, and samples in all attempts
# together. For more samples, a few attempts keep planning at some 10 microseconds a sample; there
# the first ones are good, since micro-batches that take about equal times are easy to find.
_FEW_SAMPLES, _MOST_ATTEMPTS, _SAMPLES_IN_ATTEMPTS, _FEW_ATTEMPTS = 300, 60, 9000, 4
# An estimate this much below another is taken for better.
_CLEARLY = 0.99
# A draft whose bound is less than this part of its time is worth more attempts with many samples as
# well: as many as for few of them, but no more than so many, and samples in all of them together.
_POOR, _MORE_ATTEMPTS, _SAMPLES_IN_MORE = 0.93, 40, 40_000
# Local searches: from how many of the best plans, and how often each looks for better packs; no
# search with more samples than this.
_SEARCHES, _MOST_SEARCHED = ((4, 100), (1, 600)), 2048
# Ranks of groups that long samples share, over those of the longest, and numbers of such steps.
_SHARED, _NUM_SHARED, _SAMPLES_IN_SHARED = (1.0, 0.5, 0.25, 0.125), (1, 2, 4, 16), 60_000
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
    5. Attempts follow with other limits, numbers of steps, and with small groups in place of single
       ranks where these add little work (fewer micro-batches are easier to balance), until the
       bound says that little is left to gain or the attempts for so many samples are used up;
       where the bound is far off, steps are tried in which long samples share larger groups, and
       many samples get more attempts.
    6. Where it still is, a local search starts at the best drafts: :func:`improve`.

    The result is compared with ``static`` at every size, ``longest_sequence`` and, where it is
    there and quick enough, Megatron-Core's scheduler; the best is taken.

    Args:
        problem: The planning request.

    Returns:
        The steps.
    """
    bound = problem.bound
    plans = [_lay_out(problem, packs) for packs in _Attempts(problem).run()]
    steps, time = min(plans, key=lambda plan: plan[1])
    for alternative in _alternatives():
        if bound >= time:
            break
        steps, time = alternative(problem, time) or (steps, time)
    return steps


def _alternatives() -> Iterable[Callable[[Problem, float], tuple[list[Step], float] | None]]:
    # Near to this planner's, so that its time often spares the others.
    yield plan_longest_sequence_below
    yield plan_static_below
    yield plan_megatron_below


def _lay_out(problem: Problem, steps: list[list[Pack]]) -> tuple[list[Step], float]:
    laid_out = [lay_out(packs) for packs in steps]
    times = group_times(problem, laid_out)
    time = total_of(problem, laid_out, times)
    if problem.execution == "free_running":
        # Long before short, so that the ranks end together.
        steps = sorted(
            steps, key=lambda packs: -max(total_time(problem, p.sample_ids, p.size) for p in packs)
        )
        other = lay_out_on_earliest_ranks(problem, steps)
        other_time = predicted_time(problem, other)
        if other_time < time:
            return other, other_time
    return laid_out, time


class _Attempts:
    """Drafts of plans, until one is good enough or the attempts are used up."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizer = Sizer(problem)
        number = len(problem.lengths)
        many = number > _FEW_SAMPLES
        self.left = _FEW_ATTEMPTS if many else min(_MOST_ATTEMPTS, _SAMPLES_IN_ATTEMPTS // number)
        # Pools that are no power of two have more to try.
        self.left += len(self.sizer.tops())
        # Kept for other numbers of steps with the best sizes.
        self.spare = min(4, self.left // 6)
        self.best: Draft | None = None
        self.tried: set[Sizing] = set()
        # The best by smallest size, and whether long samples share groups.
        self.starts: dict[tuple[int, bool, int], Draft] = {}

    def run(self) -> list[list[list[Pack]]]:
        """The packs of the steps of one plan, or of several among which the best is."""
        plain = self.sizer.estimate(math.inf)
        self._try(plain)
        number = len(self.problem.lengths)
        if not self._good():
            self._try_others(plain, many=number > _FEW_SAMPLES)
        assert self.best is not None
        poor = self.problem.bound < _POOR * self.best.seconds
        if poor and number <= _SAMPLES_IN_MORE:
            self._share()
        if poor and _FEW_SAMPLES < number <= _SAMPLES_IN_MORE:
            self.left = min(_MORE_ATTEMPTS, _SAMPLES_IN_MORE // number)
            self.spare = self.left // 4
            self._try_others(plain, many=False)
        return [self.best.packs, *self._improved()]

    def _improved(self) -> list[list[list[Pack]]]:
        """Local search from the best drafts, as long as the bound is far off."""
        assert self.best is not None
        bound, number = self.problem.bound, len(self.problem.lengths)
        if bound >= _POOR * self.best.seconds or number > _MOST_SEARCHED:
            return []
        for sizing in self.sizer.parts():
            self._draft(sizing)
        drafts = sorted(self.starts.values(), key=lambda draft: draft.seconds)
        plans = [draft.packs for draft in drafts]
        for number, looks in _SEARCHES:
            found = []
            for packs in plans[:number]:
                packs = improve(self.problem, packs, looks)
                found.append((lockstep_seconds(self.problem, packs), packs))
                if bound >= _POOR * found[-1][0]:
                    return [packs]
            plans = [packs for _, packs in sorted(found, key=lambda plan: plan[0])]
        return plans[:1]

    def _try_others(self, plain: Sizing, *, many: bool) -> None:
        sizer = self.sizer
        limits = sizer.limits(_FEW_LIMITS if many else _LIMITS)
        if many and self.problem.bound >= _CLEARLY * plain.seconds:
            # Samples that cannot be cut at will make the difference: other limits do not help.
            limits = []
        limited = sorted(map(sizer.estimate, limits))
        first = limited[0] if limited and limited[0].seconds < _CLEARLY * plain.seconds else plain
        self._try(first)
        for top in sizer.tops():
            if not self._done():
                self._try(sizer.estimate(first.limit, top=top))
        bases = sizer.bases()
        for base in bases:
            if not self._done():
                self._try(sizer.estimate(first.limit, base))
        self._try(first, level=math.inf)
        ways = [[plain, *limited]]
        if not many and not self._done():
            ways += [[sizer.estimate(x, base) for x in (math.inf, *limits)] for base in bases]
        # The best estimate with each smallest size, then the next best, and so on.
        for sizings in zip_longest(*map(sorted, ways)):
            for sizing in filter(None, sizings):
                self._try(sizing)
                self._try(sizing, level=math.inf)
        self._climb(1)
        self._climb(-1)

    def _share(self) -> None:
        """One step and more in which long samples share larger groups."""
        assert self.best is not None
        sizing = self.best.sizing
        self.left = min(_MORE_ATTEMPTS, _SAMPLES_IN_SHARED // len(self.problem.lengths))
        for number in _NUM_SHARED:
            for shared in _SHARED:
                self._try(replace(sizing, shared=shared, num_shared=number), spare=0)

    def _done(self) -> bool:
        return self.left <= self.spare or self._good()

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
        return self._draft(wanted)

    def _draft(self, wanted: Sizing) -> bool:
        """Makes a draft; whether it is the best so far."""
        draft = make_draft(self.problem, self.sizer, wanted)
        self.tried |= {wanted, draft.sizing}
        kind = (wanted.base, wanted.num_shared > 0, wanted.num_parts)
        if kind not in self.starts or draft.seconds < self.starts[kind].seconds:
            self.starts[kind] = draft
        if self.best is not None and draft.seconds >= self.best.seconds:
            return False
        self.best = draft
        return True
