"""Lengths and units as users give them, turned into Python ints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def as_lengths(lengths: Sequence[int] | NDArray[np.integer]) -> tuple[int, ...]:
    """The lengths as Python ints.

    Raises:
        TypeError: ``lengths`` is no sequence or one-dimensional array of integers.
    """
    if isinstance(lengths, np.ndarray):
        if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
            raise TypeError(
                f"lengths is an array of shape {lengths.shape} and type {lengths.dtype}; give one "
                "dimension of integers, the tokens of each sample"
            )
        return tuple(lengths.tolist())
    if isinstance(lengths, str | bytes) or not isinstance(lengths, Sequence):
        raise TypeError(
            f"lengths is a {type(lengths).__name__}; give a list, tuple or NumPy array of ints"
        )
    # Type by type: a global batch has thousands of lengths. A bool is an int to Python.
    for kind in set(map(type, lengths)):
        if issubclass(kind, bool) or not issubclass(kind, int | np.integer):
            sample = next(i for i, length in enumerate(lengths) if type(length) is kind)
            raise TypeError(
                f"sample {sample} has length {lengths[sample]!r} of type {kind.__name__}; lengths "
                "are ints, the tokens of each sample"
            )
    return tuple(map(int, lengths))


def as_units(
    keep_together: Sequence[int] | NDArray[np.integer] | None, num_samples: int
) -> tuple[tuple[int, ...], ...] | None:
    """The sample ids of each unit, by first sample.

    Args:
        keep_together: A unit id for each sample; ``None`` for none.
        num_samples: Samples of the global batch.

    Raises:
        TypeError: The ids are no ints.
        ValueError: Not one id a sample.
    """
    if keep_together is None:
        return None
    ids = np.asarray(keep_together)
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(
            f"keep_together holds {ids.dtype}; give an int for each sample, equal for samples that "
            "must stay together"
        )
    if ids.shape != (num_samples,):
        raise ValueError(
            f"keep_together has shape {ids.shape} for {num_samples} samples; give one id a sample"
        )
    units: dict[int, list[int]] = {}
    # Insertion order: units by first sample, and samples ascend in each, on every rank alike.
    for sample, unit in enumerate(ids.tolist()):
        units.setdefault(unit, []).append(sample)
    return tuple(map(tuple, units.values()))
