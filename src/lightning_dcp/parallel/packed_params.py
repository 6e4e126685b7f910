"""A micro-batch, bound: its boundaries in Megatron-Core's type, with its CP group and totals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from lightning_dcp.packing import MicroBatch, MicroBatchRoutes, MTPTargets, PackLayout
from lightning_dcp.parallel.groups import DynamicCPGroups


@dataclass(frozen=True)
class BatchTotals:
    """Of a whole global batch, known on every rank: what its mean losses are means over.

    Attributes:
        tokens: Real tokens.
        sequences: Samples.
        targets: Target tokens, by which the engine divides; a number or a scalar tensor.
        mtp_targets: The same of each depth of multi-token prediction.
    """

    tokens: int
    sequences: int
    targets: Tensor | int
    mtp_targets: tuple[Tensor | int, ...] = ()


@dataclass
class BoundPackedSeqParams(PackedSeqParams):
    """Megatron-Core's packed boundaries, with the group and layout of one micro-batch.

    Attributes:
        layout: The host's view of the pack.
        batch_totals: Of the global batch that the micro-batch is part of.
        max_rows_of_step: The most rows that any rank has in this step of the plan.
        mtp: For each depth of multi-token prediction, what it reads of this rank's rows.
        routes: What routers take from the batch and what they leave for predictions.
    """

    layout: PackLayout = field(default_factory=lambda: PackLayout((1,)))
    batch_totals: BatchTotals = field(default_factory=lambda: BatchTotals(1, 1, 1))
    max_rows_of_step: int = 0
    mtp: tuple[MTPTargets, ...] = ()
    routes: MicroBatchRoutes = field(default_factory=MicroBatchRoutes)
    _on_device: dict[str, Tensor] = field(default_factory=dict)

    def on_device(
        self, name: Literal["gather_index", "sequence_of_row", "lengths"], device: torch.device
    ) -> Tensor:
        """What ``layout`` has under this name, on a device; moved there once, for all layers."""
        if name not in self._on_device or self._on_device[name].device != device:
            self._on_device[name] = _to_device(torch.as_tensor(getattr(self.layout, name)), device)
        return self._on_device[name]


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    # Out of pageable memory a copy holds the host up, whatever `non_blocking` says.
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def bind_micro_batch(
    micro_batch: MicroBatch,
    groups: DynamicCPGroups,
    *,
    batch_totals: BatchTotals | None = None,
    max_rows_of_step: int | None = None,
    routes: MicroBatchRoutes | None = None,
) -> MicroBatch:
    """Gives a micro-batch its boundaries and CP group, in place; it is where it will run by now.

    By default the micro-batch is all of its global batch, and no rank has more rows in its step.
    """
    layout = micro_batch.layout
    boundaries = _to_device(torch.from_numpy(layout.cu_seqlens_padded), micro_batch.labels.device)
    micro_batch.packed_seq_params = BoundPackedSeqParams(
        qkv_format="thd",
        # The padded ones for the real ones too: padding is then the end of its own sequence, which
        # causal attention never looks at. TransformerEngine would otherwise have to skip gaps
        # between sequences, which only some of its kernels can.
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=layout.max_seqlen,
        max_seqlen_kv=layout.max_seqlen,
        local_cp_size=micro_batch.local_cp_size,
        # Every rank of the pool has the same plan: the others of this group are in it now, too.
        cp_group=groups[micro_batch.local_cp_size],
        layout=layout,
        batch_totals=batch_totals or _totals_of(micro_batch),
        max_rows_of_step=max_rows_of_step or layout.num_rows,
        mtp=micro_batch.mtp,
        routes=routes or MicroBatchRoutes(),
    )
    return micro_batch


def _totals_of(micro_batch: MicroBatch) -> BatchTotals:
    """Of a micro-batch by itself, as if every token were a target."""
    lengths = micro_batch.layout.lengths
    depths = range(1, len(micro_batch.mtp) + 1)
    return BatchTotals(
        tokens=sum(lengths),
        sequences=len(lengths),
        targets=sum(lengths),
        mtp_targets=tuple(sum(max(n - depth, 0) for n in lengths) for depth in depths),
    )
