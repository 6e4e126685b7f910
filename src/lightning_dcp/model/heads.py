"""A critic's output layer: one number a token instead of logits."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(MegatronModule):
    """The weight of a linear layer from the last hidden states to one number.

    All tensor-parallel ranks hold all of it and apply it to whole rows: under sequence parallelism
    the rows are gathered before (``hidden_states`` does), so that its gradient is complete on every
    rank and must not be marked to be summed over them.

    Attributes:
        weight: ``[1, hidden_size]``.
        sequence_parallel: Whether the hidden states come cut over the tensor-parallel ranks.
        tp_group: These ranks.
    """

    def __init__(self, config: TransformerConfig, *, tp_group: Any) -> None:
        super().__init__(config)
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        config.init_method(self.weight)


def put_value_head(model: GPTModel) -> None:
    """Replaces the output layer of the stage that has one; the model must not tie it."""
    if model.post_process:
        model.output_layer = ValueHead(model.config, tp_group=model.pg_collection.tp)
