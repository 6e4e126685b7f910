"""Stores what ``predict`` gives, batch by batch, in a parquet file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, override

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lightning_dcp.config.requirements import PYARROW_AVAILABLE
from lightning_dcp.packing import is_jagged, read_jagged


class PredictionWriter(BasePredictionWriter):
    """Writes one row a sample: ``sample_id``, ``input_ids`` and each output as a list.

    Rank 0 writes a row group after every batch, into a file beside the final one that takes its
    name at the end: there is never half a file under ``path``, and an old one is replaced. Give
    ``return_predictions=False`` to ``trainer.predict``, so that nothing is kept in memory.

    A sample's id is the batch's ``sample_id`` (``[num_samples]``, integers) or, without one, its
    index in the data set, where Lightning knows it.

    Args:
        path: The file. Its folder is made.
        compression: A codec of parquet: ``zstd``, ``snappy``, ``gzip`` or ``none``.

    Raises:
        ModuleNotFoundError: There is no pyarrow.
        ValueError: A sample that comes twice, or a batch without ids.
    """

    def __init__(self, path: str = "predictions.parquet", compression: str = "zstd") -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)
        self._unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        self.compression = compression
        self._writer: Any = None
        self._seen: set[int] = set()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "predict" and not PYARROW_AVAILABLE:
            raise ModuleNotFoundError(f"PredictionWriter writes parquet: {PYARROW_AVAILABLE}")

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_dataloaders = trainer.predict_loop.num_dataloaders
        if num_dataloaders > 1:
            raise ValueError(
                f"PredictionWriter writes one data set, found {num_dataloaders} predict "
                "dataloaders. Run predict once for each, with a path of its own."
            )
        self._seen.clear()
        self._close()

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        # On every rank: a duplicate is then an error on all of them.
        ids = self._new_ids(batch, batch_indices, batch_idx)
        if trainer.is_global_zero:
            self._write({"input_ids": batch["input_ids"], **prediction, "sample_id": ids})

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._writer is not None:
            self._close()
            self._unfinished.replace(self.path)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # What was written stays and can be read, under a name that says that it is unfinished.
        self._close()

    def _new_ids(
        self, batch: Mapping[str, Any], batch_indices: Sequence[int] | None, batch_idx: int
    ) -> Tensor:
        """The ids of a batch, none of which was there before."""
        num_samples = len(read_jagged(batch["input_ids"], "input_ids").lengths)
        ids = batch.get("sample_id")
        # Lightning gives no indices where it cannot tell them from the sampler.
        ids = torch.as_tensor(batch_indices or [] if ids is None else ids)
        if ids.shape != (num_samples,) or ids.is_floating_point():
            raise ValueError(
                f"Batch {batch_idx} has {num_samples} samples and ids of shape {list(ids.shape)}, "
                f"{ids.dtype}. Give one integer a sample as 'sample_id'."
            )
        for sample in ids.tolist():
            if sample in self._seen:
                raise ValueError(
                    f"Sample {sample} comes a second time, in batch {batch_idx}; each must be "
                    "there once. Leave sampling with replacement and repeated samples out."
                )
            self._seen.add(sample)
        return ids

    def _write(self, columns: dict[str, Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = ["sample_id", *(name for name in columns if name != "sample_id")]
        table = pa.table({name: _column(columns[name], name) for name in names})
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                self._unfinished, table.schema, compression=self.compression
            )
        self._writer.write_table(table)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _column(value: Any, name: str) -> Any:
    """A column with one entry a sample: a list for a jagged value, of fixed lists for more."""
    import pyarrow as pa

    if not is_jagged(value):
        return _array(value, name)
    offsets = np.concatenate(([0], np.cumsum(read_jagged(value, name).lengths)))
    # Arrow's plain lists count in int32.
    if offsets[-1] >= 2**31:
        raise ValueError(
            f"'{name}' has {offsets[-1]} tokens in one batch; parquet lists end at 2**31."
        )
    # Sample by sample: rows that lie between samples belong to none.
    rows = torch.cat(value.unbind())
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), _array(rows, name))


def _array(rows: Any, name: str) -> Any:
    """A tensor [rows, ...] as an array of numbers, or of fixed lists of them."""
    import pyarrow as pa

    if not isinstance(rows, Tensor):
        raise TypeError(f"'{name}' of a prediction must be a tensor, found {type(rows).__name__}.")
    rows = rows.detach().cpu()
    # NumPy has no bfloat16.
    if rows.dtype == torch.bfloat16:
        rows = rows.float()
    array = pa.array(rows.reshape(-1).numpy())
    # [rows, ...] from the innermost dimension outwards.
    for size in reversed(rows.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
