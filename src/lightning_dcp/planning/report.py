"""How long a plan is predicted to take, where the time goes, and how good that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from lightning_dcp.config.parallel import Execution
from lightning_dcp.planning.bound import raised_bound
from lightning_dcp.planning.cost.model import CostModel
from lightning_dcp.planning.plan import Plan, Step
from lightning_dcp.planning.request import Problem, as_units, total_time

# A bound below this part of the predicted time is worth the time that a tighter one takes.
_WORTH_RAISING = 0.93


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What a cost model predicts of a plan.

    The shares are of the time of all ranks, ``num_ranks * predicted_seconds``.

    Attributes:
        predicted_seconds: Forward and backward passes of the global batch.
        bound_seconds: No plan of the same problem is predicted to take less
            (:func:`lower_bound`, raised where it is far below the predicted time).
        tokens_per_second: Tokens of the global batch, without padding, over the predicted time.
        idle_share: Ranks that wait for others.
        padding_share: Linear work of padded rows.
        communication_share: Exchange of keys and values that attention does not hide, and its
            latency.
        peak_activation_bytes: Activations of the micro-batch with the most rows, on each rank.
        execution: Who waits for whom.
    """

    predicted_seconds: float
    bound_seconds: float
    tokens_per_second: float
    idle_share: float
    padding_share: float
    communication_share: float
    peak_activation_bytes: float
    execution: Execution

    @property
    def quality(self) -> float:
        """The bound over the predicted time: 1 is a plan that cannot be better."""
        return self.bound_seconds / self.predicted_seconds


def evaluate(
    plan: Plan, cost_model: CostModel | None = None, *, execution: Execution = "lockstep"
) -> PlanReport:
    """Predicts a plan with a cost model, which need not be the one that it was made with.

    Args:
        plan: A valid plan.
        cost_model: By default :class:`CostModel`'s default values.
        execution: Whether a step waits for its slowest rank, or only the members of a group for
            each other.

    Raises:
        PlanError: The plan is not valid.
        ValueError: ``execution`` is unknown.
    """
    plan.validate()
    problem = Problem(
        lengths=plan.lengths,
        num_ranks=plan.num_ranks,
        cap=plan.max_seqlen_per_dp_cp_rank,
        tp_size=plan.tp_size,
        cost_model=cost_model or CostModel(),
        execution=execution,
        padding=plan.padding,
        units=as_units(plan.keep_together, len(plan.lengths)),
    )
    return report(problem, problem.units_of(plan.steps))


def report(problem: Problem, steps: Sequence[Step]) -> PlanReport:
    """:func:`evaluate` where the problem is at hand already."""
    groups = [group for step in steps for group in step.groups]
    num_samples = [len(group.sample_ids) for group in groups]
    samples = np.fromiter(chain.from_iterable(g.sample_ids for g in groups), dtype=np.int64)
    index_of = {size: k for k, size in enumerate(problem.sizes)}
    of_group = np.array([index_of[group.size] for group in groups])
    size = np.array(problem.sizes)[of_group]
    index = np.repeat(of_group, num_samples)
    weight = np.repeat(size, num_samples)
    parts, model = problem.parts, problem.cost_model
    held = np.bincount(np.repeat(np.arange(len(groups)), num_samples), parts.rows[index, samples])
    filled = held
    if not problem.padding.is_tight:
        filled = np.array(
            [_filled(problem, int(n), s) for n, s in zip(held, size.tolist(), strict=True)]
        )
    padded = float((filled * size).sum()) - sum(problem.lengths)
    counts = np.bincount(of_group, minlength=len(problem.sizes)).tolist()
    hops = sum(n * s * model.hop_time(s) for n, s in zip(counts, problem.sizes, strict=True))
    exposed = float((parts.communication[index, samples] * weight).sum()) + hops
    fixed = sum(n * s * problem.fixed[s] for n, s in zip(counts, problem.sizes, strict=True))
    busy = float((problem.time_table[index, samples] * weight).sum()) + fixed
    if problem.has_tails:
        busy += model.seconds_per_row * float(((filled - held) * size).sum())
    predicted = predicted_time(problem, steps)
    total = predicted * problem.num_ranks
    bound = problem.bound
    if bound < _WORTH_RAISING * predicted:
        bound = raised_bound(problem, predicted)
    return PlanReport(
        predicted_seconds=predicted,
        bound_seconds=bound,
        tokens_per_second=sum(problem.lengths) / predicted,
        idle_share=max(0.0, 1.0 - busy / total),
        padding_share=model.seconds_per_row * padded / total,
        communication_share=exposed / total,
        peak_activation_bytes=model.activation_bytes(int(filled.max())),
        execution=problem.execution,
    )


def _filled(problem: Problem, rows: int, size: int) -> int:
    return problem.padding.pack_rows(rows, size, problem.tp_size)


def predicted_time(problem: Problem, steps: Sequence[Step]) -> float:
    """Seconds of the steps, by the problem's cost model and kind of execution."""
    return total_of(problem, steps, group_times(problem, steps))


def group_times(problem: Problem, steps: Sequence[Step]) -> list[list[float]]:
    """Seconds of each group of each step."""
    if problem.has_tails:
        return [
            [total_time(problem, group.sample_ids, group.size) for group in step.groups]
            for step in steps
        ]
    times, fixed = problem.times, problem.fixed
    # fsum: the same in any order, so that equal plans are predicted to take equal times.
    return [
        [
            fixed[group.size] + math.fsum([times[group.size][i] for i in group.sample_ids])
            for group in step.groups
        ]
        for step in steps
    ]


def total_of(problem: Problem, steps: Sequence[Step], times: Sequence[Sequence[float]]) -> float:
    """Seconds of steps whose groups take ``times``."""
    if problem.execution == "lockstep":
        return math.fsum(map(max, times))
    ready = [0.0] * problem.num_ranks
    for step, seconds in zip(steps, times, strict=True):
        for group, time in zip(step.groups, seconds, strict=True):
            first, last = group.first_rank, group.first_rank + group.size
            ready[first:last] = [max(ready[first:last]) + time] * group.size
    return max(ready)
