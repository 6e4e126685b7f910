"""The most rows that a rank may hold of one micro-batch: ``max_seqlen_per_dp_cp_rank``."""

from __future__ import annotations

from typing import Literal

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.padding import PackPadding, longest_that_fits, rows_per_rank
from lightning_dcp.config.parallel import ParallelSizes

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
        padding: How packs are padded; the cap holds them.
        max_length: Tokens of the longest sequence, if the data has said so.

    Raises:
        ValueError: ``"auto"`` without a ``max_length``, or packs that are padded beyond the cap.
    """
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
