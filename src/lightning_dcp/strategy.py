"""The Lightning contract: what a Trainer needs to run the engine, and nothing else."""

from __future__ import annotations

# First, for its side effect: Megatron-Core's notices at import stay away.
from lightning_dcp import _megatron as _megatron

# isort: split
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any, Literal, override

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor

from lightning_dcp.config.model import check_mtp_recompute
from lightning_dcp.config.padding import PackPadding, check_cap, resolve_cap
from lightning_dcp.data.loaders import keep_batch_samplers, restore_loaders
from lightning_dcp.engine import (
    WHOLE,
    DynamicCPEngine,
    MegatronOptimizer,
    OptimizerSettings,
    PlanningLoader,
    PlanSettings,
    build_optimizer,
    check_model,
    raised_on_all,
    read_cost_model,
    read_on_all_ranks,
    sign,
    wrap_module,
)
from lightning_dcp.hooks import callbacks_of, check_step_output, looks_at_gradients, tell_size
from lightning_dcp.launchers import RunGuard, launcher_of, meeting_point_in_errors
from lightning_dcp.model import ModelConfig, Recompute, check_routers, model_chunks, use_whole_names
from lightning_dcp.module import DynamicCPModule
from lightning_dcp.parallel import (
    ParallelContext,
    ParallelSizes,
    disable_cpu_mode,
    install_cp_hooks,
    parallel_state_of,
    setup_parallel,
)
from lightning_dcp.planning import CostModel, DevicePreset, cost_model_of_run, preset_of
from lightning_dcp.precision import MegatronPrecision
from lightning_dcp.rules import refuse


