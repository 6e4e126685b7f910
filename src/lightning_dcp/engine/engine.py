"""One optimizer step's forward and backward passes over a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from lightning_dcp.engine.agreement import agree_on_lengths
from lightning_dcp.engine.collect import collect_outputs
from lightning_dcp.engine.mtp_losses import collect_mtp_losses
from lightning_dcp.engine.pipeline import run_pipeline
from lightning_dcp.engine.prefetch import PlanAhead, UnitIds, read_units
from lightning_dcp.engine.router_losses import collect_router_losses
from lightning_dcp.engine.routes import RecordedRoutes, as_routes, recorded_routes, routes_of
from lightning_dcp.model import ROUTES, RouteShape, check_routes, model_chunks
from lightning_dcp.packing import (
    IGNORE_INDEX,
    GlobalBatch,
    MicroBatch,
    pack_micro_batch,
    read_global_batch,
)
from lightning_dcp.parallel import BatchTotals, ParallelContext, bind_micro_batch
from lightning_dcp.planning import (
    Plan,
    PlanSettings,
    Step,
    make_plan,
)

MicroBatchStep = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""Of a micro-batch: the sum of its target tokens' losses on this rank, and how many they are.

What is counted may be something else, pairs say; the step's loss is the mean over it."""

RowOutputs = Callable[[MicroBatch], dict[str, Tensor]]
"""Of a micro-batch: outputs of each row's target on this rank, by name, ``[rows, ...]``."""


