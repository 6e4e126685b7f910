"""Hooks that put a micro-batch's CP group into Megatron-Core's model.

``SelfAttention`` takes rope's CP group from its ``pg_collection.cp``, which is the static group,
and not from ``packed_seq_params.cp_group``. Each attention module therefore gets its own copy of
the collection, whose ``cp`` is swapped around its forward. The micro-batch's group arrives as a
keyword argument there, so a recomputed forward sees the right group too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from torch import Tensor

from lightning_dcp.packing import MicroBatch, PackLayout
from lightning_dcp.parallel.groups import DynamicCPGroups


@dataclass
class BoundSequences(PackedSeqParams):
    """Megatron-Core's packed boundaries, with the group and layout of one micro-batch.

    Attributes:
        layout: The host's view of the pack.
    """

    layout: PackLayout = field(default_factory=lambda: PackLayout((1,)))
    _gather_index: Tensor | None = None

    def gather_index(self, device: torch.device) -> Tensor:
        """``PackLayout.gather_index`` on a device; moved there once, for all layers."""
        if self._gather_index is None or self._gather_index.device != device:
            index = torch.from_numpy(self.layout.gather_index)
            if device.type == "cuda":
                index = index.pin_memory()
            self._gather_index = index.to(device, non_blocking=True)
        return self._gather_index


def bind_micro_batch(micro_batch: MicroBatch, groups: DynamicCPGroups) -> MicroBatch:
    """Gives a micro-batch its CP group, in Megatron-Core's own type; changes it in place.

    The boundaries of real lengths are replaced by the padded ones: padding is then the end of its
    own sequence, which causal attention never looks at. TransformerEngine would otherwise have to
    skip gaps between sequences, which only some of its kernels can.

    Args:
        micro_batch: A packed micro-batch.
        groups: The groups of this rank's pool.
    """
    packed = micro_batch.packed_seq_params
    micro_batch.packed_seq_params = BoundSequences(
        qkv_format=packed.qkv_format,
        cu_seqlens_q=packed.cu_seqlens_q_padded,
        cu_seqlens_kv=packed.cu_seqlens_kv_padded,
        cu_seqlens_q_padded=packed.cu_seqlens_q_padded,
        cu_seqlens_kv_padded=packed.cu_seqlens_kv_padded,
        max_seqlen_q=packed.max_seqlen_q,
        max_seqlen_kv=packed.max_seqlen_kv,
        local_cp_size=micro_batch.local_cp_size,
        cp_group=groups[micro_batch.local_cp_size],
        layout=micro_batch.layout,
    )
    return micro_batch


def install_cp_hooks(model: torch.nn.Module) -> Callable[[], None]:
    """Makes every attention module of ``model`` use the CP group of its micro-batch.

    Args:
        model: A Megatron-Core model.

    Returns:
        A function that takes the hooks away and restores the collections; harmless twice.
    """
    _prepare_transformer_engine()
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        if isinstance(module, Attention):
            undo.append(_install_on(module))

    def remove() -> None:
        while undo:
            undo.pop()()

    return remove


def _install_on(attention: Any) -> Callable[[], None]:
    shared = attention.pg_collection
    attention.pg_collection = copy.copy(shared)

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        module.pg_collection.cp = _group_of(kwargs.get("packed_seq_params"), shared.cp)

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        module.pg_collection.cp = shared.cp

    handles = [
        attention.register_forward_pre_hook(before, with_kwargs=True),
        attention.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()
        attention.pg_collection = shared

    return remove


def _group_of(packed: PackedSeqParams | None, default: dist.ProcessGroup) -> dist.ProcessGroup:
    return default if packed is None or packed.cp_group is None else packed.cp_group


def _prepare_transformer_engine() -> None:
    """Gives TransformerEngine's attention the stream that it only makes for a static CP size."""
    if not torch.cuda.is_available():
        return
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention

    if HAVE_TE and TEDotProductAttention.cp_stream is None:
        TEDotProductAttention.cp_stream = torch.cuda.Stream()
