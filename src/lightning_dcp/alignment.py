"""How many rows a sequence takes: the one padding rule that planning and packing share."""

from __future__ import annotations


def row_alignment(cp_size: int, tp_size: int = 1) -> int:
    """The number that the padded length of every sequence of a micro-batch is a multiple of.

    A CP group cuts each sequence in ``2 * cp_size`` chunks (zigzag), and sequence parallelism cuts
    the rows of a rank in ``tp_size`` parts.

    Args:
        cp_size: Ranks of the micro-batch's CP group.
        tp_size: Tensor-parallel size.

    Returns:
        The alignment in tokens.
    """
    return tp_size * (2 * cp_size if cp_size > 1 else 1)


def padded_length(length: int, cp_size: int, tp_size: int = 1) -> int:
    """``length`` rounded up to a multiple of :func:`row_alignment`: tokens of the whole group."""
    align = row_alignment(cp_size, tp_size)
    return -(-length // align) * align


def rows_per_rank(length: int, cp_size: int, tp_size: int = 1) -> int:
    """The rows that each rank of the CP group holds of a sequence of ``length`` tokens."""
    return padded_length(length, cp_size, tp_size) // cp_size


def longest_that_fits(cap: int, cp_size: int, tp_size: int = 1) -> int:
    """The longest sequence, in tokens, of which a rank of a CP group holds at most ``cap`` rows."""
    rows = row_alignment(cp_size, tp_size) // cp_size
    return cap // rows * rows * cp_size
