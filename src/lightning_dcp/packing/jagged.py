"""Reading jagged NestedTensors: the one place that knows how lengths are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    """A jagged tensor taken apart, with its boundaries on the host.

    Attributes:
        values: ``[stored rows, ...]``, on the tensor's own device; rows that belong to no sequence
            may lie between the others.
        starts: ``[num_samples]`` int64: where each sequence starts in ``values``.
        lengths: ``[num_samples]`` int64: its number of rows.
    """

    values: Tensor
    starts: np.ndarray
    lengths: np.ndarray

    def token_rows(self) -> Tensor:
        """``[sum of lengths, ...]``: the rows of all samples, without what lies between them."""
        firsts = np.cumsum(self.lengths) - self.lengths
        if np.array_equal(self.starts - self.starts[0], firsts):
            first = int(self.starts[0])
            # Without gaps, as nearly always: a view.
            return self.values[first : first + int(self.lengths.sum())]
        index = np.repeat(self.starts - firsts, self.lengths) + np.arange(self.lengths.sum())
        return self.values.index_select(0, torch.from_numpy(index).to(self.values.device))

    def check_inside(self, name: str) -> None:
        """Raises a ValueError if a sequence reaches beyond the values, which torch never checks."""
        outside = (self.lengths < 0) | (self.starts + self.lengths > len(self.values))
        if outside.any():
            sample = int(outside.argmax())
            raise ValueError(
                f"'{name}' has {len(self.values)} rows of values, but by its offsets sample "
                f"{sample} is rows {self.starts[sample]} to "
                f"{self.starts[sample] + self.lengths[sample]}: make values and offsets together."
            )

    def first_where(self, bad: Tensor) -> tuple[int, int] | None:
        """Sample and position in it of the first row for which ``bad`` holds, for errors.

        ``bad`` is ``[stored rows, ...]`` bool, on the host. Rows between samples do not count.
        """
        rows = bad.flatten(1).any(1) if bad.dim() > 1 else bad
        for sample, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            where = rows[start : start + length].nonzero()
            if len(where):
                return sample, int(where[0, 0])
        return None


def is_jagged(value: Any) -> bool:
    """Whether ``value`` is a NestedTensor with the jagged layout."""
    return isinstance(value, Tensor) and value.is_nested and value.layout == torch.jagged


def read_jagged(tensor: Any, name: str = "tensor") -> Jagged:
    """Takes a jagged NestedTensor ``[num_samples, length*, ...]`` apart.

    A tensor that ``narrow`` made is not contiguous: it has lengths of its own, and the differences
    of its offsets are not its lengths. Both kinds are read here. On a device other than the CPU
    the boundaries are copied to the host, which waits for the device: once per batch, not per key.

    Raises:
        TypeError: Not a jagged NestedTensor, or ragged in another dimension than the first.
        ValueError: Its values do not have the rows that its offsets name.
    """
    if not is_jagged(tensor):
        found = (
            f"a dense tensor of shape {tuple(tensor.shape)}"
            if isinstance(tensor, Tensor) and not tensor.is_nested
            else f"a {type(tensor).__name__}"
        )
        raise TypeError(
            f"{name} must be a jagged NestedTensor [num_samples, length*, ...], found {found}. "
            "Build it with torch.nested.nested_tensor(list_of_tensors, layout=torch.jagged)."
        )
    # torch has no public name for it.
    ragged_dim: int = getattr(tensor, "_ragged_idx", 1)
    if ragged_dim != 1:
        raise TypeError(f"{name} must be ragged in dimension 1, found dimension {ragged_dim}.")
    offsets = _to_host(tensor.offsets())
    lengths = tensor.lengths()
    jagged = Jagged(
        values=tensor.values(),
        starts=offsets[:-1],
        lengths=np.diff(offsets) if lengths is None else _to_host(lengths),
    )
    jagged.check_inside(name)
    return jagged


def _to_host(boundaries: Tensor) -> np.ndarray:
    # Offsets may be int32; all that is computed from them here is int64.
    return boundaries.detach().to("cpu", torch.int64).numpy()
