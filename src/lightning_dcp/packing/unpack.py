"""From local rows back to jagged tensors in the order of the global batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_dcp.packing.layout import PackLayout


@dataclass(frozen=True)
class UnpackedSamples:
    """Whole sequences of some samples, one after the other.

    Attributes:
        sample_ids: Indices into the global batch, in the order of ``values``.
        lengths: Rows of each sample.
        values: ``[sum of lengths, ...]``.
    """

    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    values: Tensor


def unpack_rows(
    rows_of_ranks: Sequence[Tensor], layout: PackLayout, sample_ids: Sequence[int]
) -> UnpackedSamples:
    """Puts the ``[rows, ...]`` of each CP rank together again, without the padding.

    ``layout`` is that of any of the ranks; ``sample_ids`` are in pack order.

    Raises:
        ValueError: Not one id a sequence, not one tensor a rank, or another number of rows.
    """
    if len(sample_ids) != len(layout.lengths):
        raise ValueError(
            f"The layout has {len(layout.lengths)} sequences, found {len(sample_ids)} sample ids."
        )
    if len(rows_of_ranks) != layout.cp_size:
        raise ValueError(f"The group has {layout.cp_size} ranks, found {len(rows_of_ranks)}.")
    for rank, rows in enumerate(rows_of_ranks):
        if rows.shape[0] != layout.num_rows:
            raise ValueError(
                f"CP rank {rank} gave {rows.shape[0]} rows; the layout has {layout.num_rows}."
            )
    # Padding, at the end of each sequence, is left out by never being asked for.
    starts = zip(layout.cu_seqlens_padded.tolist(), layout.lengths, strict=False)
    index = np.concatenate([layout.gather_index[first : first + n] for first, n in starts])
    gathered = torch.cat(list(rows_of_ranks)) if layout.cp_size > 1 else rows_of_ranks[0]
    values = gathered.index_select(0, torch.from_numpy(index).to(gathered.device))
    return UnpackedSamples(tuple(sample_ids), layout.lengths, values)


def to_jagged(parts: Iterable[UnpackedSamples], num_samples: int) -> Tensor:
    """A jagged NestedTensor of all samples, in the order of the global batch.

    Raises:
        ValueError: A sample that is there twice or not at all; the message names it.
    """
    parts = list(parts)
    sample_ids = np.asarray([sample for part in parts for sample in part.sample_ids], np.int64)
    if num_samples < 1 or (len(sample_ids) and sample_ids.min() < 0):
        raise ValueError(
            f"Needs one sample at least and ids from 0 up, found {num_samples} samples and ids "
            f"{sample_ids[:8].tolist()}."
        )
    counts = np.bincount(sample_ids, minlength=num_samples)
    if len(counts) > num_samples or (counts != 1).any():
        wrong = int(np.flatnonzero((counts != 1) | (np.arange(len(counts)) >= num_samples))[0])
        raise ValueError(
            f"Sample {wrong} is there {counts[wrong]} times among the outputs of "
            f"{num_samples} samples; each must be there once."
        )
    lengths = np.asarray([length for part in parts for length in part.lengths], np.int64)
    starts = np.cumsum(lengths) - lengths
    # Parts come in the order of the plan; ids alone say where a sample belongs.
    # Each is there once, so that there are no ties.
    order = np.argsort(sample_ids)
    offsets = np.concatenate([[0], np.cumsum(lengths[order])])
    index = np.repeat(starts[order] - offsets[:-1], lengths[order]) + np.arange(offsets[-1])
    values = torch.cat([part.values for part in parts])
    return torch.nested.nested_tensor_from_jagged(
        values.index_select(0, torch.from_numpy(index).to(values.device)),
        offsets=torch.from_numpy(offsets).to(values.device),
    )
