"""Lightning's hooks around a step whose backward passes the engine runs: what they get and give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_dcp.engine import StepResult
from lightning_dcp.model.global_names import count_parameters
from lightning_dcp.parallel import ParallelContext

_LOOK_AT_GRADIENTS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The Trainer's callbacks."""
    # Set by one of its connectors, where mypy does not look.
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return found


def tell_size(module: LightningModule, context: ParallelContext) -> None:
    """Says how large the whole model is, where Lightning's summary counts a part; a collective."""
    parts = ("tensor", "pipeline", "expert")
    if any(getattr(context.sizes, f"{name}_model_parallel_size") > 1 for name in parts):
        whole = count_parameters(module, context)
        rank_zero_info(
            f"The whole model has {whole:,} parameters; a summary counts those of rank 0."
        )


def looks_at_gradients(owners: Iterable[LightningModule | Callback]) -> bool:
    """Whether any of these has a hook of its own that Lightning calls when gradients are there."""
    return any(is_overridden(owner, name) for owner in owners for name in _LOOK_AT_GRADIENTS)


def is_overridden(owner: Any, name: str) -> bool:
    """Whether a module or callback has a method of its own, in its class or by assignment."""
    base = LightningModule if isinstance(owner, LightningModule) else Callback
    method = getattr(owner, name, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(
        base, name, None
    )


def check_step_output(output: Any, before: StepResult | None, step: StepResult | None) -> None:
    """Refuses a loss of ``training_step`` that is not the one whose gradients were made.

    Args:
        output: What the user's ``training_step`` returned.
        before: The step that the engine had run when it began.
        step: The last one now.

    Raises:
        ValueError: The engine ran none, or the loss is another one.
        RuntimeError: The loss has a graph, of which no backward pass would run.
    """
    advice = (
        "The engine runs the backward passes inside super().training_step(), for what "
        "micro_batch_step returns. Put the loss, its factor or further terms into "
        "micro_batch_step or into an objective (DynamicCPModule(objective=...)); log here."
    )
    if step is None or step is before:
        raise ValueError(
            f"training_step did not call super().training_step(), so that nothing is trained. "
            f"{advice}"
        )
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        if loss is None:
            raise ValueError(
                f"training_step returned no loss, but its gradients are made. {advice}"
            )
        return
    if loss.requires_grad:
        raise RuntimeError(
            f"training_step returned a loss with a graph, whose backward pass would not run. "
            f"{advice}"
        )
    # The very tensor in most runs: to compare numbers waits for the device.
    if loss is not step.loss and not torch.allclose(
        loss.float(), step.loss.to(loss.device), rtol=1e-6, atol=0, equal_nan=True
    ):
        raise ValueError(
            f"training_step returned {float(loss)}, and the gradients are those of "
            f"{float(step.loss)}. {advice}"
        )
