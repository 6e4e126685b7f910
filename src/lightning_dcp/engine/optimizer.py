"""Megatron-Core's optimizer, with the face of a torch optimizer, and its learning rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, override

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
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
    return MegatronOptimizer(inner)


class MegatronOptimizer(torch.optim.Optimizer):
    """What Lightning and torch's LR schedulers need of an optimizer, around Megatron-Core's.

    Attributes:
        inner: Megatron-Core's optimizer.
        grad_norm: Global norm of the gradients of the last step, before clipping.
    """

    def __init__(self, inner: Any) -> None:
        # Not `super().__init__`: parameters and states are the inner optimizer's.
        self.inner = inner
        self.defaults: dict[str, Any] = {}
        # Stays empty: sharded states are saved and restored whole, by the strategy.
        self.state = defaultdict(dict)
        self.grad_norm: float | None = None

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
        successful, self.grad_norm, _ = self.inner.step()
        if not successful:
            raise RuntimeError(
                "The optimizer found an infinite or NaN gradient and left the weights as they "
                "were. Look at the last batch's loss, or lower the learning rate."
            )
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine zeroes gradients at the start of a step.

        Lightning zeroes between ``training_step``, in which our backward passes run, and
        ``backward``, which has nothing left to do: it would wipe the gradients just made.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


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
