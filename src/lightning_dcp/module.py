"""The LightningModule: a global batch goes through the engine, micro-batches through your step."""

from __future__ import annotations

# First, for its side effect: Megatron-Core's notices at import stay away.
from lightning_dcp import _megatron as _megatron

# isort: split
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol, cast, override

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from lightning_dcp.config.optimizer import LRSchedule
from lightning_dcp.engine import (
    DynamicCPEngine,
    MegatronOptimizer,
    MetricSums,
    OptimizerSettings,
    PlannedBatch,
    StepResult,
    check_model,
    check_wrapped,
    full_model_state,
    load_full_model_state,
    load_kept_weights,
    logits_between_runs,
    lr_scheduler,
    read_weights,
)
from lightning_dcp.model import (
    HiddenStates,
    ModelConfig,
    Recompute,
    WholeModel,
    build_model,
    hidden_states,
    model_chunks,
    whole_logits,
)
from lightning_dcp.objectives import (
    SFT,
    FusedOutputs,
    LogitsOutputs,
    Objective,
    TargetOutputs,
    ValueLoss,
    ValueOutputs,
)
from lightning_dcp.objectives.objective import check_extras
from lightning_dcp.packing import (
    ROUTES,
    GlobalBatch,
    MicroBatch,
    RouteShape,
    pack_micro_batch,
    read_global_batch,
    to_jagged,
    unpack_rows,
)
from lightning_dcp.parallel import ParallelContext, bind_micro_batch, parallel_state_of
from lightning_dcp.precision import MegatronPrecision
from lightning_dcp.rules import refuse


class EngineStrategy(Protocol):
    """What the module takes from its strategy, ``DynamicCPStrategy``, while a Trainer runs."""

    engine: DynamicCPEngine
    ddp: list[DistributedDataParallel]
    context: ParallelContext
    precision_plugin: MegatronPrecision
    recompute: Recompute
    fp8: str | None
    shows_gradients: bool

    def build_optimizer(self, settings: OptimizerSettings) -> MegatronOptimizer:
        """Megatron-Core's optimizer for the module's model."""


