"""The planner ``balanced``: the steps that are predicted to take the least time."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import zip_longest

from lightning_dcp.planning.bound import lower_bound
from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.planners.draft import Draft, make_draft
from lightning_dcp.planning.planners.local_search import improve
from lightning_dcp.planning.planners.longest_sequence import longest_sequence_packs_below
from lightning_dcp.planning.planners.megatron import plan_megatron_if_quick
from lightning_dcp.planning.planners.packs import (
    Pack,
    lay_out,
    lay_out_on_earliest_ranks,
    makespan,
)
from lightning_dcp.planning.planners.sizing import Sizer, Sizing
from lightning_dcp.planning.planners.static import static_packs_below
from lightning_dcp.planning.report import predicted_seconds
from lightning_dcp.planning.request import PlanRequest

# A draft whose bound is this part of its time is not worth another attempt.
_GOOD = 0.97
# Up to so many samples, many sizes are tried: at most so many attempts, and samples in all attempts
# together. For more samples, a few attempts keep planning at some 10 microseconds a sample; there
# the first ones are good, since micro-batches that take about equal times are easy to find.
_FEW_SAMPLES, _MOST_ATTEMPTS, _SAMPLES_IN_ATTEMPTS, _FEW_ATTEMPTS = 300, 60, 9000, 4
# With fewer samples a rank, whole samples make the difference: a local search starts where the
# bound is less than this part of the time.
_FEW_A_RANK, _POOR = 4, 0.95
# Where the bound is less than this part of the time, further attempts and searches are worth it; no
# more attempts than so many, and samples in all of them together.
_FAR_OFF, _MORE_ATTEMPTS, _SAMPLES_IN_MORE = 0.93, 40, 20_000
# An estimate this much below another is taken for better.
_CLEARLY = 0.99
# Limits on the time of a sample that are estimated, as powers of two: for few samples and many.
_LIMITS, _FEW_LIMITS = 4, 2


def plan_balanced(request: PlanRequest) -> list[Step]:
    """Plans the steps that are predicted to take the least time.

    1. Sizes. A limit on the time that a sample takes alone gives each sample the smallest group
       that keeps it. Limits are compared by an estimate in which short samples can be cut at
       will; the best few are tried.
    2. Steps. Long samples, those on several ranks or longer than the rest of the plan will take,
       open micro-batches, which fill steps first fit in the order of their times: a step is then
       made of micro-batches that take about as long. The other ranks of these steps, and as many
       further steps as the rows need, are left for short samples on the smallest groups.
    3. Filling. Short samples go, LPT, where the most time is left until the end of the step, on a
       larger group only if no small one has the time and the rows.
    4. The smallest groups' micro-batches are dealt to the steps again in the order of their times.
    5. Attempts follow with other limits and with larger smallest groups where these add little
       work (fewer micro-batches are easier to balance), until the bound says that little is left
       to gain or the attempts for so many samples are used up. Where the bound is far off, long
       samples share larger groups beside the longest, and many samples get more attempts.
    6. With few samples a rank, a local search starts at the best draft with each smallest size.

    The result is compared with ``static`` at every size, ``longest_sequence`` and, where it is
    there and quick enough, Megatron-Core's scheduler; the best is taken.

    Args:
        request: The planning request.

    Returns:
        The steps.
    """
    bound = lower_bound(request)
    lockstep = request.settings.execution == "lockstep"
    best: list[list[Pack]] = []
    best_steps: list[Step] = []
    seconds = math.inf

    def consider(packs: list[list[Pack]], makespan: float) -> None:
        nonlocal best, best_steps, seconds
        # In lockstep the ranks do not matter: only the best plan is given any.
        steps, time = ([], makespan) if lockstep else _laid_out_free_running(request, packs)
        if time < seconds:
            best, best_steps, seconds = packs, steps, time

    first, *others = _Search(request, bound).run()
    consider(first.packs, first.seconds)
    few = len(request.lengths) < _FEW_A_RANK * request.num_ranks
    if few and bound < _POOR * seconds:
        consider(*improve(request, first.packs))
    for draft in others if few else ():
        if bound < _FAR_OFF * seconds:
            consider(*improve(request, draft.packs))
    for baseline in (longest_sequence_packs_below, static_packs_below):
        for timed in baseline(request, seconds) if bound < seconds else ():
            consider(*timed)
    for steps in plan_megatron_if_quick(request) if bound < seconds else ():
        if predicted_seconds(request, steps) < seconds:
            return steps
    return [lay_out(packs) for packs in best] if lockstep else best_steps


def _laid_out_free_running(
    request: PlanRequest, packs: list[list[Pack]]
) -> tuple[list[Step], float]:
    """The quicker of two ways to give packs their ranks, and its predicted time."""
    # Long before short, so that the ranks end together.
    by_time = sorted(packs, key=lambda step: -makespan(request, [step]))
    plans = [[lay_out(step) for step in packs], lay_out_on_earliest_ranks(request, by_time)]
    seconds, k = min((predicted_seconds(request, plan), k) for k, plan in enumerate(plans))
    return plans[k], seconds


class _Search:
    """Drafts of plans, until one is good enough or the attempts are used up."""

    def __init__(self, request: PlanRequest, bound: float) -> None:
        self.request, self.bound = request, bound
        self.sizer = Sizer(request)
        number = len(request.lengths)
        self.many = number > _FEW_SAMPLES
        self.left = (
            _FEW_ATTEMPTS if self.many else min(_MOST_ATTEMPTS, _SAMPLES_IN_ATTEMPTS // number)
        )
        # Pools that are no power of two have more to try.
        self.left += len(self.sizer.max_sizes())
        self.best: Draft | None = None
        self.best_by_size: dict[int, Draft] = {}
        self.tried: set[Sizing] = set()

    def run(self) -> list[Draft]:
        """The best draft with each smallest size, the best of all first."""
        plain = self.sizer.estimate(math.inf)
        self._try(plain)
        if not self._done():
            self._try_others(plain)
            if self._is_far_off() and len(self.request.lengths) <= _SAMPLES_IN_MORE:
                self._try_more(plain)
        return sorted(self.best_by_size.values(), key=lambda draft: draft.seconds)

    def _try_others(self, plain: Sizing) -> None:
        sizer = self.sizer
        limits = sizer.limits(_FEW_LIMITS if self.many else _LIMITS)
        if self.many and self.bound >= _CLEARLY * plain.seconds:
            # Samples that cannot be cut at will make the difference: other limits do not help.
            limits = []
        limited = sorted(map(sizer.estimate, limits))
        first = limited[0] if limited and limited[0].seconds < _CLEARLY * plain.seconds else plain
        self._try(first)
        for max_size in sizer.max_sizes():
            if not self._done():
                self._try(sizer.estimate(first.limit, max_size=max_size))
        min_sizes = sizer.min_sizes()
        for min_size in min_sizes:
            if not self._done():
                self._try(sizer.estimate(first.limit, min_size))
        self._try(replace(first, short_makespan=math.inf))
        ways = [[plain, *limited]]
        if not self.many and not self._done():
            ways += [[sizer.estimate(x, k) for x in (math.inf, *limits)] for k in min_sizes]
        # The best estimate with each smallest size, then the next best, and so on.
        for sizings in zip_longest(*map(sorted, ways)):
            for sizing in filter(None, sizings):
                self._try(sizing)
                self._try(replace(sizing, short_makespan=math.inf))

    def _try_more(self, plain: Sizing) -> None:
        """Groups that long samples share, and with many samples the attempts for few of them."""
        assert self.best is not None
        self.left = min(_MORE_ATTEMPTS, _SAMPLES_IN_MORE // len(self.request.lengths))
        sizing = self.best.sizing
        for size in self.request.cp_sizes[sizing.min_size + 1 : -1]:
            self._try(replace(sizing, shared_size=size))
        if self.many and self._is_far_off():
            self.left = min(_MORE_ATTEMPTS, _SAMPLES_IN_MORE // len(self.request.lengths))
            self.many = False
            self._try_others(plain)

    def _is_far_off(self) -> bool:
        return self.best is not None and self.bound < _FAR_OFF * self.best.seconds

    def _done(self) -> bool:
        good = self.best is not None and self.bound >= _GOOD * self.best.seconds
        return good or self.left <= 0

    def _try(self, sizing: Sizing) -> None:
        """Makes a draft if that may be worth it, and keeps it if it is the best so far."""
        # The estimate is no part of the way that samples are put.
        sizing = replace(sizing, seconds=0.0)
        if self._done() or sizing in self.tried:
            return
        self.left -= 1
        draft = make_draft(self.request, self.sizer, sizing)
        self.tried |= {sizing, draft.sizing}
        rival = self.best_by_size.get(sizing.min_size)
        if rival is None or draft.seconds < rival.seconds:
            self.best_by_size[sizing.min_size] = draft
        if self.best is None or draft.seconds < self.best.seconds:
            self.best = draft
