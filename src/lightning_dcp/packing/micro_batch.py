"""From a global batch to the rows that one rank computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dcp.alignment import TIGHT, PackPadding
from lightning_dcp.packing.batch import IGNORE_INDEX, GlobalBatch
from lightning_dcp.packing.jagged import Jagged
from lightning_dcp.packing.layout import PackLayout


@dataclass
class PackedSequences:
    """The boundaries of a packed micro-batch, field for field as Megatron-Core names them.

    Boundaries are in tokens over the whole CP group, never cut; ``cp_group`` is filled in where the
    micro-batch meets the process groups.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor
    cu_seqlens_kv_padded: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    local_cp_size: int
    qkv_format: str = "thd"
    cp_group: Any = None


@dataclass
class MicroBatch:
    """What one rank computes in one step of a plan: its rows of its CP group's pack.

    All tensors are per rank. Rows are cut along the per-sequence zigzag (``PackLayout``).

    Attributes:
        input_ids: ``[rows]`` int64, 0 at padding.
        labels: ``[rows]`` int64: the next token, shifted on the whole sequence before the cut;
            ``IGNORE_INDEX`` where there is no target.
        loss_mask: ``[rows]`` bool: whether the row has a target.
        position_ids: ``[rows]`` int64: position in the row's own sequence.
        padding_mask: ``[rows]`` bool: True at padding (as Megatron-Core's router wants it).
        packed_seq_params: Boundaries and CP group of the pack.
        local_cp_size: Ranks of the CP group.
        sample_ids: The samples of the pack, in pack order, as indices into the global batch.
        num_tokens: int64 scalar tensor: target tokens among this rank's rows.
        is_group_leader: Whether this is CP rank 0 of its group.
        extras: Further keys of the batch: per-token ones ``[rows, ...]`` (0 at padding), per-sample
            ones ``[samples of the pack, ...]``.
        target_extras: Those of them that were asked for, of each row's target: the value that a
            per-token one has at the next token, as ``labels``, or that of the row's sample;
            ``[rows, ...]``, 0 where the row has no target.
        layout: The host's view of all of this.
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    padding_mask: Tensor
    packed_seq_params: Any
    local_cp_size: int
    sample_ids: tuple[int, ...]
    num_tokens: Tensor
    is_group_leader: bool
    extras: dict[str, Tensor] = field(default_factory=dict)
    target_extras: dict[str, Tensor] = field(default_factory=dict)
    layout: PackLayout = field(default_factory=lambda: PackLayout((1,)))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """This micro-batch with every tensor on ``device``; changes it in place."""

        def move(value: Any) -> Any:
            return (
                value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value
            )

        for owner in (self, self.packed_seq_params):
            for each in fields(owner):
                setattr(owner, each.name, move(getattr(owner, each.name)))
        self.extras = {key: move(value) for key, value in self.extras.items()}
        self.target_extras = {key: move(value) for key, value in self.target_extras.items()}
        return self


def pack_micro_batch(
    batch: GlobalBatch,
    sample_ids: Sequence[int],
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    tp_size: int = 1,
    target_extras: Iterable[str] = (),
    padding: PackPadding = TIGHT,
) -> MicroBatch:
    """Packs samples of a global batch and cuts out the rows of one CP rank.

    Everything but the copies is computed from lengths on the host: nothing waits for a device. One
    index serves every per-token key, another the shifted ones.

    Args:
        batch: The global batch.
        sample_ids: Which samples, in pack order.
        cp_size: Ranks of the CP group.
        cp_rank: This rank's index in the group.
        tp_size: Tensor-parallel size, which the padding respects.
        target_extras: Keys of ``batch.extras`` that are wanted for each row's target too.
        padding: How the pack is filled up beyond its sequences, with padding at its end.

    Returns:
        The micro-batch, on the device of the batch.

    Raises:
        ValueError: No sample, a sample that the batch lacks, a rank outside the group, or a pack
            that ``padding`` cannot hold.
    """
    ids = np.asarray(sample_ids, np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < len(batch):
        raise ValueError(
            f"sample_ids must be in 0..{len(batch) - 1}, found {ids.min()} to {ids.max()}."
        )
    layout = PackLayout.of(
        batch.lengths[ids].tolist(),
        cp_size=cp_size,
        cp_rank=cp_rank,
        tp_size=tp_size,
        padding=padding,
    )
    pick = _RowPicker(layout, ids)
    labels = pick(batch.labels, fill=IGNORE_INDEX, shift=1, dtype=torch.int64)
    if batch.loss_mask is not None:
        is_target = pick(batch.loss_mask, fill=0, shift=1).bool()
        torch.where(is_target, labels, labels.new_tensor(IGNORE_INDEX), out=labels)
    loss_mask = labels != IGNORE_INDEX
    device = labels.device
    return MicroBatch(
        input_ids=pick(batch.input_ids, fill=0, dtype=torch.int64),
        labels=labels,
        loss_mask=loss_mask,
        position_ids=_to_device(layout.positions, device),
        padding_mask=_to_device(~layout.is_token, device),
        packed_seq_params=_packed_sequences(layout, device),
        local_cp_size=cp_size,
        sample_ids=tuple(ids.tolist()),
        num_tokens=loss_mask.sum(),
        is_group_leader=cp_rank == 0,
        extras={key: pick.extra(value) for key, value in batch.extras.items()},
        target_extras={key: pick.of_target(batch.extras[key], loss_mask) for key in target_extras},
        layout=layout,
    )


class _RowPicker:
    """Copies the local rows of any jagged key; indices are made once per set of starts."""

    def __init__(self, layout: PackLayout, sample_ids: np.ndarray) -> None:
        self._layout = layout
        self._sample_ids = sample_ids
        self._sources: dict[int, NDArray[np.int64]] = {}
        self._indices: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor | None]] = {}

    def __call__(
        self, jagged: Jagged, *, fill: int, shift: int = 0, dtype: torch.dtype | None = None
    ) -> Tensor:
        index, no_source = self._index(jagged, shift)
        # Before the fill: an unsigned type would wrap -100 around to a real id.
        rows = jagged.values.index_select(0, index).to(dtype or jagged.values.dtype)
        return rows if no_source is None else rows.index_fill_(0, no_source, fill)

    def extra(self, value: Jagged | Tensor) -> Tensor:
        """A per-token key by row, a per-sample one by sample of the pack."""
        if isinstance(value, Jagged):
            return self(value, fill=0)
        return value.index_select(0, _to_device(self._sample_ids, value.device))

    def of_target(self, value: Jagged | Tensor, loss_mask: Tensor) -> Tensor:
        """The value of each row's target; 0 without one, whatever is stored there, NaN too."""
        if isinstance(value, Jagged):
            rows = self(value, fill=0, shift=1)
        else:
            samples = self._sample_ids[self._layout.sequence_of_row]
            rows = value.index_select(0, _to_device(samples, value.device))
        no_target = ~loss_mask.to(rows.device)
        return rows.masked_fill_(no_target.view(-1, *[1] * (rows.dim() - 1)), 0)

    def _index(self, jagged: Jagged, shift: int) -> tuple[Tensor, Tensor | None]:
        key = (id(jagged.starts), shift, jagged.values.device)
        if key not in self._indices:
            starts = jagged.starts[self._sample_ids]
            sources = self._row_sources(jagged.starts, starts)
            # Without a shift in place: rows past the end stay so under every other shift.
            index = sources + shift if shift else sources
            past = self._layout.rows_past_the_end(shift)
            # Any row that is there; what comes from it is overwritten.
            index[past] = starts[0]
            no_source = _to_device(past, key[2]) if len(past) else None
            self._indices[key] = (_to_device(index, key[2]), no_source)
        return self._indices[key]

    def _row_sources(
        self, all_starts: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Where each local row's token lies, as if padding went on in the values; made once."""
        if id(all_starts) not in self._sources:
            sources: NDArray[np.int64] = np.repeat(starts, np.diff(self._layout.row_starts))
            sources += self._layout.positions
            self._sources[id(all_starts)] = sources
        return self._sources[id(all_starts)]


def _packed_sequences(layout: PackLayout, device: torch.device) -> PackedSequences:
    real = _to_device(layout.cu_seqlens, device)
    padded = _to_device(layout.cu_seqlens_padded, device)
    return PackedSequences(
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=layout.max_seqlen,
        max_seqlen_kv=layout.max_seqlen,
        local_cp_size=layout.cp_size,
    )


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
