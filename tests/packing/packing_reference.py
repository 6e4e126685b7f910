"""Packing by brute force, token by token: what the vectorised code is compared with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_dcp.config.padding import TIGHT, PackPadding
from lightning_dcp.packing import GlobalBatch, MicroBatch, pack_micro_batch

CP_SIZES = (1, 2, 3, 4, 5, 8)


def nested(rows: Sequence[Tensor]) -> Tensor:
    """A contiguous jagged tensor of ``rows``, with an offsets object of its own."""
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def strided(rows: Sequence[Tensor]) -> Tensor:
    """A nested tensor of the other layout, whose making torch warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(list(rows), layout=torch.strided)


def narrowed(rows: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """The same sequences as a view of a dense tensor: each has its start, and gaps lie between."""
    width = max(start + len(row) for start, row in zip(starts, rows, strict=True)) + 1
    dtype = rows[0].dtype
    gap = 1 if dtype.is_floating_point else 77
    dense = torch.full((len(rows), width, *rows[0].shape[1:]), gap, dtype=dtype)
    for line, start, row in zip(dense, starts, rows, strict=True):
        line[start : start + len(row)] = row
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nested.narrow(dense, 1, torch.tensor(starts), lengths, layout=torch.jagged)


def padded(length: int, cp_size: int, tp_size: int) -> int:
    """``length`` counted up until every rank can hold two equal chunks (one where CP is 1)."""
    parts = tp_size * (2 * cp_size if cp_size > 1 else 1)
    while length % parts:
        length += 1
    return length


def padded_lengths(
    lengths: Sequence[int], cp_size: int, tp_size: int, padding: PackPadding = TIGHT
) -> list[int]:
    """All of them, the last one counted up until the pack is full."""
    parts = padded(1, cp_size, tp_size)
    whole = [padded(length, cp_size, tp_size) for length in lengths]
    while padding.fp8 and any(length % 16 for length in whole):
        whole = [length + parts * (length % 16 > 0) for length in whole]

    def is_full() -> bool:
        tokens, rows = sum(whole), sum(whole) // cp_size
        if padding.pad_to_length is not None:
            return rows == padding.pad_to_length
        return not (
            rows % (padding.pad_to_length_bucket or 1) or (padding.fp8 and tokens % (128 * parts))
        )

    while not is_full():
        whole[-1] += parts
    return whole


def rows_of_rank(
    lengths: Sequence[int],
    cp_size: int,
    cp_rank: int,
    tp_size: int,
    padding: PackPadding = TIGHT,
) -> list[tuple[int, int]]:
    """For each row of a rank: the sequence of the pack, and the position in it."""
    rows: list[tuple[int, int]] = []
    for sequence, length in enumerate(padded_lengths(lengths, cp_size, tp_size, padding)):
        positions = list(range(length))
        if cp_size > 1:
            size = len(positions) // (2 * cp_size)
            chunks = [positions[i : i + size] for i in range(0, len(positions), size)]
            positions = chunks[cp_rank] + chunks[2 * cp_size - 1 - cp_rank]
        rows += [(sequence, position) for position in positions]
    return rows


@dataclass(frozen=True)
class Case:
    """Some samples of a batch, and the CP group that packs them."""

    lengths: tuple[int, ...]
    sample_ids: tuple[int, ...]
    cp_size: int
    tp_size: int
    starts: tuple[int, ...] | None
    padding: PackPadding = TIGHT

    def tokens(self, offset: int = 0) -> list[Tensor]:
        """Token ids that say which sample and position they are."""
        return [100 * i + torch.arange(n) + 1 + offset for i, n in enumerate(self.lengths)]

    def jagged(self, rows: Sequence[Tensor], *, contiguous: bool = False) -> Tensor:
        """``rows`` as the case stores them."""
        if self.starts is None or contiguous:
            return nested(rows)
        return narrowed(rows, self.starts)

    def rows(self, cp_rank: int) -> list[tuple[int, int]]:
        """For each row of a rank: the sample, and the position in it."""
        lengths = [self.lengths[sample] for sample in self.sample_ids]
        rows = rows_of_rank(lengths, self.cp_size, cp_rank, self.tp_size, self.padding)
        return [(self.sample_ids[sequence], position) for sequence, position in rows]

    def pack(self, batch: GlobalBatch) -> list[MicroBatch]:
        """The micro-batches of all ranks of the group."""
        return [
            pack_micro_batch(
                batch,
                self.sample_ids,
                cp_size=self.cp_size,
                cp_rank=cp_rank,
                tp_size=self.tp_size,
                padding=self.padding,
            )
            for cp_rank in range(self.cp_size)
        ]


@st.composite
def cases(draw: st.DrawFn, max_length: int = 40) -> Case:
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=6))
    order = draw(st.permutations(range(len(lengths))))
    count = draw(st.integers(1, len(lengths)))
    starts = draw(
        st.none() | st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))
    )
    cp_size, tp_size = draw(st.sampled_from(CP_SIZES)), draw(st.sampled_from((1, 2)))
    # Enough rows for any of these sequences, and a number that any group can cut.
    padding = draw(
        st.just(TIGHT)
        | st.integers(1, 40).map(lambda bucket: PackPadding(pad_to_length_bucket=bucket))
        | st.just(PackPadding(pad_to_length=4 * 6 * (max_length + 32)))
        | st.just(PackPadding(fp8=True))
    )
    return Case(
        lengths=tuple(lengths),
        sample_ids=tuple(order[:count]),
        cp_size=cp_size,
        tp_size=tp_size,
        starts=None if starts is None else tuple(starts),
        padding=padding,
    )
