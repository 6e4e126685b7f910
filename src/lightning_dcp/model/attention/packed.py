"""Attention for packed sequences under the CP group of the micro-batch, in PyTorch.

It serves the CPU, and it is what TransformerEngine's attention is to be compared with. Keys and
values of the group are gathered, and every chunk of a rank's zigzag attends to the tokens before it
in its own sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_dcp.packing import PackLayout
from lightning_dcp.parallel.packed_params import BoundPackedSeqParams


class PackedAttention(MegatronModule):
    """Megatron-Core's core attention for the THD format, causal, grouped-query, any CP group."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type is not AttnMaskType.causal:
            raise ValueError(
                f"PackedAttention is causal self-attention, found {attention_type} attention with "
                f"a {attn_mask_type.name} mask."
            )
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: BoundPackedSeqParams | None = None,
    ) -> Tensor:
        """Attends: ``[rows, heads * width]`` of this rank; the layout of the pack is the mask.

        Shapes of ``query`` and of ``key`` and ``value``: ``[rows, heads, width]`` and ``[rows,
        groups, width]`` per rank, with ``heads`` a multiple of ``groups``.

        Raises:
            TypeError: ``packed_seq_params`` was not made by ``bind_micro_batch``.
            NotImplementedError: An attention bias.
        """
        if not isinstance(packed_seq_params, BoundPackedSeqParams):
            raise TypeError(
                "PackedAttention needs the packed_seq_params of a bound micro-batch, found "
                f"{type(packed_seq_params).__name__}. Run the model on micro-batches of the engine."
            )
        if attention_bias is not None:
            raise NotImplementedError("PackedAttention has no attention bias.")
        layout = packed_seq_params.layout
        key, value = gather_sequences(key, value, packed_seq_params)
        output = attend_packed(query, key, value, layout, scale=self.softmax_scale)
        return output.flatten(1)


def gather_sequences(
    key: Tensor, value: Tensor, sequences: BoundPackedSeqParams
) -> tuple[Tensor, Tensor]:
    """The keys and values of the whole group, in token order.

    From ``[rows, groups, width]`` of this rank to ``[padded tokens of the pack, groups, width]``.
    """
    if sequences.layout.cp_size == 1:
        return key, value
    # [rows, 2, groups, width]: one collective a layer for both, and one for their gradients.
    both = _AllGatherRows.apply(torch.stack((key, value), dim=1), sequences.cp_group)
    # They came rank by rank: back to the order of the tokens.
    gathered = both.index_select(0, sequences.on_device("gather_index", both.device))
    return gathered[:, 0], gathered[:, 1]


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, *, scale: float | None = None
) -> Tensor:
    """Causal attention of a rank's rows to the whole sequences of a pack.

    Args:
        query: ``[rows, heads, width]``, the rows of ``layout``'s rank.
        key: ``[padded tokens, groups, width]`` in token order.
        value: The same of the values.
        layout: The pack.
        scale: Of the scores; ``1 / sqrt(width)`` by default.

    Returns:
        ``[rows, heads, width]``; zeros at padding, but for the first rows of a chunk of it.
    """
    outputs = []
    # Padding lies at a sequence's end: causality alone keeps it away from tokens. It attends to
    # nothing itself, since a pack may end in many rows of it.
    for rows, tokens, num_padding in _chunks(layout):
        output = _attend(query[rows], key[tokens], value[tokens], scale)
        outputs.append(F.pad(output, (0, 0, 0, 0, 0, num_padding)) if num_padding else output)
    return torch.cat(outputs)


def _chunks(layout: PackLayout) -> Iterator[tuple[slice, slice, int]]:
    """Of each chunk of this rank the rows that attend, what they attend to, and its padding rows.

    They attend to the tokens of their sequence up to the last of them.
    """
    row, starts = 0, layout.cu_seqlens_padded.tolist()
    # The zigzag is drawn once, in the layout, which has one or two chunks of every sequence.
    for run, (before, size) in enumerate(zip(*(one.tolist() for one in layout.runs), strict=True)):
        sequence = run if layout.cp_size == 1 else run // 2
        # One at least: all ranks of the group meet in the backward pass of the keys.
        attending = min(max(layout.lengths[sequence] - before, 1), size)
        attended = slice(starts[sequence], starts[sequence] + before + attending)
        yield slice(row, row + attending), attended, size - attending
        row += size


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """``query`` is the last rows of the sequence that ``key`` and ``value`` are the start of."""
    num_rows, num_tokens = query.shape[0], key.shape[0]
    square = num_rows == num_tokens
    mask = None
    if not square:
        # Aligned to the lower right corner; SDPA's `is_causal` aligns to the upper left.
        mask = torch.ones(num_rows, num_tokens, dtype=torch.bool, device=query.device)
        mask = mask.tril(num_tokens - num_rows)
    output = F.scaled_dot_product_attention(
        # [1, heads, rows, width], as SDPA has it.
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        # Both corners are one where it is square: kernels without a mask may serve.
        is_causal=square,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[0].transpose(0, 1)


class _AllGatherRows(torch.autograd.Function):
    """Rows of all ranks of the group, rank by rank; the gradient is summed back to each rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty((rows.shape[0] * dist.get_world_size(group), *rows.shape[1:]))
        dist.all_gather_single(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        # Every rank of the group comes by here once a layer, in the order of the layers: each has
        # rows in every pack, and `_chunks` lets each of them attend to something.
        (grad,) = grad_outputs
        own = grad.new_empty((grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:]))
        dist.reduce_scatter_single(own, grad.contiguous(), group=ctx.group)
        return own, None
