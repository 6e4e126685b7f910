"""Megatron-Core's optimizer, with the face of a torch optimizer, and its learning rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, override

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lightning_dcp.config.optimizer import LRSchedule, OptimizerSettings
from lightning_dcp.parallel import ParallelContext, quiet_megatron


def build_optimizer(
    ddp: DistributedDataParallel | Sequence[DistributedDataParallel],
    context: ParallelContext,
    settings: OptimizerSettings | OptimizerConfig,
    *,
    clip_grad: float = 0.0,
) -> MegatronOptimizer:
    """Megatron-Core's optimizer for a wrapped model.

    Args:
        ddp: The model, wrapped; or each of its chunks.
        context: The parallel state.
        settings: Ours, or Megatron-Core's own config for all that it can do; precision, sharding
            and clipping are set here.
        clip_grad: The global norm that gradients are clipped to; 0 leaves them alone.

    Raises:
        ValueError: SGD with an optimizer whose states are sharded.
    """
    config = (
        OptimizerConfig(**vars(settings)) if isinstance(settings, OptimizerSettings) else settings
    )
    chunks = [ddp] if isinstance(ddp, DistributedDataParallel) else list(ddp)
    # Not the user's to choose: they follow from the model and from how DDP reduces.
    config.params_dtype = chunks[0].config.params_dtype
    config.bf16 = config.params_dtype == torch.bfloat16
    config.clip_grad = clip_grad
    config.use_distributed_optimizer = chunks[0].ddp_config.use_distributed_optimizer
    if config.optimizer == "sgd" and config.use_distributed_optimizer:
        raise ValueError(
            "OptimizerSettings(optimizer='sgd') does not work with "
            "DynamicCPStrategy(use_distributed_optimizer=True): Megatron-Core shards the states of "
            "Adam alone. Set use_distributed_optimizer=False, or optimizer='adam'."
        )
    with quiet_megatron():
        inner = get_megatron_optimizer(
            config,
            chunks,
            pg_collection=context.pg_collection,
            # Megatron-Core refuses them together with a collection.
            use_gloo_process_groups=False,
        )
    # Groups carry `wd_mult` 0 for biases and norms, and only Megatron-Core's own LR scheduler reads
    # it: under torch's they would be decayed like any other weight.
    for group in inner.param_groups:
        group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
        group["lr"] = config.lr * group.get("lr_mult", 1.0)
    return MegatronOptimizer(
        inner, [parameter for chunk in chunks for parameter in chunk.params_with_grad]
    )


class MegatronOptimizer(torch.optim.Optimizer):
    """What Lightning and torch's LR schedulers need of an optimizer, around Megatron-Core's.

    Gradients are in Megatron-Core's buffers. :meth:`show_gradients` lets hooks see them as
    ``grad``; what they make of it counts in the next step. A parameter whose ``requires_grad`` is
    off stays as it is in a step, weight and moments, and so does one whose shown gradient is None.

    Args:
        inner: Megatron-Core's optimizer.
        trained: The parameters that it trains.

    Attributes:
        inner: Megatron-Core's optimizer.
        grad_norm: Global norm of the gradients of the last step, before clipping.
    """

    def __init__(self, inner: Any, trained: Sequence[Any]) -> None:
        # Not `super().__init__`: parameters and states are the inner optimizer's.
        self.inner = inner
        # Stays empty: sharded states are saved and restored whole, by the strategy.
        self.state = defaultdict(dict)
        self.grad_norm: float | None = None
        self._trained = list(trained)
        self._shown = False
        self._skipped: list[Tensor] = []
        self._masters: dict[Tensor, tuple[Any, Tensor]] = {}
        for owner in self._owners:
            owner.optimizer.register_step_pre_hook(self._leave_out)
            for parameter, master in _masters(owner, self._trained):
                self._masters[parameter] = (owner, master)

    @property
    def _owners(self) -> list[Any]:
        """Megatron-Core's optimizers that have something to train on this rank."""
        return [one for one in self.inner.chained_optimizers if one.optimizer is not None]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # torch has a field
        """Those of torch's optimizer: schedulers look for ``betas`` or ``momentum`` in them."""
        return next((owner.optimizer.defaults for owner in self._owners), {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch has a field
        """The inner optimizer's groups, the very dicts: a scheduler's new ``lr`` is used."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs ``closure`` (forward and backward), then clips and updates the weights.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: Megatron-Core refused the update: a gradient is infinite or NaN.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._take_gradients()
        successful, self.grad_norm, _ = self.inner.step()
        if not successful:
            raise RuntimeError(
                "The optimizer found an infinite or NaN gradient and left the weights as they "
                "were. Look at the last batch's loss, or lower the learning rate."
            )
        return result

    def clip_to(self, norm: float) -> None:
        """Clips the gradients of the following steps to this global norm; 0 leaves them alone."""
        for owner in self._owners:
            owner.config.clip_grad = norm

    def show_gradients(self) -> None:
        """Lets ``grad`` of every parameter be its gradient in Megatron-Core's buffer, in float32.

        Those of this rank's part of the model; whole if they were reduced to every rank.
        """
        for parameter in self._trained:
            if parameter.requires_grad:
                # Torch wants the weight's type otherwise, bfloat16 say.
                parameter.grad_dtype = None
                parameter.grad = parameter.main_grad
        self._shown = True

    def _take_gradients(self) -> None:
        """Makes of ``grad``, if hooks have seen it, what the step uses."""
        self._skipped = []
        for parameter in self._trained:
            if not parameter.requires_grad or (self._shown and parameter.grad is None):
                self._skipped.append(parameter)
                # In the norm it would count.
                parameter.main_grad.zero_()
            elif self._shown and parameter.grad is not parameter.main_grad:
                parameter.main_grad.copy_(parameter.grad)
        self._shown = False

    def _leave_out(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Not a gradient of zero, under which weight decay and momentum would go on.
        for parameter in self._skipped:
            if (found := self.master_of(parameter)) is not None:
                owner, master = found
                if owner.optimizer is optimizer:
                    master.grad = None

    def master_of(self, parameter: Tensor) -> tuple[Any, Tensor] | None:
        """Which of Megatron-Core's optimizers trains a parameter, and what it updates of it.

        The float32 master weight; where states are sharded a flat part, or None if this rank has
        none.
        """
        return self._masters.get(parameter)

    def push_weights(self) -> None:
        """Gives the model what was written into master weights; a collective."""
        for owner in self._owners:
            if hasattr(owner, "_copy_main_params_to_model_params"):
                owner._copy_main_params_to_model_params()
        # An optimizer of float32 weights that are not sharded has them in the model itself.
        for chunk in self.inner.model_chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Refuses: states are laid out for the parameters that the fit begins with.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "optimizer.add_param_group does not work with DynamicCPStrategy: Megatron-Core lays "
            "gradients and optimizer states out when the fit begins. Freeze with "
            "requires_grad_(False) in on_fit_start and let go with requires_grad_(True) later, "
            "both without a new group."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine zeroes gradients at the start of a step.

        Lightning zeroes between ``training_step``, in which our backward passes run, and
        ``backward``, which has nothing left to do: it would wipe the gradients just made.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def hide_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Ends what :meth:`MegatronOptimizer.show_gradients` began, so that backward passes may run."""
    for parameter in parameters:
        parameter.grad = None
        parameter.grad_dtype = parameter.dtype


def _masters(owner: Any, trained: Sequence[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Parameters and what one of Megatron-Core's optimizers updates of them on this rank.

    The float32 master weight; a flat part of it where states are sharded.
    """
    if isinstance(owner, DistributedOptimizer):
        # Not by its index map, which is wrong for a group of more than one type.
        for models, masters in (
            (owner.model_float16_groups, owner.shard_fp32_from_float16_groups),
            (owner.model_fp32_groups, owner.shard_fp32_groups),
        ):
            for of_model, of_masters in zip(models, masters, strict=True):
                yield from zip(of_model, of_masters, strict=True)
        return
    # Dense weights and experts have an optimizer each, where experts are shared.
    is_expert = owner.param_groups[0]["is_expert_parallel"]
    for parameter in trained:
        if is_expert != getattr(parameter, "allreduce", True):
            # A float32 parameter is its own master: only 16-bit ones have another.
            yield parameter, getattr(parameter, "main_param", parameter)


def lr_scheduler(
    schedule: LRSchedule, optimizer: torch.optim.Optimizer, total_steps: int | None
) -> LambdaLR:
    """A torch scheduler of a course of the learning rate, as :meth:`LRSchedule.factor` has it."""
    return _SameForAllGroups(optimizer, lambda step: schedule.factor(step, total_steps))


class _SameForAllGroups(LambdaLR):
    """One factor for all parameter groups, however many there are.

    Megatron-Core's optimizer has more groups on a rank with experts, or with more than one chunk of
    the model, so that a run that goes on in another layout has another number of them.
    """

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        keys, num_groups = ("base_lrs", "_last_lr", "lr_lambdas"), len(self.base_lrs)
        of_groups = {key: [state_dict[key][0]] * num_groups for key in keys}
        super().load_state_dict(state_dict | of_groups)
