"""From a global batch to the rows that one rank computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_dcp.config.padding import TIGHT, PackPadding
from lightning_dcp.packing.batch import IGNORE_INDEX, GlobalBatch
from lightning_dcp.packing.jagged import Jagged
from lightning_dcp.packing.layout import PackLayout
from lightning_dcp.packing.micro_batch import MicroBatch, MTPTargets


def pack_micro_batch(
    batch: GlobalBatch,
    sample_ids: Sequence[int],
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    tp_size: int = 1,
    target_extras: Iterable[str] = (),
    padding: PackPadding = TIGHT,
    mtp_depths: int = 0,
) -> MicroBatch:
    """Packs samples of a global batch and cuts out the rows of one CP rank, on the batch's device.

    Everything but the copies is computed from lengths on the host: nothing waits for a device.

    Args:
        batch: The global batch.
        sample_ids: Which samples, in pack order.
        cp_size: Ranks of the CP group.
        cp_rank: This rank's index in the group.
        tp_size: Tensor-parallel size, which the padding respects.
        target_extras: Keys of ``batch.extras`` that are wanted for each row's target too.
        padding: How the pack is filled up beyond its sequences, with padding at its end.
        mtp_depths: Depths of multi-token prediction that ``MicroBatch.mtp`` is wanted for.

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
        batch.lengths[ids], cp_size=cp_size, cp_rank=cp_rank, tp_size=tp_size, padding=padding
    )
    # One picker for all keys: those that are stored alike share an index.
    pick = _RowPicker(layout, ids, batch.lengths)
    labels, loss_mask = pick.targets(batch)
    device = labels.device
    return MicroBatch(
        input_ids=pick(batch.input_ids, dtype=torch.int64),
        labels=labels,
        loss_mask=loss_mask,
        position_ids=_to_device(layout.positions, device).long(),
        padding_mask=_to_device(layout.is_padding, device),
        local_cp_size=cp_size,
        sample_ids=tuple(ids.tolist()),
        num_tokens=loss_mask.count_nonzero(),
        is_group_leader=cp_rank == 0,
        extras={key: pick.extra(value) for key, value in batch.extras.items()},
        target_extras={key: pick.of_target(batch.extras[key], loss_mask) for key in target_extras},
        mtp=tuple(pick.mtp_targets(batch, depth) for depth in range(1, mtp_depths + 1)),
        layout=layout,
    )


_ABOVE_ALL_IDS = 62
"""Bits that a bool is shifted by to a number that no token id reaches."""


