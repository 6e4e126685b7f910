"""A planned batch, and the micro-batches that a rank runs of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_dcp.packing import (
    IGNORE_INDEX,
    GlobalBatch,
    MicroBatch,
    MicroBatchRoutes,
    RouteShape,
    pack_micro_batch,
)
from lightning_dcp.parallel import BatchTotals, ParallelContext, ParallelSizes, bind_micro_batch
from lightning_dcp.planning import Plan, Step

RecordedRoutes = list[tuple[MicroBatchRoutes, int]]
"""Of each micro-batch that counts, in order, what routers leave and its rows on this CP rank."""


@dataclass(frozen=True)
class PlannedBatch:
    """A checked global batch and its plan.

    Attributes:
        batch: The batch.
        plan: The plan, the same on every rank.
        plan_wait: Seconds that this rank had to wait for the plan.
        target_extras, mtp_depths, routes: As ``DynamicCPEngine.prepare`` took them.
    """

    batch: GlobalBatch
    plan: Plan
    plan_wait: float = 0.0
    target_extras: tuple[str, ...] = ()
    mtp_depths: int = 0
    routes: RouteShape | None = None


def micro_batches(
    planned: PlannedBatch, context: ParallelContext, recorded: RecordedRoutes | None = None
) -> Iterator[MicroBatch]:
    """This rank's micro-batches, one for each of :func:`steps_to_run`, bound and on its device.

    ``recorded`` gets what routers record of each of them; None records nothing.
    """
    batch, plan, sizes = planned.batch, planned.plan, context.sizes
    rank, device = context.pool_rank, context.device
    targets, *targets_of_mtp = (
        batch.num_targets_from(1 + depth).to(device, non_blocking=True)
        for depth in range(1 + planned.mtp_depths)
    )
    totals = BatchTotals(
        tokens=sum(plan.lengths),
        sequences=len(plan.lengths),
        targets=targets,
        mtp_targets=tuple(targets_of_mtp),
    )
    shares_experts = sizes.expert_model_parallel_size > 1
    # Packed one by one, when they are asked for: the host packs while a GPU still computes.
    for step, is_filler in steps_to_run(plan, sizes):
        group = step.group_of(rank)
        micro_batch = pack_micro_batch(
            batch,
            group.sample_ids,
            cp_size=group.size,
            cp_rank=rank - group.first_rank,
            tp_size=sizes.tensor_model_parallel_size,
            target_extras=planned.target_extras,
            padding=plan.padding,
            mtp_depths=planned.mtp_depths,
        )
        if is_filler:
            _empty(micro_batch)
        micro_batch.to(device, non_blocking=True)
        records = recorded is not None and not is_filler
        routes = MicroBatchRoutes.of(micro_batch, batch, planned.routes, record=records)
        if recorded is not None and records:
            recorded.append((routes, micro_batch.layout.num_rows))
        yield bind_micro_batch(
            micro_batch,
            context.cp_groups,
            # Routers and depths weigh the losses that they add by the targets: theirs vanish too.
            batch_totals=replace(totals, targets=0) if is_filler else totals,
            # Experts on other ranks may gather as many from each; nobody else asks.
            max_rows_of_step=plan.most_rows(step) if shares_experts else None,
            routes=routes,
        )


def steps_to_run(plan: Plan, sizes: ParallelSizes) -> list[tuple[Step, bool]]:
    """The steps that every rank runs, and which of them are fillers, in which nothing counts.

    Virtual stages run micro-batches in groups of as many as there are stages: Megatron-Core's
    interleaved schedule refuses another number. The last group is filled up with the smallest step
    again.
    """
    steps = [(step, False) for step in plan.steps]
    if sizes.virtual_pipeline_model_parallel_size > 1:
        missing = -len(steps) % sizes.pipeline_model_parallel_size
        # The first of equals, so that all ranks take the same.
        smallest = min(plan.steps, key=plan.most_rows)
        steps += [(smallest, True)] * missing
    return steps


def _empty(micro_batch: MicroBatch) -> None:
    """Leaves nothing in a micro-batch that counts: no target, and no token for a router."""
    # Tokens and layout stay: the filler goes through all stages and collectives as any other.
    micro_batch.is_filler = True
    for labels in (micro_batch.labels, *(one.labels for one in micro_batch.mtp)):
        labels.fill_(IGNORE_INDEX)
    micro_batch.loss_mask.fill_(False)
    micro_batch.padding_mask.fill_(True)
    micro_batch.num_tokens.zero_()
