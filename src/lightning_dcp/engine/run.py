"""The engine: a global batch to a plan, and forward and backward passes over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from lightning_dcp.engine.agreement import Signals, agree_on_batch, agree_on_outputs
from lightning_dcp.engine.collect import RowOutputs, checked_outputs, collect_outputs
from lightning_dcp.engine.ddp import OutsideParameters, finalize_outside
from lightning_dcp.engine.guard import StepGuard
from lightning_dcp.engine.losses import (
    LossTotals,
    MicroBatchStep,
    collect_mtp_losses,
    collect_router_losses,
)
from lightning_dcp.engine.micro_batches import (
    PlannedBatch,
    RecordedRoutes,
    micro_batches,
    steps_to_run,
)
from lightning_dcp.engine.optimizer import hide_gradients
from lightning_dcp.engine.pipeline import run_pipeline
from lightning_dcp.engine.prefetch import PlanPrefetcher, units_of
from lightning_dcp.model import gather_recorded, model_chunks
from lightning_dcp.packing import (
    ROUTES,
    GlobalBatch,
    MicroBatch,
    RouteShape,
    check_routes,
    read_global_batch,
)
from lightning_dcp.parallel import ParallelContext, check_cp_hooks
from lightning_dcp.planning import Plan, PlanSettings, make_plan


@dataclass(frozen=True)
class StepResult:
    """What one step gives back; the same on every rank.

    Attributes:
        loss: float32 scalar, detached: the mean loss of the global batch's target tokens.
        num_tokens: int64 scalar tensor: target tokens of the global batch, or what else the loss
            is the mean of.
        plan: The plan that ran.
        plan_wait_share: Share of the time since the step before that this rank spent waiting for
            the plan; None for the first step. It alone may differ between ranks.
        router_losses: Of a training step of a model with experts, by name, without coefficients:
            means over the global batch and the layers.
        mtp_losses: Of a training step with multi-token prediction, by name: each depth's mean over
            its targets of the global batch.
        metrics: What micro-batches logged, by name: means over the global batch.
    """

    loss: Tensor
    num_tokens: Tensor
    plan: Plan
    plan_wait_share: float | None = None
    router_losses: dict[str, Tensor] = field(default_factory=dict)
    mtp_losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)


class DynamicCPEngine:
    """Plans a global batch, packs this rank's share and runs it.

    Args:
        context: The parallel state.
        settings: How to plan.
        signals: What this process was sent; all ranks act on it in :meth:`prepare`.

    ``prefetcher`` makes plans of batches that are submitted to it while a step runs.
    """

    def __init__(
        self, context: ParallelContext, settings: PlanSettings, signals: Signals | None = None
    ) -> None:
        self.context = context
        self.settings = settings
        self.signals = Signals() if signals is None else signals
        self.prefetcher = PlanPrefetcher(
            lambda lengths, units: make_plan(lengths, settings, keep_together=units)
        )
        self._last_start: float | None = None
        self._had_frozen = False

    def close(self) -> None:
        """Ends the thread that makes plans."""
        self.prefetcher.close()

    def prepare(
        self,
        batch: Mapping[str, Any],
        *,
        vocab_size: int | None = None,
        target_extras: Iterable[str] = (),
        mtp_depths: int = 0,
        check: Callable[[GlobalBatch], None] | None = None,
        keep_together: str | None = None,
        routes: RouteShape | None = None,
    ) -> PlannedBatch:
        """Checks a global batch, compares it over all ranks and plans it; a collective.

        Args:
            batch: As ``read_global_batch`` takes it; the same on every rank.
            vocab_size: Ids must be in ``0 .. vocab_size - 1``; None leaves them unchecked.
            target_extras: Further keys that micro-batches get by target as well, as
                ``MicroBatch.target_extras``.
            mtp_depths: Depths of multi-token prediction of a model that is trained on the batch.
            check: Raises a ValueError or TypeError for a batch that the loss cannot use.
            keep_together: Key of a dense tensor ``[num_samples]`` of ints: samples with equal ones
                go into the same micro-batch.
            routes: What the model's routes look like; None if it replays none. A batch's
                ``routed_experts`` are then replayed; each sample may lack its last token's.

        Raises:
            TypeError: As ``read_global_batch``, ``check`` and ``check_routes``, or there is no such
                tensor ``keep_together``.
            ValueError: As these and ``plan_global_batch``, or the ranks hold different batches.
                What is wrong on one rank is an error on every rank.
        """
        planned: PlannedBatch | None = None
        error: Exception | None = None
        try:
            if isinstance(target_extras, str):
                raise TypeError(f"target_extras={target_extras!r} must be a tuple of keys.")
            read = read_global_batch(batch, vocab_size=vocab_size, may_lack_last=(ROUTES,))
            if check is not None:
                check(read)
            check_routes(read, routes, part=(dist.get_rank(), dist.get_world_size()))
            units = units_of(read, keep_together)
            plan, wait = self.prefetcher.get(read.lengths, units)
            planned = PlannedBatch(read, plan, wait, tuple(target_extras), mtp_depths, routes)
        except Exception as refused:
            # Of any kind, `check` is the user's; raised again when all ranks have met.
            error = refused
        # Reached by a rank that refused its batch, too: the others would wait for it in the step.
        signal = agree_on_batch(
            None if planned is None else planned.batch,
            error,
            self.context.host_group,
            given=self.prefetcher.given,
            signal=self.signals.pending,
        )
        if signal:
            self.signals.act(signal)
        assert planned is not None
        return planned

    def micro_batches(
        self, planned: PlannedBatch, recorded: RecordedRoutes | None = None
    ) -> Iterator[MicroBatch]:
        """This rank's micro-batches, bound and on its device, in the order in which they run.

        ``recorded`` gets what routers record of each of them.
        """
        return micro_batches(planned, self.context, recorded)

    def train_step(
        self,
        ddp: DistributedDataParallel | Sequence[DistributedDataParallel],
        planned: PlannedBatch,
        micro_batch_step: MicroBatchStep,
        *,
        force_all_reduce: bool = False,
    ) -> StepResult:
        """Runs forward and backward; leaves reduced, divided gradients in ``main_grad``.

        Gradients of all micro-batches add up in the DDP buffers, are reduced once over the DPxCP
        ranks, and divided by the target tokens of the whole global batch.

        Args:
            ddp: The model, wrapped, or each chunk of this rank's part, and a module's parameters
                outside of it; buffers are zeroed first.
            planned: From :meth:`prepare`.
            micro_batch_step: Gives (loss sum, target tokens) of a micro-batch on this rank; called
                where the model ends.
            force_all_reduce: Leave whole gradients on every rank, also where the distributed
                optimizer needs only a shard.
        """
        now, before = time.perf_counter(), self._last_start
        self._last_start = now
        # At most 1: a loop that prepares further ahead may have waited before this time began.
        wait_share = None if before is None else min(planned.plan_wait / (now - before), 1.0)

        wrapped = [ddp] if isinstance(ddp, DistributedDataParallel) else list(ddp)
        chunks = [one for one in wrapped if not isinstance(one.module, OutsideParameters)]
        outside = [one for one in wrapped if isinstance(one.module, OutsideParameters)]
        self._check_hooks([chunk.module for chunk in chunks])
        self._zero_gradients(wrapped, force_all_reduce)

        totals = LossTotals(micro_batch_step, self.context.device)
        guard = StepGuard(chunks[-1].module, self.context.host_group)
        num_steps = len(steps_to_run(planned.plan, self.context.sizes))
        with ExitStack() as passes:
            # Micro-batches of the model say which pass is its last, and not when these are done.
            for one in outside:
                passes.enter_context(one.no_sync())
            if self._is_pipeline:
                run_pipeline(
                    [chunk.module for chunk in chunks],
                    self.micro_batches(planned),
                    partial(guard.run, totals.add),
                    self.context,
                    num_micro_batches=num_steps,
                    no_sync=[chunk.no_sync for chunk in chunks],
                )
            else:
                for index, micro_batch in enumerate(self.micro_batches(planned)):
                    # Only in the last backward pass may DDP start to reduce. All ranks run as many
                    # micro-batches, so that they all start with the same one.
                    with nullcontext() if index == num_steps - 1 else chunks[0].no_sync():
                        guard.run(totals.add, micro_batch).backward()
        all_went_well = guard.start()

        # Reduces the gradients, sums the tokens over the pool in place, and divides by them.
        finalize_model_grads(
            chunks,
            totals.num_tokens.clone(),
            pg_collection=self.context.pg_collection,
            force_all_reduce=force_all_reduce,
        )
        loss, num_tokens = totals.mean(self.context)
        for one in outside:
            finalize_outside(one, num_tokens, self.context, force_all_reduce=force_all_reduce)
        all_went_well()
        return StepResult(
            loss,
            num_tokens,
            planned.plan,
            plan_wait_share=wait_share,
            router_losses=collect_router_losses(chunks, self.context),
            mtp_losses=collect_mtp_losses(chunks, self.context),
        )

    def _zero_gradients(
        self, wrapped: Sequence[DistributedDataParallel], force_all_reduce: bool
    ) -> None:
        trained = [parameter for one in wrapped for parameter in one.params_with_grad]
        has_frozen = not all(parameter.requires_grad for parameter in trained)
        for one in wrapped:
            one.force_all_reduce = force_all_reduce
            if has_frozen or self._had_frozen:
                # DDP starts to reduce when as many gradients are there as in the first step. Of a
                # first step it waits for the end: as many come in this one as are not frozen.
                for group in one.bucket_groups + one.expert_parallel_bucket_groups:
                    group.is_first_batch, group.per_param_grad_ready_counts = True, {}
            one.zero_grad_buffer()
        self._had_frozen = has_frozen
        # Megatron-Core's optimizers point `grad` at `main_grad`: what the last step left there
        # DDP's hook would add once more.
        hide_gradients(trained)

    @torch.no_grad()
    def eval_step(
        self,
        planned: PlannedBatch,
        micro_batch_step: MicroBatchStep,
        *,
        model: torch.nn.Module | None = None,
    ) -> StepResult:
        """The forward passes alone, as those of :meth:`train_step`; every rank must take part.

        ``model``, this rank's part of it, is needed for a pipeline; without it an error in the step
        of one rank is not brought to the others.
        """
        totals = LossTotals(micro_batch_step, self.context.device)
        self._run_forward(planned, totals.add, model)
        loss, num_tokens = totals.mean(self.context)
        return StepResult(loss, num_tokens, planned.plan)

    @torch.no_grad()
    def predict_step(
        self,
        planned: PlannedBatch,
        micro_batch_outputs: RowOutputs,
        *,
        everywhere: bool = False,
        of_own_token: Collection[str] = (),
        record_routes: bool = False,
        model: torch.nn.Module | None = None,
    ) -> dict[str, Tensor]:
        """Outputs of every target, in the order of the batch; every rank must take part.

        Args:
            planned: From :meth:`prepare`.
            micro_batch_outputs: Gives outputs by name, ``[rows, ...]``, of a micro-batch.
            everywhere: Give the result to all ranks and not to rank 0 alone.
            of_own_token: Names of outputs that are about the row's own token, not its target.
            record_routes: Give ``routed_experts`` too, the experts that each token was sent to.
            model: This rank's part of the model; as :meth:`eval_step`.

        Returns:
            By name jagged ``[num_samples, length*, ...]``, in the order of the batch; an empty dict
            on ranks that do not get it.
        """
        rows: list[dict[str, Tensor]] = []

        def last_stage(micro_batch: MicroBatch) -> Tensor:
            earlier = rows[0] if rows else None
            outputs = checked_outputs(micro_batch_outputs(micro_batch), micro_batch, earlier)
            if not micro_batch.is_filler:
                rows.append(outputs)
            # A schedule wants a loss of each micro-batch, in a forward pass too.
            return torch.zeros((), device=self.context.device)

        shape = planned.routes if record_routes else None
        recorded: RecordedRoutes | None = None if shape is None else []
        self._run_forward(planned, last_stage, model, recorded)
        if shape is not None and recorded is not None:
            # A collective of tensor-parallel ranks and stages: those without rows take part.
            for index, (routes, num_rows) in enumerate(recorded):
                # `rows` and `recorded` both leave fillers out, so that one index serves both.
                experts = gather_recorded(routes, num_rows, shape, self.context)
                if rows:
                    rows[index][ROUTES] = experts
        agree_on_outputs(rows[0] if rows else None, self.context.host_group)
        outputs = collect_outputs(
            rows,
            planned.plan,
            self.context,
            everywhere=everywhere,
            of_own_token={*of_own_token, ROUTES},
        )
        if shape is not None and outputs:
            outputs[ROUTES] = shape.from_bytes(outputs[ROUTES])
        return outputs

    def _check_hooks(self, chunks: Sequence[torch.nn.Module]) -> None:
        # Whatever the plan's CP sizes are: the answer has to be the same on all ranks.
        if len(self.context.cp_groups.pool_ranks) > 1:
            for chunk in chunks:
                check_cp_hooks(chunk)

    @property
    def _is_pipeline(self) -> bool:
        return self.context.sizes.pipeline_model_parallel_size > 1

    def _run_forward(
        self,
        planned: PlannedBatch,
        last_stage: Callable[[MicroBatch], Tensor],
        model: torch.nn.Module | None,
        recorded: RecordedRoutes | None = None,
    ) -> None:
        chunks = [] if model is None else model_chunks(model)
        self._check_hooks(chunks)
        guard = StepGuard(chunks[-1] if chunks else None, self.context.host_group)
        if not self._is_pipeline:
            for micro_batch in self.micro_batches(planned, recorded):
                guard.run(last_stage, micro_batch)
        elif chunks:
            run_pipeline(
                chunks,
                self.micro_batches(planned, recorded),
                partial(guard.run, last_stage),
                self.context,
                num_micro_batches=len(steps_to_run(planned.plan, self.context.sizes)),
            )
        else:
            raise ValueError("A pipeline's stages need the model: give model=.")
        guard.start()()
