"""Samples as slices of a memory-mapped file of tokens."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset


class TokenRanges(Dataset[dict[str, Tensor]]):
    """Each sample is a range of a file of tokens: ``{"input_ids": int64, [length]}``.

    Args:
        tokens_file: Tokens as raw ``dtype``.
        dtype: Type of the tokens in the file.
        starts: Index of the first token of each sample, ``[num_samples]``.
        ends: Index after its last token, ``[num_samples]``.
    """

    def __init__(
        self,
        tokens_file: Path,
        dtype: np.dtype,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        self._tokens_file = tokens_file
        self._dtype = dtype
        self._starts = starts
        self._ends = ends
        self._tokens: NDArray[Any] | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each sample in tokens, ``[num_samples]``."""
        return self._ends - self._starts

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._tokens is None:
            self._tokens = np.memmap(self._tokens_file, dtype=self._dtype, mode="r")
        tokens = self._tokens[self._starts[index] : self._ends[index]]
        return {"input_ids": torch.from_numpy(np.array(tokens, dtype=np.int64))}

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps the file itself; pickling a memory map would send all of its tokens.
        return self.__dict__ | {"_tokens": None}


class WithSampleIds(Dataset[dict[str, Any]]):
    """The samples of another dataset, each with its index there as ``sample_id`` if it has none.

    Args:
        dataset: Samples that are dicts.
    """

    def __init__(self, dataset: Dataset[dict[str, Any]]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        assert isinstance(self._dataset, Sized)
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sample_id": index, **self._dataset[index]}