class DynamicCPModule(LightningModule):
    """Trains a decoder on jagged global batches, with a CP size per micro-batch.

    ``training_step`` gives the batch to the strategy's engine, which plans it, packs this rank's
    share and calls :meth:`micro_batch_step` for every micro-batch; that asks ``objective`` for the
    losses. Give another objective for another loss on log-probabilities, override that method for
    any other, and ``configure_model`` for another Megatron-Core model.

    Args:
        model: The model's sizes.
        optimizer: The optimizer.
        lr_schedule: The course of the learning rate.
        seed: Of the initial weights; the same weights for any layout of ranks.
        objective: What is trained for; by default :class:`~lightning_dcp.objectives.SFT`, or
            :class:`~lightning_dcp.objectives.ValueLoss` for a model with a value head.
        fused_loss: Whether losses and log-probabilities come from the fused linear cross-entropy;
            False makes all logits, which takes far more memory, to compare with. Those of
            multi-token prediction are always fused.
        predict_everywhere: Whether ``predict`` gives its results to all ranks, not to the first
            alone.
        replay_routes: Whether a batch's ``routed_experts`` take the place of the routers' choices,
            in a model with ``moe.router_replay``; False ignores them.
        record_routes: Whether ``predict`` gives ``routed_experts``, the experts that each layer
            sent each token to; needs ``moe.router_replay``.
        weights: A checkpoint whose weights, and nothing else of it, a new run starts from, in any
            layout. ``ckpt_path`` of the Trainer restores all, and goes before it.

    ``self.model`` is this rank's part of the Megatron-Core model, None until the Trainer starts; a
    :class:`~lightning_dcp.model.WholeModel` where whole weights wait for a run: after a fit in a
    notebook, from ``load_from_checkpoint``, ``load_state_dict`` or a pickle. ``self.last_step`` is
    what the last training step gave: loss, tokens and the plan that ran.
    """

    of_own_token: ClassVar[frozenset[str]] = frozenset({"values"})
    """Names of predictions that are about the row's own token, and not about the next one."""

    def __init__(
        self,
        model: ModelConfig = ModelConfig(),
        optimizer: OptimizerSettings = OptimizerSettings(),
        lr_schedule: LRSchedule = LRSchedule(),
        seed: int = 0,
        objective: Objective | None = None,
        fused_loss: bool = True,
        predict_everywhere: bool = False,
        replay_routes: bool = True,
        record_routes: bool = False,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, ModelConfig):
            raise TypeError(f"model must be a ModelConfig, found a {type(model).__name__}.")
        if objective is not None and not isinstance(objective, Objective):
            raise TypeError(f"objective must be an Objective, found a {type(objective).__name__}.")
        if objective is None:
            objective = ValueLoss() if model.head == "value" else SFT()
        check_extras(objective)
        refuse(model=model, objective=objective)
        if record_routes and RouteShape.of(model) is None:
            raise ValueError(
                "record_routes=True needs a model whose routers can be asked: set "
                "router_replay=True in ModelConfig(moe=MoEConfig(...)), found "
                + ("moe=None." if model.moe is None else "router_replay=False.")
            )
        self.model_config = model
        self.optimizer_settings = optimizer
        self.lr_schedule = lr_schedule
        self.seed = seed
        self.objective = objective
        self.fused_loss = fused_loss
        self.predict_everywhere = predict_everywhere
        self.replay_routes = replay_routes
        self.record_routes = record_routes
        self.weights = weights
        self.model: torch.nn.Module | None = None
        self.last_step: StepResult | None = None
        self._open_metrics: MetricSums | None = None

    @property
    def flops_per_batch(self) -> int | None:
        """Floating-point operations of the last training step on each device; None before it.

        Of the model itself, as a model's FLOPs utilisation counts them: without recomputation,
        padding and depths of multi-token prediction. Lightning's throughput monitors read it.
        """
        if self.last_step is None or not self.trainer.training:
            return None
        whole = self.model_config.sizes.training_flops(self.last_step.plan.lengths)
        return round(whole / self.trainer.world_size)

    @property
    def lr(self) -> float:
        """The highest learning rate, where Lightning's learning rate finder looks for it."""
        return self.optimizer_settings.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer_settings = replace(self.optimizer_settings, lr=value)
        # Schedulers of a run multiply the rate that they were made with.
        for config in [] if self._trainer is None else self._trainer.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [value for _ in config.scheduler.base_lrs]

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None leaves them unchecked."""
        return self.model_config.vocab_size

    @property
    def routes(self) -> RouteShape | None:
        """What the model's routes look like; None where routers neither replay nor record."""
        return RouteShape.of(self.model_config)

    @property
    def _strategy(self) -> EngineStrategy:
        strategy: Any = self.trainer.strategy
        # Of the class: before the run is set up the property has nothing to give.
        if not hasattr(type(strategy), "engine"):
            raise TypeError(
                f"{type(self).__name__} needs Trainer(strategy=DynamicCPStrategy(...)), found "
                f"{type(strategy).__name__}."
            )
        return cast(EngineStrategy, strategy)

    @property
    def built_on(self) -> ParallelContext | None:
        """The parallel state that ``self.model`` was built on; None where no run has built it."""
        chunks = [] if self.model is None else model_chunks(self.model)
        return getattr(chunks[0], "context", None) if chunks else None

    @override
    def configure_model(self) -> None:
        """Builds ``self.model`` on the run's process groups; weights of an earlier run are kept."""
        # Lightning's load_from_checkpoint asks for a model without a run: weights stay whole then.
        if self._trainer is None:
            return
        strategy, before = self._strategy, self.model
        context = strategy.context
        if before is not None and self.built_on is context:
            return
        self.model = build_model(
            self.model_config,
            context,
            dtype=strategy.precision_plugin.dtype,
            seed=self.seed,
            recompute=strategy.recompute,
            fp8=strategy.fp8,
        )
        # Process groups of an earlier run are gone, and a model keeps the ones it was built on.
        if before is not None and not isinstance(before, WholeModel):
            self.model.load_state_dict(before.state_dict())
            return
        is_loaded = load_kept_weights(self.model, before, context)
        # A checkpoint to resume from has weights of its own.
        if self.weights is not None and not is_loaded and self.trainer.ckpt_path is None:
            state = read_weights(self.weights, self.model_config, context.host_group)
            load_full_model_state(self, state, context, strict=self.strict_loading)

    def gather_model(self) -> None:
        """Turns the ranks' parts of ``self.model`` into a whole one, on rank 0; a collective.

        The next run may have another layout then; its ``configure_model`` hands the weights out.
        """
        if self.model is not None and (context := self.built_on) is not None:
            with parallel_state_of(context.sizes, current=context) as now:
                state = full_model_state(self.model, now)
            self.model = WholeModel(state) if state else None

    @override
    def state_dict(  # type: ignore[override]  # torch's own has overloads for old calls
        self, *args: Any, keep_vars: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        context = self.built_on
        # Parameters themselves, as our checkpoints ask for them, know how they are split.
        if context is not None and context.sizes.parts and not keep_vars:
            warnings.warn(
                f"{type(self).__name__}.state_dict() is this rank's part of the model "
                f"({context.sizes.parts}). Whole weights: trainer.save_checkpoint(path), or "
                "trainer.strategy.lightning_module_state_dict(), which all ranks call and rank 0 "
                "gets.",
                stacklevel=2,
            )
        state: dict[str, Any] = super().state_dict(*args, keep_vars=keep_vars, **kwargs)
        return state

    @override
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes whole weights in any layout, as a checkpoint has them, or what ``state_dict`` gave.

        Before a run they are kept as they are; the run that takes them up checks that they fit.
        """
        if self.built_on is None:
            prefix = "model."
            whole = {
                name.removeprefix(prefix): tensor
                for name, tensor in state_dict.items()
                if name.startswith(prefix)
            }
            if whole:
                self.model = WholeModel(whole)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses the checkpoint of another model."""
        check_model(checkpoint, self.model_config)

    @override
    def forward(self, input_ids: Tensor | Mapping[str, Any]) -> Tensor:
        """Logits of whole sequences: for a look at the model, not for training.

        During a run on this rank alone: nothing is exchanged with other ranks, so that Lightning
        may call it on rank 0 only (model summaries with an ``example_input_array`` do). Between
        runs, where weights are there, in every layout: all ranks call it, and the model is built
        for the call, without gradients.

        Args:
            input_ids: Jagged ``[num_samples, length*]``; or a batch, of which all else is ignored.

        Returns:
            Jagged ``[num_samples, length*, vocab_size]``; ``[..., 1]``, values, of a value head.

        Raises:
            NotImplementedError: During a run, tensor, expert or pipeline parallelism, whose ranks
                would have to take part.
            RuntimeError: There are no weights yet.
        """
        context = self.built_on
        ids = input_ids["input_ids"] if isinstance(input_ids, Mapping) else input_ids
        if self.model is None:
            raise RuntimeError(
                f"{type(self).__name__} has no weights yet: they come with a run, or by "
                "load_from_checkpoint or load_state_dict."
            )
        if context is None or context.destroyed:
            sizes = None if context is None else context.sizes
            return logits_between_runs(self.model_config, self.model, ids, sizes)
        if context.sizes.parts:
            raise NotImplementedError(
                f"During a run forward works on one rank, which {context.sizes.parts} does not "
                "allow. Leave example_input_array out; use validate for losses, or call the module "
                "after the run."
            )
        batch = read_global_batch({"input_ids": ids}, vocab_size=self.vocab_size)
        mtp_depths = self.model_config.mtp_num_layers
        micro_batch = pack_micro_batch(batch, range(len(batch)), mtp_depths=mtp_depths)
        micro_batch.to(context.device)
        hidden, weight = self.hidden_states(bind_micro_batch(micro_batch, context.cp_groups))
        logits = (hidden @ weight.t())[:, : self.vocab_size]
        rows = unpack_rows([logits], micro_batch.layout, micro_batch.sample_ids)
        return to_jagged([rows], len(batch))

    def hidden_states(self, micro_batch: MicroBatch) -> HiddenStates:
        """The model's last hidden states of a micro-batch and the output layer's weight.

        Returns:
            ``hidden`` ``[rows, hidden_size]`` and ``weight`` ``[local vocabulary, hidden_size]``.
        """
        assert self.model is not None
        return hidden_states(model_chunks(self.model)[-1], micro_batch)

    def micro_batch_step(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The loss of one packed micro-batch on this rank; override it for another loss.

        Args:
            micro_batch: This rank's rows, on its device.

        Returns:
            The sum of the losses of this rank's target tokens, and how many they are, or of what
            else the objective counts. Nothing is divided here: the engine divides by their number
            in the global batch. A rank without any returns zero, made from the model's output.
        """
        has_values = self.model_config.head == "value"
        outputs = (self.value_outputs if has_values else self.target_outputs)(micro_batch)
        losses = self.objective(outputs, micro_batch)
        if losses.dim():
            if losses.shape != micro_batch.labels.shape:
                raise ValueError(
                    f"{type(self.objective).__name__} gave losses of shape {list(losses.shape)} "
                    f"for {len(micro_batch.labels)} rows: return one a row, or their sum."
                )
            # Selected, not multiplied: an objective may make NaN where there is no target.
            losses = torch.where(micro_batch.loss_mask, losses, 0).sum()
        return losses, self.objective.count(micro_batch)

    def log_micro_batch(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Logs from :meth:`micro_batch_step`: the step's value is the sum over the sum of counts.

        Both are summed over the micro-batches of the step and the ranks of the pool. The training
        step logs ``name``; validation and test log ``val_name`` and ``test_name``, means over the
        epoch by the counts. Ranks without a micro-batch that logs need do nothing.

        Args:
            name: Under which it is logged.
            total: The sum over this rank's rows of the micro-batch, a scalar.
            count: What to divide by: this rank's target tokens, ``micro_batch.num_tokens``, say.

        Raises:
            RuntimeError: Called outside of ``micro_batch_step``; use ``log`` there.
        """
        if self._open_metrics is None:
            raise RuntimeError("log_micro_batch is for micro_batch_step; use self.log elsewhere.")
        self._open_metrics.add(name, total, count)

    @override
    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self._open_metrics is not None:
            raise RuntimeError(
                f"self.log({name!r}) in micro_batch_step would keep the last micro-batch of this "
                "rank alone. Use self.log_micro_batch(name, total, count): sums over this rank's "
                "rows, which are added up over the step and the ranks; or self.log in log_step."
            )
        super().log(name, *args, **kwargs)

    def _run_micro_batch(
        self, metrics: MetricSums, micro_batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        # Nothing counts of a filler, which goes through the stages once more.
        self._open_metrics = (
            MetricSums(micro_batch.labels.device) if micro_batch.is_filler else metrics
        )
        try:
            return self.micro_batch_step(micro_batch)
        finally:
            self._open_metrics = None

    def _means_of(self, metrics: MetricSums) -> dict[str, tuple[Tensor, Tensor]]:
        """Means over the step and the pool, and their counts; a collective."""
        # Nothing of ours logs: a module that nobody changed is spared the exchange of names.
        if type(self) is DynamicCPModule and "micro_batch_step" not in vars(self):
            return {}
        return metrics.means(self._strategy.context)

    def target_outputs(self, micro_batch: MicroBatch) -> TargetOutputs:
        """Runs the model; log-probabilities and entropies of the targets come when asked for."""
        states = self.hidden_states(micro_batch)
        group = self._strategy.context.pg_collection.tp
        vocab_size = self.model_config.vocab_size
        if not self.fused_loss:
            logits = whole_logits(states, vocab_size=vocab_size, group=group)
            return LogitsOutputs(logits=logits, labels=micro_batch.labels)
        return FusedOutputs(
            hidden=states.hidden,
            weight=states.weight,
            labels=micro_batch.labels,
            vocab_size=vocab_size,
            tp_group=group if group.size() > 1 else None,
        )

    def value_outputs(self, micro_batch: MicroBatch) -> ValueOutputs:
        """Runs a model with a value head."""
        states = self.hidden_states(micro_batch)
        return ValueOutputs(hidden=states.hidden, weight=states.weight)

    @override
    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        strategy = self._strategy
        planned = self._prepare(batch, mtp_depths=self.model_config.mtp_num_layers)
        metrics = MetricSums(strategy.context.device)
        step = strategy.engine.train_step(
            strategy.ddp,
            planned,
            partial(self._run_micro_batch, metrics),
            force_all_reduce=strategy.shows_gradients,
        )
        means = {name: mean for name, (mean, _) in self._means_of(metrics).items()}
        self.last_step = replace(step, metrics=means)
        self.log_step(self.last_step)
        # Detached: the backward passes have run, and the strategy's `backward` runs no other.
        return self.last_step.loss

    def _prepare(self, batch: Mapping[str, Any], *, mtp_depths: int = 0) -> PlannedBatch:
        """Checks and plans a global batch for the objective; a collective."""
        objective = self.objective
        return self._strategy.engine.prepare(
            self._without_unused_routes(batch),
            vocab_size=self.vocab_size,
            routes=self.routes,
            target_extras=[extra.key for extra in objective.extras],
            mtp_depths=mtp_depths,
            check=self._check,
            keep_together=objective.keep_together,
        )

    def _check(self, batch: GlobalBatch) -> None:
        self.objective.check(batch, vocab_size=self.vocab_size)
        if self.trainer.training:
            check_wrapped(self)

    def log_step(self, step: StepResult) -> None:
        """Logs what a training step gave, once a step; equal on all ranks, so nothing is synced."""
        sizes = step.plan.cp_sizes()
        # Floats: Lightning warns of tensors of integers.
        values: dict[str, Tensor | float] = {
            self.objective.counts: step.num_tokens.float(),
            "micro_batches": float(len(step.plan.steps)),
            "cp_size_min": float(min(sizes)),
            "cp_size_max": float(max(sizes)),
        }
        if step.plan_wait_share is not None:
            values["plan_wait_share"] = step.plan_wait_share
        values |= step.router_losses | step.mtp_losses | step.metrics
        samples = len(step.plan.lengths)
        self.log("train_loss", step.loss, prog_bar=True, batch_size=samples)
        self.log_dict(values, batch_size=samples)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the norm of the gradients, which the optimizer step has just found."""
        # Not in training_step, which runs in the optimizer's closure, before the step.
        grad_norm = getattr(self.optimizers(), "grad_norm", None)
        if grad_norm is not None:
            self.log("grad_norm", float(grad_norm), batch_size=1)

    @override
    def validation_step(
        self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluate(batch, "val_loss")

    @override
    def test_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "test_loss")

    @override
    def predict_step(
        self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """What the model says about the tokens of a batch, in the order in which they came.

        Returns:
            What :meth:`predict_micro_batch` gave, by name jagged ``[num_samples, length*, ...]``:
            at each token the output about that token, 0 where it is no target, as the first of a
            sequence never is; of a value head ``values`` at every token, each that of the sequence
            up to and with this token. With the batch's ``sample_id``, if it has one, and with
            ``record_routes`` the ``routed_experts`` of every token, ``[..., MoE layers, top-k]``,
            uint8 or, of more than 256 experts, int16. An empty dict on all ranks but the first,
            unless ``predict_everywhere``.
        """
        engine = self._strategy.engine
        # Prompts need not hold what the objective reads.
        planned = engine.prepare(
            self._without_unused_routes(batch), vocab_size=self.vocab_size, routes=self.routes
        )
        outputs = engine.predict_step(
            planned,
            self.predict_micro_batch,
            everywhere=self.predict_everywhere,
            of_own_token=self.of_own_token,
            record_routes=self.record_routes,
            model=self.model,
        )
        if outputs and "sample_id" in batch:
            # As it came: outputs are in the order of the batch again.
            outputs["sample_id"] = batch["sample_id"]
        return outputs

    def predict_micro_batch(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The outputs of one packed micro-batch on this rank; override it for others.

        Args:
            micro_batch: This rank's rows, on its device.

        Returns:
            By name ``[rows, ...]``, each about the row's target, the next token, unless
            ``of_own_token`` names it: the target's log-probability at the objective's temperature,
            and the entropy of the distribution that it is from, in nats. Of a value head its
            ``values``. The same names on every rank.
        """
        if self.model_config.head == "value":
            return {"values": self.value_outputs(micro_batch).values()}
        log_probs, entropies = self.target_outputs(micro_batch).log_probs_and_entropies(
            temperature=self.objective.temperature
        )
        return {"log_probs": log_probs, "entropies": entropies}

    def _evaluate(self, batch: Mapping[str, Any], name: str) -> None:
        """Logs the mean over the epoch of what the objective counts, over all batches."""
        # No depths of multi-token prediction: they run in training only.
        metrics = MetricSums(self._strategy.context.device)
        step = self._strategy.engine.eval_step(
            self._prepare(batch), partial(self._run_micro_batch, metrics), model=self.model
        )
        # Lightning weighs its mean over the epoch by the batch size, which it wants as a number.
        num_tokens = int(step.num_tokens)
        # A batch without targets has a loss of 0 that is no measurement.
        if num_tokens:
            self.log(
                name, step.loss, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=num_tokens
            )
        prefix = name.removesuffix("loss")
        for key, (mean, count) in self._means_of(metrics).items():
            if weight := round(float(count)):
                self.log(prefix + key, mean, on_epoch=True, batch_size=weight)

    def _without_unused_routes(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch without ``routed_experts`` that are not to be replayed."""
        if self.replay_routes or not isinstance(batch, Mapping) or ROUTES not in batch:
            return batch
        return {key: value for key, value in batch.items() if key != ROUTES}

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Megatron-Core's optimizer and a torch scheduler; one step of both a global batch."""
        optimizer = self._strategy.build_optimizer(self.optimizer_settings)
        scheduler = lr_scheduler(self.lr_schedule, optimizer, self._total_steps())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"},
        }

    def _total_steps(self) -> int | None:
        """Optimizer steps of the whole fit; None where the schedule does not need them."""
        # Lightning sets up the training data to answer, which a constant rate has no need of.
        if self.lr_schedule.kind == "constant":
            return None
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ValueError(
                f"lr_schedule.kind={self.lr_schedule.kind!r} needs an end: give "
                "Trainer(max_steps=...), or use kind='constant'."
            )
        return int(steps)