class _RowPicker:
    """Copies the local rows of any jagged key, each key and each index once."""

    def __init__(self, layout: PackLayout, sample_ids: np.ndarray, all_lengths: np.ndarray) -> None:
        self._layout = layout
        self._all_lengths = all_lengths
        self._sample_ids = sample_ids
        self._rows: dict[int, Tensor] = {}
        self._indices: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, jagged: Jagged, *, dtype: torch.dtype | None = None) -> Tensor:
        """``[rows, ...]``: each row's own value, 0 in padding."""
        # By identity: labels that are the input ids themselves are copied once.
        if id(jagged) not in self._rows:
            stored = jagged.values
            if not len(stored):
                # Nothing but samples of one token, all of which lack it.
                stored = stored.new_zeros(1, *stored.shape[1:])
            # Selected, then filled with 0: what lies beside a sequence may be NaN.
            rows = stored.index_select(0, self._index(jagged))
            without = self._rows_without_value(jagged)
            if len(without):
                rows.index_fill_(0, _to_device(without, rows.device), 0)
            self._rows[id(jagged)] = rows if dtype is None else rows.to(dtype)
        return self._rows[id(jagged)]

    def extra(self, value: Jagged | Tensor) -> Tensor:
        """A per-token key by row, a per-sample one by sample of the pack."""
        if isinstance(value, Jagged):
            return self(value)
        return value.index_select(0, _to_device(self._sample_ids, value.device))

    def targets(self, batch: GlobalBatch) -> tuple[Tensor, Tensor]:
        """Labels, int64, and loss mask of the rows: what stands at each row's next token."""
        # int64, so that ids above and IGNORE_INDEX below fit whatever type labels come in.
        rows = self(batch.labels, dtype=torch.int64)
        if batch.loss_mask is None:
            labels = self._next(batch.labels, rows, fill=IGNORE_INDEX)
            return labels, labels != IGNORE_INDEX
        is_target = self._next(batch.loss_mask, self(batch.loss_mask), fill=0).bool()
        # The mask is unshifted, as labels are: it marks tokens, which the row before predicts.
        labels = self._next(batch.labels, rows, fill=IGNORE_INDEX, where=is_target)
        # Ids are never IGNORE_INDEX; labels of their own may be.
        own_labels = batch.labels is not batch.input_ids
        return labels, labels != IGNORE_INDEX if own_labels else is_target

    def of_target(self, value: Jagged | Tensor, loss_mask: Tensor) -> Tensor:
        """The value of each row's target; 0 without one, whatever is stored there, NaN too."""
        if isinstance(value, Jagged):
            rows = self._next(value, self(value), fill=0)
        else:
            samples = self._sample_ids[self._layout.sequence_of_row]
            rows = value.index_select(0, _to_device(samples, value.device))
        no_target = ~loss_mask.to(rows.device)
        return rows.masked_fill_(no_target.view(-1, *[1] * (rows.dim() - 1)), 0)

    def mtp_targets(self, batch: GlobalBatch, depth: int) -> MTPTargets:
        """Ids ``depth`` tokens on and labels one more, read from the whole sequences."""
        labels = self._shifted(batch.labels, depth + 1, fill=IGNORE_INDEX)
        if batch.loss_mask is not None:
            is_target = self._shifted(batch.loss_mask, depth + 1, fill=0).bool()
            labels = labels.masked_fill_(~is_target, IGNORE_INDEX)
        return MTPTargets(self._shifted(batch.input_ids, depth, fill=0), labels)

    def _shifted(self, jagged: Jagged, shift: int, *, fill: int) -> Tensor:
        """int64: the value ``shift`` tokens after each row's own; ``fill`` past the end."""
        device = jagged.values.device
        past_the_end = _to_device(self._layout.rows_past_the_end(shift), device)
        # Past the end may be past all values: 0 is there to be read, and is overwritten.
        index = (self._index(jagged) + shift).index_fill_(0, past_the_end, 0)
        return jagged.values.index_select(0, index).long().index_fill_(0, past_the_end, fill)

    def _next(
        self, jagged: Jagged, rows: Tensor, *, fill: int, where: Tensor | None = None
    ) -> Tensor:
        """The value at each row's next token; ``fill`` where there is none, or not ``where``.

        Within a run of consecutive positions it stands in the row below. Reading it there, in the
        order of memory, costs a fraction of a second selection by index.
        """
        device = rows.device
        if where is None:
            # The last row stays unset: it ends a run, and those get their value below.
            moved = torch.empty_like(rows)
            moved[:-1] = rows[1:]
        else:
            # The smaller of the value and a number above all ids, or `fill`, below all of them:
            # `torch.where` takes twice the time, since a bool condition is not vectorised.
            moved = where.to(rows.dtype).bitwise_left_shift_(_ABOVE_ALL_IDS).add_(fill)
            torch.minimum(moved[:-1], rows[1:], out=moved[:-1])
        ends, tokens = self._layout.runs_with_a_next_token
        if len(ends):
            # On to the first token of the next chunk, which is another rank's or lies elsewhere.
            at = _to_device(ends, device)
            starts = jagged.starts[self._sample_ids][self._layout.sequence_of_row[ends]]
            values = jagged.values.index_select(0, _to_device(starts + tokens, device))
            values = values.to(rows.dtype)
            if where is not None:
                values = values.masked_fill_(~where.index_select(0, at), fill)
            moved.index_copy_(0, at, values)
        return moved.index_fill_(
            0, _to_device(self._layout.rows_without_a_next_token, device), fill
        )

    def _rows_without_value(self, jagged: Jagged) -> np.ndarray:
        """Local rows that are padding, or a last token whose value the key lacks."""
        if jagged.lengths is self._all_lengths:  # Which a key that lacks nothing shares.
            return self._layout.padding_rows
        lengths = jagged.lengths[self._sample_ids]
        return np.flatnonzero(self._layout.positions >= lengths[self._layout.sequence_of_row])

    def _index(self, jagged: Jagged) -> Tensor:
        """Where each local row's token lies in the values; rows without one point somewhere."""
        # Keys that are stored alike share `starts`, which `read_global_batch` sees to.
        key = (id(jagged.starts), jagged.values.device)
        if key not in self._indices:
            starts = jagged.starts[self._sample_ids]
            # Half the memory to write and read, which is what packing takes its time for.
            small = len(jagged.values) <= np.iinfo(np.int32).max
            sources = starts.astype(np.int32 if small else np.int64)
            index = np.repeat(sources, np.diff(self._layout.row_starts))
            index += self._layout.positions
            index[self._rows_without_value(jagged)] = 0
            self._indices[key] = _to_device(index, key[1])
        return self._indices[key]


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
