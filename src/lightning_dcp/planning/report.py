"""How long a plan is predicted to take, where the time goes, and how good that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from lightning_dcp.config.parallel import Execution
from lightning_dcp.planning.bound import lower_bound
from lightning_dcp.planning.cost.model import CostModel
from lightning_dcp.planning.inputs import as_units
from lightning_dcp.planning.plan import Plan, PlanReport, Step
from lightning_dcp.planning.request import PlanRequest, PlanSettings


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
    request = _request_of(plan, cost_model, execution)
    return make_report(request, request.units_of(plan.steps))


def group_times(plan: Plan, cost_model: CostModel | None = None) -> list[list[float]]:
    """Seconds of each group of each step of a valid plan, the rows that fill up packs included."""
    request = _request_of(plan, cost_model, "lockstep")
    return _group_times(request, request.units_of(plan.steps))


def predicted_seconds(request: PlanRequest, steps: Sequence[Step]) -> float:
    """The makespan of the steps, by the request's cost model and kind of execution."""
    times = _group_times(request, steps)
    if request.settings.execution == "lockstep":
        return math.fsum(map(max, times))
    ready = [0.0] * request.num_ranks
    for step, seconds in zip(steps, times, strict=True):
        for group, time in zip(step.groups, seconds, strict=True):
            # A group starts when the last of its members is done with the step before.
            first, last = group.first_rank, group.first_rank + group.size
            ready[first:last] = [max(ready[first:last]) + time] * group.size
    return max(ready)


def make_report(request: PlanRequest, steps: Sequence[Step]) -> PlanReport:
    """:func:`evaluate` where the request is at hand already."""
    settings, model, parts = request.settings, request.settings.cost_model, request.cost_parts
    groups = [group for step in steps for group in step.groups]
    num_samples = [len(group.sample_ids) for group in groups]
    # Flat arrays over samples, [num_samples]: training asks for a report of every global batch.
    samples = np.fromiter(chain.from_iterable(g.sample_ids for g in groups), dtype=np.int64)
    index_of = {size: k for k, size in enumerate(request.cp_sizes)}
    of_group = np.array([index_of[group.size] for group in groups])
    size = np.array(request.cp_sizes)[of_group]
    index = np.repeat(of_group, num_samples)
    weight = np.repeat(size, num_samples)
    held = np.bincount(np.repeat(np.arange(len(groups)), num_samples), parts.rows[index, samples])
    filled = held
    if not settings.padding.is_tight:
        rows = zip(held, size.tolist(), strict=True)
        filled = np.array([request.pack_rows(int(n), s) for n, s in rows])
    padded = float((filled * size).sum()) - sum(request.lengths)
    counts = np.bincount(of_group, minlength=len(request.cp_sizes)).tolist()
    ranks = [n * s for n, s in zip(counts, request.cp_sizes, strict=True)]
    hops = sum(n * model.hop_time(s) for n, s in zip(ranks, request.cp_sizes, strict=True))
    exposed = float((parts.communication[index, samples] * weight).sum()) + hops
    fixed = sum(n * request.fixed[s] for n, s in zip(ranks, request.cp_sizes, strict=True))
    busy = float((request.time_table[index, samples] * weight).sum()) + fixed
    if request.fills_packs:
        busy += model.seconds_per_row * float(((filled - held) * size).sum())
    predicted = predicted_seconds(request, steps)
    total = predicted * request.num_ranks
    return PlanReport(
        predicted_seconds=predicted,
        bound_seconds=lower_bound(request),
        tokens_per_second=sum(request.lengths) / predicted,
        # The same times added up in another order: without waiting, rounding may tell them apart.
        idle_share=max(0.0, 1.0 - busy / total),
        padding_share=model.seconds_per_row * padded / total,
        communication_share=exposed / total,
        peak_activation_bytes=model.activation_bytes(int(filled.max())),
        execution=settings.execution,
    )


def _request_of(plan: Plan, cost_model: CostModel | None, execution: Execution) -> PlanRequest:
    settings = PlanSettings(
        num_ranks=plan.num_ranks,
        max_seqlen_per_dp_cp_rank=plan.max_seqlen_per_dp_cp_rank,
        tp_size=plan.tp_size,
        cost_model=cost_model or CostModel(),
        execution=execution,
        padding=plan.padding,
    )
    return PlanRequest(plan.lengths, settings, as_units(plan.keep_together, len(plan.lengths)))


def _group_times(request: PlanRequest, steps: Sequence[Step]) -> list[list[float]]:
    if request.fills_packs:
        return [[request.seconds(g.sample_ids, g.size) for g in step.groups] for step in steps]
    # PlanRequest.seconds, written out, for speed: planners ask for every plan that they compare.
    times, fixed = request.times, request.fixed
    return [
        [
            fixed[group.size] + math.fsum([times[group.size][i] for i in group.sample_ids])
            for group in step.groups
        ]
        for step in steps
    ]
