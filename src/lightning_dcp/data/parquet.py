"""ParquetDataModule: samples with any keys beside their tokens, such as rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, override

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dcp.config.requirements import PYARROW_AVAILABLE
from lightning_dcp.data.base import GlobalBatchDataModule
from lightning_dcp.data.documents import find_files


class ParquetDataModule(GlobalBatchDataModule):
    """Samples from parquet files as jagged global batches, each column a key of the batch.

    A row is a sample. A column of lists holds a value a token (``[length, ...]`` where the lists
    hold fixed lists), one of numbers a value a sample. What
    :class:`~lightning_dcp.PredictionWriter` wrote can be read back, with its log-probabilities as
    those of the old policy: ``columns={"log_probs": "old_log_probs"}``. Columns are held in memory.

    Args:
        data: Paths or globs, ``**`` for any depth of folders.
        columns: Key of the batch by column, to rename some; the others keep their names.
        leave_out: Columns that are not read.
        global_batch_size: Samples in one optimizer step, over all ranks.
        shuffle: Whether each epoch has another order.
        seed: Seed of the order.
        num_workers: Processes that make batches, on each rank; 0: the training process does.

    Attributes:
        max_length: Tokens of the longest sample; None before ``setup``.

    Raises:
        ModuleNotFoundError: There is no pyarrow.
        ValueError: No file, no ``input_ids``, a column that is not there or lacks a value, or files
            whose columns differ.
    """

    def __init__(
        self,
        data: Sequence[str] | str,
        *,
        columns: Mapping[str, str] | None = None,
        leave_out: Sequence[str] = (),
        global_batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 2,
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size,
            max_length=None,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
        )
        if not PYARROW_AVAILABLE:
            raise ModuleNotFoundError(f"ParquetDataModule reads parquet: {PYARROW_AVAILABLE}")
        self._patterns = [data] if isinstance(data, str) else list(data)
        self._names = dict(columns or {})
        self._leave_out = tuple(leave_out)
        self._num_samples = 0

    @override
    def setup(self, stage: str | None = None) -> None:
        # Lightning sets up once for each stage, and the files are read once.
        if self.train_set is None:
            files = find_files(self._patterns, option="data")
            samples = ParquetSamples(files, names=self._names, leave_out=self._leave_out)
            self.max_length = int(samples.lengths.max(initial=0))
            self.train_set, self._num_samples = samples, len(samples)
        if stage in (None, "fit") and self._num_samples < self.global_batch_size:
            raise ValueError(
                f"data={self._patterns} has {self._num_samples} samples, fewer than "
                f"global_batch_size={self.global_batch_size}: there is no full batch to train on."
            )


class ParquetSamples(Dataset[dict[str, Tensor]]):
    """The rows of parquet files; ``names`` has a sample's key by column where it is another."""

    def __init__(
        self, files: Sequence[str], *, names: Mapping[str, str], leave_out: Sequence[str]
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # All in memory: a sampler picks rows from anywhere, and parquet reads by groups of them.
        tables = [pq.read_table(file) for file in files]
        for file, table in zip(files, tables, strict=True):
            # pyarrow would fill a column that one file lacks with nulls.
            if table.schema != tables[0].schema:
                raise ValueError(
                    f"{file} has the columns {table.schema.names} and {files[0]} "
                    f"{tables[0].schema.names}, or other types: read them one by one."
                )
        table = pa.concat_tables(tables)
        for column in (*names, *leave_out):
            if column not in table.column_names:
                raise ValueError(f"There is no column '{column}', only {table.column_names}.")
        kept = [column for column in table.column_names if column not in leave_out]
        self.keys = [names.get(column, column) for column in kept]
        if "input_ids" not in self.keys or len(set(self.keys)) < len(self.keys):
            raise ValueError(
                f"The columns become the keys {self.keys}; there must be 'input_ids', and none "
                "twice. Name columns in columns={'column': 'key'} or leave_out."
            )
        self._columns = [_Column(table[column], column) for column in kept]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, ``[num_samples]``."""
        return self._columns[self.keys.index("input_ids")].lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: one[index] for key, one in zip(self.keys, self._columns, strict=True)}


class _Column:
    """One column as flat values and where each row's start."""

    def __init__(self, chunked: Any, name: str) -> None:
        import pyarrow as pa

        parts, lengths, shape = [], [], None
        for chunk in chunked.chunks:
            if chunk.null_count:
                raise ValueError(f"Column '{name}' lacks {chunk.null_count} values.")
            is_list = pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)
            ones = np.ones(len(chunk), np.int64)
            lengths.append(chunk.value_lengths().to_numpy() if is_list else ones)
            # flatten() heeds where a sliced chunk begins and ends, .values would not.
            values, shape = (chunk.flatten() if is_list else chunk), []
            while pa.types.is_fixed_size_list(values.type):
                shape.append(values.type.list_size)
                values = values.flatten()
            if values.null_count or pa.types.is_nested(values.type):
                raise ValueError(
                    f"Column '{name}' of type {chunk.type} lacks values, or holds lists of lists "
                    "whose lengths are not fixed."
                )
            # Arrow packs bools in bits, which NumPy cannot share.
            parts.append(values.to_numpy(zero_copy_only=False).reshape(-1, *shape))
            # The same in all chunks, which share a type.
            self._is_list = is_list
        # A copy: Arrow's memory is read-only, which torch warns of. One flat tensor a column: a
        # sample's rows are a view of it.
        self._values = torch.from_numpy(np.concatenate(parts).copy())
        self.lengths = np.concatenate(lengths).astype(np.int64)
        self._ends = np.cumsum(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        end = int(self._ends[index])
        rows = self._values[end - int(self.lengths[index]) : end]
        return rows if self._is_list else rows[0]
