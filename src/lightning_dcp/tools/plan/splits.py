"""Static splits of a pool in data and context parallelism."""

from __future__ import annotations

from lightning_dcp.config.padding import TIGHT, PackPadding, longest_that_fits
from lightning_dcp.config.parallel import cp_sizes_of_pool


def holding_sizes(
    longest: int, *, num_ranks: int, cap: int, tp_size: int, padding: PackPadding = TIGHT
) -> list[int]:
    """CP sizes of a static run on which the longest sample keeps the cap, ascending.

    Args:
        longest: Tokens of the longest sample.
        num_ranks: Ranks of the DPxCP pool, which the sizes divide.
        cap: The most rows of a rank.
        tp_size: Tensor-parallel size.
        padding: How packs are padded.
    """
    return [
        size
        for size in cp_sizes_of_pool(num_ranks)
        if num_ranks % size == 0 and longest <= longest_that_fits(cap, size, tp_size, padding)
    ]
