"""How many rows sequences and packs take, and may take: planning and packing share the rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.parallel import ParallelSizes

# FP8 kernels work on blocks: tokens of a sequence, and alignments in the whole pack.
_FP8_TOKENS, _FP8_BLOCKS = 16, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPadding:
    """Padding beyond what the cut of each sequence needs, so that few shapes of packs occur.

    Without any option a pack has the rows of its padded sequences. Otherwise further rows at its
    end, padding of its last sequence, fill it up: to a multiple of the bucket, of the tensor-
    parallel size and, under context parallelism, of 2 (so that tokens of the group are multiples of
    twice the CP size), or to a fixed number of rows. All rows are those of one rank.

    Attributes:
        pad_to_length: Rows of every pack; no pack may need more.
        pad_to_length_bucket: Number that the rows of a pack are rounded up to a multiple of.
        fp8: Pad for FP8 kernels: tokens of each sequence to a multiple of 16, those of the whole
            pack to a multiple of 128 times the alignment that a sequence has without FP8.

    Raises:
        TypeError: A length that is no int, or ``fp8`` that is no bool.
        ValueError: A length below 1, or both lengths at once.
    """

    pad_to_length: int | None = None
    pad_to_length_bucket: int | None = None
    fp8: bool = False

    def __post_init__(self) -> None:
        for name in ("pad_to_length", "pad_to_length_bucket"):
            value = getattr(self, name)
            if value is not None:
                check_at_least(name, value)
        if not isinstance(self.fp8, bool):
            raise TypeError(f"fp8={self.fp8!r} is a {type(self.fp8).__name__}; give True or False")
        if self.pad_to_length is not None and self.pad_to_length_bucket is not None:
            raise ValueError(
                f"pad_to_length={self.pad_to_length} pads every pack to one length, which leaves "
                f"nothing for pad_to_length_bucket={self.pad_to_length_bucket}: leave one out"
            )

    @property
    def is_tight(self) -> bool:
        """Whether a pack has the rows of its sequences and no more."""
        return self.pad_to_length is None and self.pad_to_length_bucket is None and not self.fp8

    def sequence_alignment(self, cp_size: int, tp_size: int = 1) -> int:
        """The number that the padded tokens of each sequence are a multiple of."""
        align = row_alignment(cp_size, tp_size)
        return math.lcm(align, _FP8_TOKENS) if self.fp8 else align

    def pack_alignment(self, cp_size: int, tp_size: int = 1) -> int:
        """The number that the rows which a rank holds of a pack are a multiple of."""
        # The same for every CP size above 1: the zigzag's factor of cp_size cancels.
        rows = row_alignment(cp_size, tp_size) // cp_size
        # The rows of a sequence divide it, with FP8 too: 16 divides 128.
        return math.lcm(_FP8_BLOCKS * rows if self.fp8 else rows, self.pad_to_length_bucket or 1)

    def pack_rows(self, rows: int, cp_size: int, tp_size: int = 1) -> int:
        """The rows that a rank holds of a pack whose padded sequences take ``rows`` of them.

        Raises:
            ValueError: The pack needs more than ``pad_to_length``.
        """
        if self.is_tight:
            return rows
        if self.pad_to_length is None:
            align = self.pack_alignment(cp_size, tp_size)
            return -(-rows // align) * align
        if rows > self.pad_to_length:
            raise ValueError(
                f"the sequences of a pack take {rows} rows a rank, over pad_to_length="
                f"{self.pad_to_length}"
            )
        return self.pad_to_length

    def usable_rows(self, cap: int, cp_size: int, tp_size: int = 1) -> int:
        """The most rows that the sequences of a pack may take so that the pack keeps ``cap``."""
        if self.is_tight:
            return cap
        if self.pad_to_length is not None:
            # A multiple of the alignment: check_cap refuses others.
            return self.pad_to_length
        align = self.pack_alignment(cp_size, tp_size)
        return cap // align * align

    def check_cap(self, cap: int, cp_size: int, tp_size: int = 1) -> None:
        """Refuses options with which packs on ``cp_size`` ranks cannot keep the cap.

        Raises:
            ValueError: A length or bucket larger than the cap, a bucket that is so once everything
                else divides it, or a ``pad_to_length`` that the ranks cannot cut.
        """
        # First what the user gave: the alignment below is a number that nobody wrote.
        for name in ("pad_to_length", "pad_to_length_bucket"):
            value = getattr(self, name)
            if value is not None and value > cap:
                raise ValueError(
                    f"{name}={value} is larger than max_seqlen_per_dp_cp_rank={cap}, the most rows "
                    f"that a rank holds, padding included: lower {name} or raise the cap"
                )
        align = self.pack_alignment(cp_size, tp_size)
        why = f"tp_size={tp_size}, CP sizes up to {cp_size}{' and FP8' if self.fp8 else ''}"
        if self.pad_to_length is not None and self.pad_to_length % align:
            raise ValueError(
                f"pad_to_length={self.pad_to_length} is no multiple of {align}, as {why} need: "
                f"use {self.pad_to_length // align * align or align}"
            )
        if not self.is_tight and align > cap:
            name = f"pad_to_length_bucket={self.pad_to_length_bucket}"
            raise ValueError(
                f"{'fp8' if self.pad_to_length_bucket is None else name} with {why} pads the rows "
                f"of a pack to a multiple of {align}, over max_seqlen_per_dp_cp_rank={cap}: raise "
                f"max_seqlen_per_dp_cp_rank to {align} or more, or use a smaller bucket"
            )


TIGHT = PackPadding()
"""No padding beyond that of each sequence."""


def row_alignment(cp_size: int, tp_size: int = 1) -> int:
    """The number of tokens that the padded length of every sequence is a multiple of.

    A CP group cuts each sequence in ``2 * cp_size`` chunks (zigzag), and sequence parallelism cuts
    the rows of a rank in ``tp_size`` parts. :meth:`PackPadding.sequence_alignment` adds FP8.
    """
    return tp_size * (2 * cp_size if cp_size > 1 else 1)


def padded_length[T: (int, NDArray[np.int64])](
    length: T, cp_size: int, tp_size: int = 1, padding: PackPadding = TIGHT
) -> T:
    """``length`` rounded up to the alignment of a sequence: tokens of the whole group."""
    align = padding.sequence_alignment(cp_size, tp_size)
    # Rounds up without floats, ints and arrays alike.
    return -(-length // align) * align


def rows_per_rank[T: (int, NDArray[np.int64])](
    length: T, cp_size: int, tp_size: int = 1, padding: PackPadding = TIGHT
) -> T:
    """The rows that each rank of the CP group holds of a sequence of ``length`` tokens."""
    return padded_length(length, cp_size, tp_size, padding) // cp_size


def longest_that_fits(
    cap: int, cp_size: int, tp_size: int = 1, padding: PackPadding = TIGHT
) -> int:
    """The longest sequence, in tokens, of which a rank of a CP group holds at most ``cap`` rows."""
    # Down to whole alignments: the rows of a sequence come in these.
    rows = padding.sequence_alignment(cp_size, tp_size) // cp_size
    return padding.usable_rows(cap, cp_size, tp_size) // rows * rows * cp_size


Cap = int | Literal["auto"]


def check_cap(cap: object) -> Cap:
    """A checked ``max_seqlen_per_dp_cp_rank``.

    Raises:
        ValueError: It is missing or below 1.
        TypeError: It is neither an int nor ``"auto"``.
    """
    if cap is None:
        raise ValueError(
            "DynamicCPStrategy needs max_seqlen_per_dp_cp_rank: the most rows (tokens, padding "
            "included) that a rank may hold of one micro-batch. The tokens a GPU held before, "
            "packed-sequence budget / context_parallel_size, keep memory as it was."
        )
    if cap == "auto":
        return "auto"
    if not isinstance(cap, int) or isinstance(cap, bool):
        raise TypeError(f"max_seqlen_per_dp_cp_rank must be an int or 'auto', found {cap!r}.")
    return check_at_least("max_seqlen_per_dp_cp_rank", cap)


def resolve_cap(
    cap: Cap, sizes: ParallelSizes, padding: PackPadding, *, max_length: object = None
) -> int:
    """The cap as a number: ``"auto"`` is the smallest that lets ``max_length`` fit the whole pool.

    Args:
        cap: From :func:`check_cap`.
        sizes: The parallel sizes of the run.
        padding: The cap holds it.
        max_length: Tokens of the longest sequence, if the data has said so.

    Raises:
        ValueError: ``"auto"`` without a ``max_length``, or packs that are padded beyond the cap.
    """
    # The whole pool is the largest CP group, and the one that the longest sequence may need.
    pool, tp_size = sizes.dp_cp_size, sizes.tensor_model_parallel_size
    if cap == "auto":
        if not isinstance(max_length, int):
            raise ValueError(
                "max_seqlen_per_dp_cp_rank='auto' follows from the DataModule's max_length, and "
                "there is none. Give the number: Trainer(strategy=DynamicCPStrategy("
                "max_seqlen_per_dp_cp_rank=4096))."
            )
        cap = padding.pack_rows(rows_per_rank(max_length, pool, tp_size, padding), pool, tp_size)
        assert longest_that_fits(cap, pool, tp_size, padding) >= max_length
    padding.check_cap(cap, pool, tp_size)
    return cap