class DynamicCPStrategy(DDPStrategy):
    """Trains with a context-parallel size chosen for every packed micro-batch.

    The ranks that are not needed for tensor parallelism form one pool (DPxCP). For each global
    batch, every rank makes the same plan: steps that cut the pool into CP groups, long sequences
    on large groups, packs of short ones on single ranks. Ranks, launchers and collectives are those
    of Lightning's ``DDPStrategy``; the model is never wrapped in torch's DDP.

    Args:
        max_seqlen_per_dp_cp_rank: The most rows (tokens, padding included) that a rank holds of one
            micro-batch. Activation memory grows with it. For a static run that packs ``budget``
            tokens over ``context_parallel_size`` ranks the same memory is ``budget /
            context_parallel_size``. ``"auto"`` takes the smallest cap with which a sequence of the
            DataModule's ``max_length`` fits the whole pool.
        tensor_model_parallel_size: Ranks that share each layer's weights.
        context_parallel_size: CP size of a static run.
        planner: ``balanced`` (the default), ``longest_sequence``, ``static``, or ``megatron``
            (Megatron-Core's scheduler, where the installed build has one).
        cost_model: File that ``lightning-dcp calibrate`` wrote for this model: planners then
            minimise times that were measured. None for estimates from the model's own sizes and
            the data sheet of the device, as ``lightning-dcp plan`` makes them.
        pad_to_length: Pad every micro-batch to this many rows of a rank, so that there is one shape
            only. A micro-batch then holds no more, so that the cap is this number or larger.
        pad_to_length_bucket: Round the rows that a rank holds of a micro-batch up to a multiple of
            this (and of all else that must divide them), so that few shapes occur and little is
            compiled or tuned again; 512 is a good start. The cap holds after rounding.
        dynamic_context_parallel: False runs the same batches with every micro-batch on
            ``context_parallel_size`` ranks, to compare with.
        pipeline_model_parallel_size: Pipeline stages.
        virtual_pipeline_model_parallel_size: Model chunks that each stage runs in turn.
        expert_model_parallel_size: Ranks of a stage that share the experts.
        sequence_parallel: Share rows among tensor-parallel ranks between their matrix products.
        recompute: What the backward pass computes again to save memory; nothing by default.
        use_distributed_optimizer: Shard optimizer states over the DPxCP pool.
        overlap_grad_reduce: Reduce gradients while the last micro-batch's backward pass runs.
        timeout: Of the process groups.
        process_group_backend: ``nccl`` or ``gloo``; by the device when None.
        start_method: How the processes of a machine are started: ``popen`` runs the script again
            for each, ``fork`` and ``spawn`` work in notebooks (``fork`` on the CPU only).
        fp8: Run matrix products in this format of eight bits, by TransformerEngine on a GPU, and
            pad packs as its kernels need; with ``Trainer(precision="bf16-mixed")``.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Where ranks and addresses come from; found by the Trainer when None.
        checkpoint_io: How a checkpoint's dict becomes a file.
        precision_plugin: Set by the Trainer; ``32-true``, ``bf16-mixed`` and ``bf16-true`` work.

    Raises:
        ValueError: ``max_seqlen_per_dp_cp_rank`` is missing or below 1, ``pad_to_length`` or
            ``pad_to_length_bucket`` is below 1 or larger, or the options contradict each other.
    """

    strategy_name = "dynamic_cp"

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int | Literal["auto"] | None = None,
        tensor_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        planner: Literal["balanced", "longest_sequence", "static", "megatron"] | None = None,
        cost_model: str | None = None,
        pad_to_length: int | None = None,
        pad_to_length_bucket: int | None = None,
        dynamic_context_parallel: bool = True,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = Recompute(),
        use_distributed_optimizer: bool = True,
        overlap_grad_reduce: bool = False,
        timeout: timedelta | None = default_pg_timeout,
        process_group_backend: Literal["nccl", "gloo"] | None = None,
        start_method: Literal["popen", "fork", "spawn"] = "popen",
        fp8: Literal["e4m3", "hybrid"] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            timeout=timeout,
            process_group_backend=process_group_backend,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.max_seqlen_per_dp_cp_rank = check_cap(max_seqlen_per_dp_cp_rank)
        self.padding = PackPadding(
            pad_to_length=pad_to_length,
            pad_to_length_bucket=pad_to_length_bucket,
            fp8=fp8 is not None,
        )
        self.fp8 = fp8
        refuse(dynamic=dynamic_context_parallel, planner=planner)
        if isinstance(self.max_seqlen_per_dp_cp_rank, int):
            # Again for the whole pool, when its size is known.
            self.padding.check_cap(self.max_seqlen_per_dp_cp_rank, 1, tensor_model_parallel_size)
        self.tensor_model_parallel_size = tensor_model_parallel_size
        self.context_parallel_size = context_parallel_size
        self.pipeline_model_parallel_size = pipeline_model_parallel_size
        self.virtual_pipeline_model_parallel_size = virtual_pipeline_model_parallel_size
        self.expert_model_parallel_size = expert_model_parallel_size
        self.sequence_parallel = sequence_parallel
        self.recompute = recompute
        self.dynamic_context_parallel = dynamic_context_parallel
        self.planner: str = planner or ("balanced" if dynamic_context_parallel else "static")
        self.cost_model = cost_model
        self.use_distributed_optimizer = use_distributed_optimizer
        self.overlap_grad_reduce = overlap_grad_reduce
        self.checkpoint_format = WHOLE
        self._engine: DynamicCPEngine | None = None
        self._context: ParallelContext | None = None
        self._ddp: list[DistributedDataParallel] | None = None
        self.shows_gradients = False
        self._cleanup = ExitStack()
        # The launcher sets it, in each process of a run.
        self.guard: RunGuard | None = None

    # -- what a run has ------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Every rank plans the whole global batch: all draw the same samples.
        return {"num_replicas": 1, "rank": 0}

    @property
    def context(self) -> ParallelContext:
        """The parallel state of the run.

        Raises:
            RuntimeError: The run is not set up yet.
        """
        if self._context is None:
            raise RuntimeError(
                "The parallel state is set up when the Trainer starts; use it in configure_model "
                "and later hooks."
            )
        return self._context

    @property
    def engine(self) -> DynamicCPEngine:
        """What plans and runs global batches.

        Raises:
            RuntimeError: The run is not set up yet.
        """
        if self._engine is None:
            raise RuntimeError(
                "The engine is set up when the Trainer starts; use it in the module's steps."
            )
        return self._engine

    @property
    def ddp(self) -> list[DistributedDataParallel]:
        """This rank's chunks of the model, wrapped to be trained, and what else the module trains.

        Raises:
            RuntimeError: Outside a fit.
        """
        if self._ddp is None:
            raise RuntimeError(
                "The model is wrapped for trainer.fit only; use it in training_step or "
                "configure_optimizers."
            )
        return self._ddp

    @override
    def _configure_launcher(self) -> None:
        self._launcher = launcher_of(self, self._start_method)

    def check_before_start(self, trainer: Trainer, args: Sequence[Any] = ()) -> None:
        """Refuses what cannot work, before processes are started.

        Args:
            trainer: With the module that is to run.
            args: Of the Trainer's method; its DataModule, if there is one, is among them.

        Raises:
            TypeError: The module is no DynamicCPModule.
            ValueError: Sizes that do not work together, or options that contradict each other.
            NotImplementedError: Something that this package does not do.
        """
        model = self.lightning_module
        if not isinstance(model, DynamicCPModule):
            raise TypeError(
                f"DynamicCPStrategy runs a DynamicCPModule, found {type(model).__name__}. Derive "
                "your module from lightning_dcp.DynamicCPModule and put its loss in "
                "micro_batch_step."
            )
        # Lightning lets compiled modules pass where DDPStrategy runs them.
        if model._compiler_ctx is not None:
            raise NotImplementedError(
                "DynamicCPStrategy does not run modules that torch.compile made: give the module "
                "itself."
            )
        sizes = self.parallel_sizes(self.world_size)
        # What builds a model without a Trainer checks the same.
        model.model_config.check_parallel(sizes)
        check_mtp_recompute(model.model_config, self.recompute)
        refuse(
            model=model.model_config,
            objective=model.objective,
            recompute=self.recompute,
            planner=self.planner,
            fp8=self.fp8,
            precision=self.precision_plugin.precision,
            on_gpu=self.root_device.type == "cuda",
            cap=self.max_seqlen_per_dp_cp_rank,
            padding=self.padding,
            sizes=sizes,
            trainer=trainer,
            module=model,
            callbacks=callbacks_of(trainer),
            datamodule=next((one for one in args if isinstance(one, LightningDataModule)), None),
        )

    @override
    def setup_environment(self) -> None:
        sizes, module = self.parallel_sizes(self.world_size), self._module
        # Again, since hooks have added some; before callbacks are set up, which look for a model.
        refuse(callbacks=callbacks_of(module.trainer))
        with meeting_point_in_errors(self):
            super().setup_environment()
        assert self.guard is not None
        self.guard.watch.attach(
            self.global_rank,
            self.world_size,
            local_rank=self.local_rank,
            node_rank=self.node_rank,
        )
        before = module.built_on
        if before is not None and before.sizes.parts and before.sizes != sizes:
            # Now: there is one parallel state at a time.
            module.gather_model()
        self._context = setup_parallel(sizes, current=self._context, timeout=self._timeout)

    # -- set-up and teardown ------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self._module
        # Again: hooks have run since, and Lightning has found the DataModule.
        refuse(trainer=trainer, module=module)
        keep_batch_samplers(trainer)
        for loop in (
            trainer.validate_loop,
            trainer.test_loop,
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.predict_loop,
        ):
            # Under NCCL Lightning would use inference mode. Megatron-Core caches rope frequencies:
            # made in inference mode they fail in a later backward pass.
            loop.inference_mode = False
        assert self.accelerator is not None
        assert self.guard is not None
        self.accelerator.setup(trainer)
        context, device = self.context, self.root_device
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        measured = None
        if self.cost_model is not None:
            measured = read_cost_model(
                self.cost_model,
                model=module.model_config.sizes,
                tp_size=self.tensor_model_parallel_size,
                group=context.host_group,
            )
        settings = self.plan_settings(
            context.sizes,
            module.model_config,
            device=preset_of(device.type, device_name),
            max_length=getattr(getattr(trainer, "datamodule", None), "max_length", None),
            cost_model=measured,
        )
        self._engine = DynamicCPEngine(context, settings, self.guard.signals)
        self._cleanup.callback(self._engine.close)
        self.model_to_device()
        assert module.model is not None
        # A model of the user's own has only its names in this process.
        use_whole_names(module.model, context)
        chunks = model_chunks(module.model)
        check_routers(chunks, module.routes, self.context.sizes)
        for chunk in chunks:
            self._cleanup.callback(install_cp_hooks(chunk))
        tell_size(module, self.context)
        # Gradient buffers take four bytes a weight: a run that does not train makes none.
        if trainer.state.fn == TrainerFn.FITTING:
            self._ddp = wrap_module(
                module,
                chunks,
                self.context,
                use_distributed_optimizer=self.use_distributed_optimizer,
                overlap_grad_reduce=self.overlap_grad_reduce,
            )
            self.shows_gradients = looks_at_gradients([module, *callbacks_of(trainer)])
            self.setup_optimizers(trainer)
        else:
            # Those of an earlier fit would keep its weights and gradients.
            self._reset_optimizers_and_schedulers()
        self.setup_precision_plugin()

    def parallel_sizes(self, world_size: int) -> ParallelSizes:
        """The parallel sizes of a run of so many processes.

        Raises:
            ValueError: They do not work together.
        """
        names = {field.name for field in fields(ParallelSizes)} - {"world_size"}
        return ParallelSizes(world_size=world_size, **{name: getattr(self, name) for name in names})

    def plan_settings(
        self,
        sizes: ParallelSizes,
        model: ModelConfig,
        *,
        device: DevicePreset,
        max_length: int | None = None,
        cost_model: CostModel | None = None,
    ) -> PlanSettings:
        """How a run of this strategy plans; no process need run.

        A cap of ``"auto"`` follows from ``max_length``, that of the data's sequences. The cost
        model, if none was measured, is estimated from the sizes and the device's data sheet.
        """
        return PlanSettings.of_run(
            sizes,
            max_seqlen_per_dp_cp_rank=resolve_cap(
                self.max_seqlen_per_dp_cp_rank, sizes, self.padding, max_length=max_length
            ),
            planner=self.planner,
            cost_model=cost_model
            or cost_model_of_run(
                model.sizes, sizes, device, full_recompute=self.recompute.granularity == "full"
            ),
            padding=self.padding,
        )

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        # Those of an earlier fit belong to a model that is gone.
        self._reset_optimizers_and_schedulers()
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            # Told by its text: Lightning raises a plain RuntimeError.
            if "multiple optimizers" not in str(error):
                raise
            # Lightning would send the user to manual optimization, which does not work here.
            raise ValueError(
                f"DynamicCPStrategy needs exactly one optimizer; {type(self._module).__name__}."
                "configure_optimizers returned several. Parameter groups of one optimizer can "
                "have settings of their own."
            ) from error
        if len(self.optimizers) != 1 or not isinstance(self.optimizers[0], MegatronOptimizer):
            found = [type(optimizer).__name__ for optimizer in self.optimizers] or "none"
            raise ValueError(
                "DynamicCPStrategy needs exactly one optimizer, made by "
                f"trainer.strategy.build_optimizer(...); configure_optimizers returned {found}."
            )

    @property
    def optimizer_of_fit(self) -> MegatronOptimizer:
        """The fit's optimizer, without Lightning's wrapper."""
        (optimizer,) = self.optimizers
        return _unwrapped(optimizer)

    def build_optimizer(
        self, settings: OptimizerSettings | OptimizerConfig | None = None
    ) -> MegatronOptimizer:
        """Megatron-Core's optimizer for the module's model; for ``configure_optimizers``.

        Gradients are clipped to the global norm of ``Trainer(gradient_clip_val=...)``, by
        Lightning's hook ``configure_gradient_clipping``.

        Args:
            settings: Ours, or Megatron-Core's own config for all that it can do.

        Raises:
            RuntimeError: Called before the strategy is set up to fit.
        """
        return build_optimizer(self.ddp, self.context, settings or OptimizerSettings())

    @property
    @override
    def precision_plugin(self) -> MegatronPrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, MegatronPrecision) else MegatronPrecision("32-true")

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # The Trainer picks its plugin by a list of strategies that ours is not on.
        if precision_plugin is not None and not isinstance(precision_plugin, MegatronPrecision):
            precision_plugin = MegatronPrecision(precision_plugin.precision)
        self._precision_plugin = precision_plugin

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Megatron-Core's modules know where and how to make their weights.
        yield

    @override
    def teardown(self) -> None:
        self._cleanup.close()
        self._ddp = self._engine = None
        if self._context is not None:
            self._context.destroy()
        disable_cpu_mode()
        # Not DDPStrategy's, which moves the model and the optimizer to the CPU: Megatron-Core has
        # laid weights and gradients out in buffers of its own.
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            assert part is not None
            part.teardown()
        self.checkpoint_io.teardown()
        # None where others were to be started, and were not.
        if self.guard is not None:
            self.guard.watch.close()

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        if self._engine is None:
            return dataloader
        module = self._module
        # Predictions keep nothing together: the plan would be another one.
        units = None if module.trainer.predicting else module.objective.keep_together
        return PlanningLoader.of(
            dataloader,
            self._engine.prefetcher,
            keep_together=units,
            group=self.context.host_group,
        )

    @override
    def on_train_start(self) -> None:
        restore_loaders(self._module.trainer)

    # -- steps --------------------------------------------------------------------------------

    @property
    def _module(self) -> DynamicCPModule:
        assert isinstance(self.lightning_module, DynamicCPModule)
        return self.lightning_module

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        # The global batch stays on the host: a rank needs its own rows of it alone, and planning
        # and packing must not wait for a device.
        with raised_on_all("could not take a batch over", self.context.host_group):
            return super().batch_to_device(batch, torch.device("cpu"), dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        before = module.last_step
        output = super().training_step(*args, **kwargs)
        check_step_output(output, before, module.last_step)
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        # The engine has run the backward passes in `training_step`: Lightning zeroes gradients
        # between the two, and would wipe them. Its hooks fire, nothing else is left.
        module = self._module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self.shows_gradients:
            _unwrapped(optimizer).show_gradients()
        return self.precision_plugin.post_backward(closure_loss, module)

    # -- checkpoints --------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # A collective: Lightning asks every rank, and writes what rank 0 has.
        module = self._module
        if module.built_on is None and self._context is None:
            # A notebook's own process, or before the first run: what is there is whole.
            return module.state_dict()
        with self._saving_context() as context:
            return self.checkpoint_format.model_state(module, context)

    def _saving_context(self) -> AbstractContextManager[ParallelContext]:
        """The parallel state, after a run set up again for what gathers over it."""
        context = self._module.built_on or self.context
        return parallel_state_of(context.sizes, current=context)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        sign(checkpoint, self._module.model_config)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint: dict[str, Any] = read_on_all_ranks(
            checkpoint_path,
            partial(super().load_checkpoint, checkpoint_path, weights_only),
            self.context.host_group,
        )
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Also where a module's own on_load_checkpoint does not call ours.
        check_model(checkpoint, self._module.model_config)
        self.checkpoint_format.load_model_state(
            self._module, checkpoint["state_dict"], self.context, strict=strict
        )
        for optimizer in self.optimizers:
            # bfloat16 weights have float32 masters, which a checkpoint of weights alone lacks.
            _unwrapped(optimizer).inner.reload_model_params()

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        with self._saving_context() as context:
            return self.checkpoint_format.optimizer_state(
                _unwrapped(optimizer), self._module, context
            )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if len(states := checkpoint["optimizer_states"]) != 1:
            raise ValueError(
                f"The checkpoint has {len(states)} optimizer states: it was saved where there was "
                "no optimizer, as in a notebook after its fit, or by other training. Start from "
                "its weights alone: DynamicCPModule(weights=...) without ckpt_path."
            )
        (state,) = states
        self.checkpoint_format.load_optimizer_state(
            self.optimizer_of_fit, self._module, state, self.context
        )


def _unwrapped(optimizer: Any) -> MegatronOptimizer:
    inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    assert isinstance(inner, MegatronOptimizer)
    return inner
