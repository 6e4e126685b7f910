"""RMSNorm in PyTorch that sequence parallelism can use."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """Torch's RMSNorm with the face of Megatron-Core's norms.

    Megatron-Core's own wrapper of torch's norms refuses sequence parallelism. There each
    tensor-parallel rank norms its slice of the rows, so that the weight's gradient is a partial sum
    on each: the mark on the weight makes ``finalize_model_grads`` add them up.

    Args:
        config: The model's config.
        hidden_size: Width that is normed.
        eps: Added to the mean square.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # A mark of Megatron-Core's, which torch's Parameter has no field for.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
