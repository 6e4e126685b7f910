"""Runs the model on a micro-batch up to the output layer; logits are made only when asked for."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor

from lightning_dcp.packing import MicroBatch
from lightning_dcp.parallel import check_cp_hooks


class HiddenStates(NamedTuple):
    """What the fused loss needs of a micro-batch.

    Attributes:
        hidden: ``[rows, hidden_size]``, the same on all tensor-parallel ranks.
        weight: ``[local vocabulary, hidden_size]``: this rank's slice of the output layer, or of
            the embedding where the two are tied; ``[1, hidden_size]`` of a value head.
    """

    hidden: Tensor
    weight: Tensor


def hidden_states(model: torch.nn.Module, micro_batch: MicroBatch) -> HiddenStates:
    """The last hidden states of a bound micro-batch, and the output layer's weight.

    ``model`` is a Megatron-Core GPTModel with its CP hooks installed.

    Raises:
        RuntimeError: They are not, and the micro-batch is cut over several ranks.
    """
    inputs = _arguments(model, micro_batch)
    return cast(HiddenStates, model(**inputs, output_processor=_take_hidden_states))


def stage_output(chunk: torch.nn.Module, micro_batch: MicroBatch) -> Tensor:
    """What a chunk of the model that is not the last hands on, ``[rows, 1, hidden_size]``.

    Its input is set and its CP hooks are installed. Under sequence parallelism the rows are this
    rank's slice.
    """
    return cast(Tensor, chunk(**_arguments(chunk, micro_batch)))


def _arguments(model: Any, micro_batch: MicroBatch) -> dict[str, Any]:
    if micro_batch.local_cp_size > 1:
        check_cp_hooks(model)
    padding_mask = micro_batch.padding_mask[None]
    if not model.pre_process and model.config.sequence_parallel:
        # The chunk with the embedding cuts the mask along with the rows; later ones get it cut.
        group = model.pg_collection.tp
        padding_mask = padding_mask.chunk(group.size(), dim=1)[group.rank()].contiguous()
    return {
        "input_ids": micro_batch.input_ids[None],
        "position_ids": micro_batch.position_ids[None],
        # The packed boundaries are the mask.
        "attention_mask": None,
        "packed_seq_params": micro_batch.packed_seq_params,
        "padding_mask": padding_mask,
    }


def _take_hidden_states(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **rest: Any
) -> HiddenStates:
    if output_layer.sequence_parallel:
        # What follows gives each rank the whole gradient: it is cut again, not summed.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=output_layer.tp_group
        )
    weight = output_layer.weight if output_weight is None else output_weight
    # [rows, 1, hidden_size]: a pack is a batch of one.
    return HiddenStates(hidden_states[:, 0], weight)


def whole_logits(states: HiddenStates, *, vocab_size: int, group: Any) -> Tensor:
    """Logits ``[rows, vocab_size]``, gathered over the tensor-parallel ``group``: large.

    They are differentiable, the same on all its ranks, and without the padded columns.
    """
    # Its backward pass sums over the group: each rank has the gradient of its columns alone.
    hidden = copy_to_tensor_model_parallel_region(states.hidden, group=group)
    local = hidden @ states.weight.t()
    whole: Tensor = gather_from_tensor_model_parallel_region(local, group=group)
    return whole[:, :vocab_size]