@dataclass(frozen=True)
class PlannedBatch:
    """A checked global batch and its plan.

    Attributes:
        batch: The batch.
        plan: The plan, the same on every rank.
        plan_wait: Seconds that this rank had to wait for the plan.
        target_extras: Keys whose values micro-batches get by target as well.
        lookahead: Depths of multi-token prediction that micro-batches carry ids and labels for.
        routes: What the model's routes look like, if it replays or records any.
    """

    batch: GlobalBatch
    plan: Plan
    plan_wait: float = 0.0
    target_extras: tuple[str, ...] = ()
    lookahead: int = 0
    routes: RouteShape | None = None


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
    """

    loss: Tensor
    num_tokens: Tensor
    plan: Plan
    plan_wait_share: float | None = None
    router_losses: dict[str, Tensor] = field(default_factory=dict)
    mtp_losses: dict[str, Tensor] = field(default_factory=dict)


class DynamicCPEngine:
    """Plans a global batch, packs this rank's share and runs it.

    Args:
        context: The parallel state.
        settings: How to plan.
    """

    def __init__(self, context: ParallelContext, settings: PlanSettings) -> None:
        self.context = context
        self.settings = settings
        self.ahead = PlanAhead(
            lambda lengths, units: make_plan(lengths, settings, keep_together=units)
        )
        self._last_planned: float | None = None

    def close(self) -> None:
        """Ends the thread that plans ahead."""
        self.ahead.close()

    def prepare(
        self,
        batch: Mapping[str, Any],
        *,
        vocab_size: int | None = None,
        target_extras: Iterable[str] = (),
        lookahead: int = 0,
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
            lookahead: Depths of multi-token prediction of a model that is trained on the batch.
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
        prepared: PlannedBatch | None = None
        units: UnitIds = None
        error: Exception | None = None
        try:
            read = read_global_batch(batch, vocab_size=vocab_size, may_lack_last=(ROUTES,))
            if check is not None:
                check(read)
            check_routes(read, routes, part=(dist.get_rank(), dist.get_world_size()))
            units = _units_of(read, keep_together)
            plan, wait = self.ahead.get(read.lengths, units)
            prepared = PlannedBatch(read, plan, wait, tuple(target_extras), lookahead, routes)
        except (TypeError, ValueError, NotImplementedError, ImportError) as refused:
            error = refused
        lengths = None if prepared is None else prepared.batch.lengths
        agree_on_lengths(lengths, error, self.context.host_group, units=units)
        assert prepared is not None
        return prepared

    def micro_batches(
        self, planned: PlannedBatch, recorded: RecordedRoutes | None = None
    ) -> Iterator[MicroBatch]:
        """This rank's micro-batches, one a step of the plan, bound and on its device.

        Args:
            planned: From :meth:`prepare`.
            recorded: Gets what routers record of each of them; None to record nothing.
        """
        rank = self.context.pool_rank
        totals = self._totals(planned)
        shares_experts = self.context.sizes.expert_model_parallel_size > 1
        for step, is_filler in self._steps(planned.plan):
            group = step.group_of(rank)
            micro_batch = pack_micro_batch(
                planned.batch,
                group.sample_ids,
                cp_size=group.size,
                cp_rank=rank - group.first_rank,
                tp_size=self.context.sizes.tensor_model_parallel_size,
                target_extras=planned.target_extras,
                padding=planned.plan.padding,
                lookahead=planned.lookahead,
            )
            if is_filler:
                _empty(micro_batch)
            micro_batch.to(self.context.device, non_blocking=True)
            records = recorded is not None and not is_filler
            routes = routes_of(micro_batch, planned.batch, planned.routes, record=records)
            if recorded is not None and records:
                recorded.append((routes, micro_batch.layout.num_rows))
            yield bind_micro_batch(
                micro_batch,
                self.context.cp_groups,
                batch_totals=replace(totals, targets=0) if is_filler else totals,
                # Experts on other ranks ask for it; else the plan is not gone through for it.
                max_rows_of_step=planned.plan.most_rows(step) if shares_experts else None,
                routes=routes,
            )

    def _totals(self, planned: PlannedBatch) -> BatchTotals:
        targets, *ahead = (
            planned.batch.num_targets_from(1 + depth).to(self.context.device, non_blocking=True)
            for depth in range(1 + planned.lookahead)
        )
        return BatchTotals(
            tokens=sum(planned.plan.lengths),
            sequences=len(planned.plan.lengths),
            targets=targets,
            targets_ahead=tuple(ahead),
        )

    def _steps(self, plan: Plan) -> list[tuple[Step, bool]]:
        """The steps to run, and which of them only fill up the last group of a pipeline's chunks.

        Virtual stages run micro-batches in groups of as many as there are stages. What is missing
        is filled up with the smallest step again, with nothing in it that counts.
        """
        steps = [(step, False) for step in plan.steps]
        if self.context.sizes.virtual_pipeline_model_parallel_size > 1:
            missing = -len(steps) % self.context.sizes.pipeline_model_parallel_size
            smallest = min(plan.steps, key=plan.most_rows)
            steps += [(smallest, True)] * missing
        return steps

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
            ddp: The model, wrapped, or each chunk of this rank's part; buffers are zeroed first.
            planned: From :meth:`prepare`.
            micro_batch_step: Gives (loss sum, target tokens) of a micro-batch on this rank; called
                where the model ends.
            force_all_reduce: Leave whole gradients on every rank, also where the distributed
                optimizer needs only a shard.
        """
        share = self._wait_share(planned)
        chunks = [ddp] if isinstance(ddp, DistributedDataParallel) else list(ddp)
        for chunk in chunks:
            _zero_gradients(chunk)
            chunk.force_all_reduce = force_all_reduce
        totals = _Totals(self.context.device)
        if self._is_pipeline:
            self._run_pipeline(
                [chunk.module for chunk in chunks],
                planned,
                lambda micro_batch: totals.add(*_loss_of(micro_batch_step, micro_batch)),
                no_sync=[chunk.no_sync for chunk in chunks],
            )
        else:
            self._run(chunks[0], planned, micro_batch_step, totals)
        num_tokens = totals.num_tokens.clone()
        # Reduces the gradients, sums `num_tokens` over the pool in place, and divides by it.
        finalize_model_grads(
            chunks,
            num_tokens,
            pg_collection=self.context.pg_collection,
            force_all_reduce=force_all_reduce,
        )
        return replace(
            totals.result(self.context, planned.plan),
            plan_wait_share=share,
            router_losses=collect_router_losses(chunks, self.context),
            mtp_losses=collect_mtp_losses(chunks, self.context),
        )

    @property
    def _is_pipeline(self) -> bool:
        return self.context.sizes.pipeline_model_parallel_size > 1

    def _run(
        self,
        ddp: DistributedDataParallel,
        planned: PlannedBatch,
        micro_batch_step: MicroBatchStep,
        totals: _Totals,
    ) -> None:
        num_steps = len(planned.plan.steps)
        for index, micro_batch in enumerate(self.micro_batches(planned)):
            with nullcontext() if index == num_steps - 1 else ddp.no_sync():
                loss_sum, num_tokens = _checked(micro_batch_step(micro_batch))
                loss_sum.backward()
            totals.add(loss_sum, num_tokens)

    def _run_pipeline(
        self,
        chunks: Sequence[torch.nn.Module],
        planned: PlannedBatch,
        last_stage: Callable[[MicroBatch], Tensor],
        *,
        no_sync: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
        recorded: RecordedRoutes | None = None,
    ) -> None:
        run_pipeline(
            chunks,
            self.micro_batches(planned, recorded),
            last_stage,
            self.context,
            num_micro_batches=len(self._steps(planned.plan)),
            forward_only=not no_sync,
            no_sync=no_sync,
        )

    def _wait_share(self, planned: PlannedBatch) -> float | None:
        now, before = time.perf_counter(), self._last_planned
        self._last_planned = now
        return None if before is None else min(planned.plan_wait / (now - before), 1.0)

    @torch.no_grad()
    def eval_step(
        self,
        planned: PlannedBatch,
        micro_batch_step: MicroBatchStep,
        *,
        model: torch.nn.Module | None = None,
    ) -> StepResult:
        """The forward passes alone; every rank must take part.

        Args:
            planned: From :meth:`prepare`.
            micro_batch_step: Gives (loss sum, target tokens) of a micro-batch on this rank; called
                where the model ends.
            model: This rank's part of the model; needed for a pipeline alone.
        """
        totals = _Totals(self.context.device)

        def last_stage(micro_batch: MicroBatch) -> Tensor:
            return totals.add(*_loss_of(micro_batch_step, micro_batch))

        self._run_forward(planned, last_stage, model)
        return totals.result(self.context, planned.plan)

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
            model: This rank's part of the model; needed for a pipeline alone.

        Returns:
            As :func:`~lightning_dcp.engine.collect.collect_outputs`.
        """
        rows: list[dict[str, Tensor]] = []

        def last_stage(micro_batch: MicroBatch) -> Tensor:
            outputs = _checked_rows(micro_batch_outputs(micro_batch), micro_batch)
            if not micro_batch.is_filler:
                rows.append(outputs)
            return torch.zeros((), device=self.context.device)

        shape = planned.routes if record_routes else None
        recorded: RecordedRoutes | None = None if shape is None else []
        self._run_forward(planned, last_stage, model, recorded)
        if shape is not None and recorded is not None:
            for index, (routes, num_rows) in enumerate(recorded):
                experts = recorded_routes(routes, num_rows, shape, self.context)
                if rows:
                    rows[index][ROUTES] = experts
        outputs = collect_outputs(
            rows,
            planned.plan,
            self.context,
            everywhere=everywhere,
            of_own_token={*of_own_token, ROUTES},
        )
        if shape is not None and outputs:
            outputs[ROUTES] = as_routes(outputs[ROUTES], shape)
        return outputs

    def _run_forward(
        self,
        planned: PlannedBatch,
        last_stage: Callable[[MicroBatch], Tensor],
        model: torch.nn.Module | None,
        recorded: RecordedRoutes | None = None,
    ) -> None:
        if not self._is_pipeline:
            for micro_batch in self.micro_batches(planned, recorded):
                last_stage(micro_batch)
            return
        if model is None:
            raise ValueError("A pipeline's stages need the model: give model=.")
        self._run_pipeline(model_chunks(model), planned, last_stage, recorded=recorded)


def _empty(micro_batch: MicroBatch) -> None:
    """Leaves nothing in a micro-batch that counts: no target, and no token for a router."""
    micro_batch.is_filler = True
    for labels in (micro_batch.labels, *(ahead.labels for ahead in micro_batch.ahead)):
        labels.fill_(IGNORE_INDEX)
    micro_batch.loss_mask.fill_(False)
    micro_batch.padding_mask.fill_(True)
    micro_batch.num_tokens.zero_()


def _loss_of(micro_batch_step: MicroBatchStep, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    loss_sum, num_tokens = _checked(micro_batch_step(micro_batch))
    if micro_batch.is_filler:
        # Whatever the loss makes of it: zero, with a backward pass in which all stages take part.
        never = torch.zeros((), dtype=torch.bool, device=loss_sum.device)
        return torch.where(never, loss_sum, 0), torch.zeros_like(num_tokens)
    return loss_sum, num_tokens


def _units_of(batch: GlobalBatch, keep_together: str | None) -> UnitIds:
    if keep_together is None:
        return None
    if keep_together not in batch.extras:
        raise ValueError(
            f"keep_together={keep_together!r}: the batch has no such key; its further keys are "
            f"{sorted(batch.extras)}."
        )
    return read_units(batch.extras[keep_together])


def _zero_gradients(ddp: DistributedDataParallel) -> None:
    """Zeroes the buffers, and drops what the last optimizer step left in ``grad``.

    Megatron-Core's optimizers point ``grad`` at ``main_grad``: DDP's hook would add it once more.
    """
    ddp.zero_grad_buffer()
    for parameter in ddp.module.parameters():
        parameter.grad = None


class _Totals:
    """Sums of this rank, and their reduction; nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, loss_sum: Tensor, num_tokens: Tensor) -> Tensor:
        self.loss_sum += loss_sum.detach()
        self.num_tokens += num_tokens
        return loss_sum

    def result(self, context: ParallelContext, plan: Plan) -> StepResult:
        both = torch.stack((self.loss_sum, self.num_tokens.double()))
        dist.all_reduce(both, group=context.pg_collection.dp_cp)
        if context.sizes.pipeline_model_parallel_size > 1:
            # Only the last stage has sums; the others have zeros.
            dist.all_reduce(both, group=context.pg_collection.pp)
        mean = both[0] / both[1].clamp(min=1)
        return StepResult(mean.float(), both[1].long(), plan)


