"""Samples to a global batch: jagged tensors that share their offsets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.packing import ROUTES

_INTEGER_KEYS = ("input_ids", "labels")


def collate_jagged(
    samples: Sequence[Mapping[str, Any]], *, may_lack_last: Collection[str] = (ROUTES,)
) -> dict[str, Tensor]:
    """Puts samples of different lengths together to one batch, without padding.

    Args:
        samples: One mapping a sample, all with the same keys. ``input_ids`` is required: integers,
            ``[length]``. A tensor of one dimension or more is per token: ``[length, ...]``, with
            the length of the sample's ``input_ids``. A number or a tensor without dimensions is
            per sample.
        may_lack_last: Per-token keys that may have one row less than a sample has tokens.

    Returns:
        Per-token keys as jagged NestedTensors, contiguous, ``[num_samples, length, ...]``, which
        all share one offsets tensor but where last rows are lacking; per-sample keys as dense
        tensors, ``[num_samples]``. ``input_ids`` and ``labels`` are int64; the others keep their
        dtype.

    Raises:
        ValueError: No samples, an empty one, different keys, or a per-token value whose length is
            not that of ``input_ids``; the message names the sample.
        TypeError: ``input_ids`` or ``labels`` that are no integers.
    """
    if not samples:
        raise ValueError("an empty list of samples cannot be collated: give one sample or more")
    # Every sample is looked at: torch.cat's own error would name no sample and no key.
    tensors = [
        {key: _as_tensor(index, key, value) for key, value in sample.items()}
        for index, sample in enumerate(samples)
    ]
    lengths = [
        _checked_length(index, sample, tensors[0], may_lack_last)
        for index, sample in enumerate(tensors)
    ]
    # One tensor for all keys: operations on several NestedTensors want the very same offsets.
    offsets = _offsets(lengths)
    batch = {}
    for key, first in tensors[0].items():
        values = [sample[key] for sample in tensors]
        if first.dim() == 0:
            batch[key] = torch.stack(values)
        else:
            rows = [len(value) for value in values]
            own = offsets if rows == lengths else _offsets(rows)
            batch[key] = torch.nested.nested_tensor_from_jagged(torch.cat(values), own)
    return batch


def _offsets(lengths: list[int]) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths), 0, out=offsets[1:])
    return offsets


def _as_tensor(index: int, key: str, value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    if key in _INTEGER_KEYS:
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError(f"sample {index}: {key} must be integers, found {tensor.dtype}")
        # Files often hold smaller integers; as indices torch wants int64.
        tensor = tensor.to(torch.int64)
    return tensor


def _checked_length(
    index: int,
    sample: dict[str, Tensor],
    first: dict[str, Tensor],
    may_lack_last: Collection[str],
) -> int:
    """The length of a sample, after every key was held against it and against the first sample."""
    if "input_ids" not in sample:
        raise ValueError(f"sample {index} has no input_ids, only {sorted(sample)}")
    if sample.keys() != first.keys():
        raise ValueError(f"sample {index} has the keys {sorted(sample)}, sample 0 {sorted(first)}")
    if sample["input_ids"].dim() != 1:
        shape = list(sample["input_ids"].shape)
        raise ValueError(f"sample {index}: input_ids has the shape {shape}, expected [length]")
    length = len(sample["input_ids"])
    if length == 0:
        raise ValueError(f"sample {index} is empty: drop samples without tokens from the dataset")
    for key, value in sample.items():
        if value.shape[1:] != first[key].shape[1:] or value.dim() != first[key].dim():
            raise ValueError(
                f"sample {index}: {key} has the shape {list(value.shape)}, in sample 0 it has"
                f" {list(first[key].shape)}: only the first dimension may differ"
            )
        # Samplers do not run a sample's last token, and have no routes for it.
        allowed = {length, length - 1} if key in may_lack_last else {length}
        if value.dim() and len(value) not in allowed:
            raise ValueError(
                f"sample {index}: {key} has {len(value)} rows for {length} input_ids: a per-token"
                " value needs one row a token, a per-sample value must have no dimensions"
            )
    return length
