"""A micro-batch, bound: its boundaries in Megatron-Core's type, with its CP group and totals."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    def gather_index(self, device: torch.device) -> Tensor:
        """``PackLayout.gather_index`` on a device; moved there once, for all layers."""
        return self._moved("gather_index", device)

    def sequence_of_row(self, device: torch.device) -> Tensor:
        """``PackLayout.sequence_of_row`` on a device, moved there once."""
        return self._moved("sequence_of_row", device)

    def lengths(self, device: torch.device) -> Tensor:
        """``[num_sequences]`` float32: real tokens of each sequence, moved to a device once."""
        # float32: router losses divide by them.
        return self._moved("lengths", device).float()

    def _moved(self, name: str, device: torch.device) -> Tensor:
        if name not in self._on_device or self._on_device[name].device != device:
            tensor = torch.as_tensor(getattr(self.layout, name))
            # Out of pageable memory a copy holds the host up, whatever `non_blocking` says.
            if device.type == "cuda":
                tensor = tensor.pin_memory()
            self._on_device[name] = tensor.to(device, non_blocking=True)
        return self._on_device[name]


def bind_micro_batch(
    micro_batch: MicroBatch,
    groups: DynamicCPGroups,
    *,
    batch_totals: BatchTotals | None = None,
    max_rows_of_step: int | None = None,
    routes: MicroBatchRoutes | None = None,
) -> MicroBatch:
    """Gives a micro-batch its CP group, in Megatron-Core's own type; changes it in place.

    The boundaries of real lengths are replaced by the padded ones: padding is then the end of its
    own sequence, which causal attention never looks at. TransformerEngine would otherwise have to
    skip gaps between sequences, which only some of its kernels can.

    By default the micro-batch is all of its global batch, and no rank has more rows in its step.
    """
    layout = micro_batch.layout
    boundaries = vars(micro_batch.packed_seq_params)
    padded = boundaries["cu_seqlens_q_padded"]
    of_run = {
        "cu_seqlens_q": padded,
        "cu_seqlens_kv": padded,
        # Every rank of the pool has the same plan: the others of this group are in it now, too.
        "cp_group": groups[micro_batch.local_cp_size],
        "layout": layout,
        "batch_totals": batch_totals or _totals_of(micro_batch),
        "max_rows_of_step": max_rows_of_step or layout.num_rows,
        "mtp": micro_batch.mtp,
        "routes": routes or MicroBatchRoutes(),
    }
    micro_batch.packed_seq_params = BoundPackedSeqParams(**boundaries | of_run)
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
