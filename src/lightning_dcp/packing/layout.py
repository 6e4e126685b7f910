"""Where every token of a packed micro-batch lies, from the lengths alone.

The layout is the per-sequence zigzag of context parallelism (Megatron-Core and TransformerEngine,
THD format): each padded sequence is cut in ``2 * cp_size`` chunks, and rank ``r`` holds chunks
``r`` and ``2 * cp_size - 1 - r`` of every sequence, in this order. A pack of a sequence of 14
tokens and one of 5, on 2 ranks (``.`` is padding)::

    tokens of the pack    0 1 2 3|4 5 6 7|8 9 A B|C D . . || a b|c d|e .|. .
    chunk of a sequence      0   |   1   |   2   |   3    ||  0 | 1 | 2 | 3

    rows of CP rank 0     0 1 2 3 C D . . a b . .      chunks 0 and 3 of each
    rows of CP rank 1     4 5 6 7 8 9 A B c d e .      chunks 1 and 2 of each

A token attends to all before it, so that late chunks cost more: an early and a late one each give
all ranks the same work. What lies in one chunk lies together in memory (a *run* below); the token
after a chunk is another rank's, or lies elsewhere on this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.padding import TIGHT, PackPadding, row_alignment


@dataclass(frozen=True)
class PackLayout:
    """The rows that one rank of a CP group holds of a pack of sequences.

    Attributes:
        lengths: Tokens of each sequence, in pack order.
        cp_size: Ranks of the CP group.
        cp_rank: This rank's index in the group.
        tp_size: Tensor-parallel size, which the padding respects.
        padding: How the pack is filled up.
    """

    lengths: tuple[int, ...]
    cp_size: int = 1
    cp_rank: int = 0
    tp_size: int = 1
    padding: PackPadding = TIGHT

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | NDArray[np.int64],
        *,
        cp_size: int = 1,
        cp_rank: int = 0,
        tp_size: int = 1,
        padding: PackPadding = TIGHT,
    ) -> PackLayout:
        """A layout of checked values.

        Raises:
            ValueError: No sequence, a length or size below 1, a rank outside the group, or a
                ``pad_to_length`` that the sequences pass or the group cannot cut.
        """
        array = np.array(lengths, np.int64)
        if not len(array):
            raise ValueError("A micro-batch needs at least one sequence, found none.")
        if array.min() < 1:
            where = int(array.argmin())
            raise ValueError(f"Sequence {where} of the pack has length {array[where]}.")
        check_at_least("tp_size", tp_size)
        if not 0 <= cp_rank < cp_size:
            raise ValueError(f"cp_rank must be in 0..{cp_size - 1}, found {cp_rank}.")
        layout = cls(tuple(array.tolist()), cp_size, cp_rank, tp_size, padding)
        # The cached property, filled: the array is at hand.
        layout.__dict__["_lengths"] = array
        if padding.is_tight:
            return layout
        rows, align = layout.num_rows, row_alignment(cp_size, tp_size) // cp_size
        # Buckets are rounded up to what must divide them; `pad_to_length` is the user's own.
        if rows % align:
            raise ValueError(
                f"pad_to_length={rows} is no multiple of {align}, as cp_size={cp_size} and "
                f"tp_size={tp_size} need."
            )
        return layout

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.asarray(self.lengths, np.int64)

    @cached_property
    def padded_lengths(self) -> NDArray[np.int64]:
        """``[num_sequences]`` int64: tokens after padding, over the whole group."""
        align = self.padding.sequence_alignment(self.cp_size, self.tp_size)
        if align == 1 and self.padding.is_tight:
            return self._lengths
        padded = -(-self._lengths // align) * align
        if not self.padding.is_tight:
            # The last sequence takes all of it: nothing that works on sequences, such as attention,
            # rope or a roll of labels, sees anything new. A sequence of padding alone would be one
            # more for attention, and would have no real token to attend from.
            rows = int(padded.sum()) // self.cp_size
            filled = self.padding.pack_rows(rows, self.cp_size, self.tp_size)
            padded[-1] += (filled - rows) * self.cp_size
        return padded

    @cached_property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """``[num_sequences + 1]`` int32: boundaries of the real lengths."""
        return _boundaries(self._lengths)

    @cached_property
    def cu_seqlens_padded(self) -> NDArray[np.int32]:
        """``[num_sequences + 1]`` int32: boundaries of the padded lengths, over the whole group."""
        same = self.padded_lengths is self._lengths
        return self.cu_seqlens if same else _boundaries(self.padded_lengths)

    @cached_property
    def row_starts(self) -> NDArray[np.int64]:
        """``[num_sequences + 1]`` int64: where each sequence starts in this rank's rows."""
        # A padded sequence divides by the size of the group: all ranks have as many rows of it.
        starts = self.cu_seqlens_padded.astype(np.int64)
        return starts if self.cp_size == 1 else starts // self.cp_size

    @property
    def num_rows(self) -> int:
        """Rows that each rank of the group holds."""
        return int(self.row_starts[-1])

    @property
    def max_seqlen(self) -> int:
        """The longest padded sequence, in tokens over the whole group."""
        return int(self.padded_lengths.max())

    @cached_property
    def sequence_of_row(self) -> NDArray[np.int64]:
        """``[num_rows]`` int64: which sequence of the pack each local row belongs to."""
        return np.repeat(np.arange(len(self.lengths)), np.diff(self.row_starts))

    @cached_property
    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``[num_runs]`` int64 each: first position and rows of each run of consecutive positions.

        The local rows are these runs one after another: one a sequence without context parallelism,
        else two, chunk ``r`` and chunk ``2 * cp_size - 1 - r``.
        """
        rows = np.diff(self.row_starts)
        if self.cp_size == 1:
            return np.zeros_like(rows), rows
        size = rows // 2
        chunks = np.array([self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank])
        return (size[:, None] * chunks).ravel(), np.repeat(size, 2)

    @cached_property
    def positions(self) -> NDArray[np.int32]:
        """``[num_rows]`` int32: each local row's position in its own sequence, padding included."""
        # A row's position is the row, plus how far its run's first position is from its first row.
        first, num_rows = self.runs
        ends = np.cumsum(num_rows)
        positions = np.repeat((first - (ends - num_rows)).astype(np.int32), num_rows)
        positions += np.arange(len(positions), dtype=np.int32)
        return positions

    @cached_property
    def runs_with_a_next_token(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``[number]`` int64 each: the last row of such runs, and the position of the next token.

        They are the runs after which their sequence goes on, in a row of another rank or elsewhere
        on this one; none without context parallelism.
        """
        if self.cp_size == 1:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        first, num_rows = self.runs
        positions = first + num_rows
        go_on = positions < np.repeat(self._lengths, 2)
        return (np.cumsum(num_rows) - 1)[go_on], positions[go_on]

    @cached_property
    def padding_rows(self) -> NDArray[np.int64]:
        """``[number]`` int64: local rows, ascending, that are padding; at the ends of runs."""
        if self.padded_lengths is self._lengths:
            return np.zeros(0, np.int64)
        return self.rows_past_the_end(0)

    @cached_property
    def rows_without_a_next_token(self) -> NDArray[np.int64]:
        """``[number]`` int64: padding, and the last token of each sequence, ascending."""
        return self.rows_past_the_end(1)

    def rows_past_the_end(self, shift: int) -> NDArray[np.int64]:
        """``[number]`` int64: local rows, ascending, whose sequence has no token ``shift`` on."""
        first, num_rows = self.runs
        lengths = self._lengths if self.cp_size == 1 else np.repeat(self._lengths, 2)
        num_past = num_rows - np.clip(lengths - shift - first, 0, num_rows)
        # They end their runs: each lies behind all rows so far that are not past the end.
        shifts = np.cumsum(num_rows) - np.cumsum(num_past)
        return np.repeat(shifts, num_past) + np.arange(num_past.sum())

    @cached_property
    def is_padding(self) -> NDArray[np.bool_]:
        """``[num_rows]`` bool: whether the local row is padding and not a token."""
        is_padding = np.zeros(self.num_rows, np.bool_)
        is_padding[self.padding_rows] = True
        return is_padding

    @cached_property
    def gather_index(self) -> NDArray[np.int64]:
        """``[padded tokens of the pack]`` int64: token order in the rows of the whole group.

        ``gathered[gather_index]`` is the pack in token order, where ``gathered`` holds the rows of
        CP rank 0, then those of rank 1, and so on.
        """
        rows = np.arange(self.cp_size * self.num_rows)
        if self.cp_size == 1:
            return rows
        starts = self.cu_seqlens_padded[self.sequence_of_row]
        # The inverse of where each rank's rows lie: so the zigzag is drawn in `runs` alone.
        ranks = (replace(self, cp_rank=rank).positions for rank in range(self.cp_size))
        index = np.empty_like(rows)
        index[np.concatenate([starts + positions for positions in ranks])] = rows
        return index


def _boundaries(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    # int32: TransformerEngine's kernels take no other type.
    boundaries = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=boundaries[1:])
    return boundaries
