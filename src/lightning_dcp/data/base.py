"""The base of the DataModules: the same global batches on every rank, run after run."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal, get_args, override

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_dcp.config.checks import check_at_least, check_one_of
from lightning_dcp.data.collate import collate_jagged

PredictSplit = Literal["train", "val"]
"""Whose samples ``predict`` runs on."""


class GlobalBatchDataModule(LightningDataModule):
    """Loads global batches of samples for :func:`collate_jagged`, the same ones on every rank.

    A subclass puts its samples in ``train_set`` and ``val_set`` when it is set up.

    Args:
        global_batch_size: Samples in one optimizer step, over all ranks.
        max_length: Tokens of the longest sample, if that is known; the strategy's
            ``max_seqlen_per_dp_cp_rank="auto"`` follows from it.
        min_length: Tokens of the shortest sample.
        shuffle: Whether training samples come in a new order every epoch.
        seed: Seed of the order.
        num_workers: Processes that load batches, on each rank; 0: the training process does.
            Batches do not depend on it.
        predict_split: Whose samples ``predict`` runs on, in order.

    Attributes:
        train_set: Training samples; None before ``setup``.
        val_set: Validation samples; None if there are none.

    Raises:
        ValueError: A number below its least value, lengths between which there is none, or an
            unknown split.
    """

    def __init__(
        self,
        *,
        global_batch_size: int,
        max_length: int | None,
        min_length: int = 1,
        shuffle: bool,
        seed: int,
        num_workers: int,
        predict_split: PredictSplit = "train",
    ) -> None:
        super().__init__()
        self._min_length = check_at_least("min_length", min_length)
        if max_length is not None and max_length < min_length:
            raise ValueError(f"max_length={max_length} is below min_length={min_length}")
        self.global_batch_size = check_at_least("global_batch_size", global_batch_size)
        self.max_length = max_length
        self._shuffle = shuffle
        self._seed = check_at_least("seed", seed, 0)
        self._num_workers = check_at_least("num_workers", num_workers, 0)
        self._predict_split = check_one_of("predict_split", predict_split, get_args(PredictSplit))
        self.train_set: Dataset[Any] | None = None
        self.val_set: Dataset[Any] | None = None

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        # A short last batch would be a step of its own, with the learning rate of a full one.
        return self._loader(self._ready_train_set(), shuffle=self._shuffle, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        return [] if self.val_set is None else self._loader(self.val_set)

    @override
    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        """Every sample of the split once, in order, with its index as ``sample_id``."""
        train_set = self._ready_train_set()
        chosen = train_set if self._predict_split == "train" else self.val_set
        if chosen is None:
            raise ValueError(
                f"predict_split={self._predict_split!r}, but there is no validation data."
            )
        return self._loader(_WithSampleIds(chosen))

    def _ready_train_set(self) -> Dataset[Any]:
        if self.train_set is None:
            raise RuntimeError(f"{type(self).__name__} has no data yet: call setup() first")
        return self.train_set

    def _loader(
        self, dataset: Dataset[Any], *, shuffle: bool = False, drop_last: bool = False
    ) -> DataLoader[Any]:
        # A DistributedSampler with a single replica shuffles by seed and epoch alone, not by a
        # rank's random state; Lightning sets its epoch, and never replaces it.
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=self._seed
        )
        return DataLoader(
            dataset,
            batch_size=self.global_batch_size,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=self._num_workers,
            # Else each epoch starts its workers anew.
            persistent_workers=self._num_workers > 0,
            collate_fn=collate_jagged,
        )


class _WithSampleIds(Dataset[dict[str, Any]]):
    """The samples of another dataset, each with its index there as ``sample_id`` if it has none."""

    def __init__(self, dataset: Dataset[dict[str, Any]]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        assert isinstance(self._dataset, Sized)
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sample_id": index, **self._dataset[index]}