def _checked(output: Any) -> tuple[Tensor, Tensor]:
    """What a user's step returned, or an error that says what it has to return."""
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], Tensor)):
        raise TypeError(
            "micro_batch_step must return (loss sum, number of target tokens), found "
            f"{type(output).__name__}."
        )
    loss_sum, num_tokens = output
    if loss_sum.dim() != 0:
        raise ValueError(
            "The loss of micro_batch_step must be a scalar: the sum over this rank's target "
            f"tokens, found shape {tuple(loss_sum.shape)}."
        )
    if torch.is_grad_enabled() and not loss_sum.requires_grad:
        raise ValueError(
            "The loss of micro_batch_step does not depend on the model. Without a target token it "
            "must still be made from the model's output, and be zero: the other ranks of the CP "
            "group wait for this one's backward pass."
        )
    return loss_sum, torch.as_tensor(num_tokens)


def _checked_rows(outputs: Any, micro_batch: MicroBatch) -> dict[str, Tensor]:
    """What a user's prediction returned, or an error that says what it has to return."""
    if not isinstance(outputs, dict) or not outputs:
        raise TypeError(
            "predict_micro_batch must return a dict with one output or more by name, found "
            f"{'an empty dict' if outputs == {} else type(outputs).__name__}."
        )
    num_rows = len(micro_batch.labels)
    for name, value in outputs.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != num_rows:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise ValueError(
                f"predict_micro_batch gave '{name}' with {found}; an output needs one row for each "
                f"of the {num_rows} rows of the micro-batch."
            )
    return outputs
