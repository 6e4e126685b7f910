"""Lightning's precision plugin for a run whose engine and optimizer are Megatron-Core's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, override

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.plugins.precision.precision import Steppable
from lightning.pytorch.utilities import GradClipAlgorithmType

from lightning_dcp.engine import MegatronOptimizer

_DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
}


class MegatronPrecision(Precision):
    """Says which type the weights have; Megatron-Core does the rest.

    With ``bf16-mixed`` and ``bf16-true`` alike, weights and activations are bfloat16, gradients add
    up and are reduced in float32, and the optimizer updates float32 master weights.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``.

    Raises:
        NotImplementedError: Another precision.
    """

    def __init__(self, precision: str) -> None:
        if precision not in _DTYPES:
            raise NotImplementedError(
                f"Trainer(precision={precision!r}) does not work with DynamicCPStrategy. Use one "
                f"of {', '.join(map(repr, _DTYPES))}."
            )
        self.precision = precision  # type: ignore[assignment]  # Lightning lists its own names

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return _DTYPES[self.precision]

    @override
    def optimizer_step(  # type: ignore[override]  # as Lightning's own
        self,
        optimizer: Steppable,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        # Until `configure_gradient_clipping` of this step asks for it.
        cast(MegatronOptimizer, optimizer).clip_to(0.0)
        return super().optimizer_step(optimizer, model, closure, **kwargs)

    @override
    def clip_gradients(
        self,
        optimizer: Steppable,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val > 0 and gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            raise ValueError(
                "clip_gradients(gradient_clip_algorithm='value') does not work with "
                "DynamicCPStrategy, whose optimizer clips by the global norm. Use 'norm'."
            )
        # Megatron-Core's optimizer clips, by the norm over all shards. Torch's function would see
        # those of this rank alone.
        cast(MegatronOptimizer, optimizer).clip_to(float(clip_val))
