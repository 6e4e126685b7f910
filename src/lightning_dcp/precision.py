"""Lightning's precision plugin for a run whose engine and optimizer are Megatron-Core's."""

from __future__ import annotations

from typing import override

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.plugins.precision.precision import Steppable
from lightning.pytorch.utilities import GradClipAlgorithmType

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
    def clip_gradients(
        self,
        optimizer: Steppable,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Megatron-Core's optimizer clips, by the norm over all shards. Torch's function would see
        # those of this rank alone.
        pass
