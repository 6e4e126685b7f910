"""Layers of ours in place of Megatron-Core's: a norm, and a critic's output layer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """Torch's RMSNorm with the face of Megatron-Core's norms."""

    # Megatron-Core's own wrapper of torch's norms refuses sequence parallelism. There each
    # tensor-parallel rank norms its slice of the rows, so that the weight's gradient is a partial
    # sum on each: the mark on the weight makes `finalize_model_grads` add them up.
    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # A mark of Megatron-Core's, which torch's Parameter has no field for.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ValueHead(MegatronModule):
    """The weight of a linear layer from the last hidden states to one number, instead of logits.

    Attributes:
        weight: ``[1, hidden_size]``.
        sequence_parallel: Whether the hidden states come cut over the tensor-parallel ranks.
        tp_group: These ranks.
    """

    def __init__(self, config: TransformerConfig, *, tp_group: Any) -> None:
        super().__init__(config)
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        # All tensor-parallel ranks hold all of it and apply it to whole rows: under sequence
        # parallelism `hidden_states` gathers them before. Its gradient is then complete on every
        # rank, and must not be marked to be summed over them.
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        config.init_method(self.weight)


def put_value_head(model: GPTModel) -> None:
    """Replaces the output layer of the stage that has one; the model must not tie it."""
    if model.post_process:
        model.output_layer = ValueHead(model.config, tp_group=model.pg_collection.tp)
