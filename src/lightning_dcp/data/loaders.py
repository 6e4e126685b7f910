"""The DataLoader of a global batch: the same on every rank, in every run with the same seed."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_dcp.data.collate import collate_jagged
from lightning_dcp.data.dataset import WithSampleIds

PredictSplit = Literal["train", "val"]
"""Whose samples ``predict`` runs on."""


def global_batch_loader(
    dataset: Dataset[Any],
    *,
    global_batch_size: int,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    num_workers: int,
) -> DataLoader[Any]:
    """A loader that yields the same global batches on every rank.

    The sampler is a ``DistributedSampler`` with a single replica: it shuffles by seed and epoch
    alone, not by a rank's random state; Lightning sets its epoch and never replaces it, with one
    process or many.

    Args:
        dataset: Samples for :func:`collate_jagged`.
        global_batch_size: Samples in one batch.
        shuffle: Whether the order changes from epoch to epoch.
        drop_last: Whether a last batch with fewer samples is left out.
        seed: Of the shuffling.
        num_workers: Worker processes; 0 loads in this one. Batches do not depend on it.
    """
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed
    )
    return DataLoader(
        dataset,
        batch_size=global_batch_size,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=collate_jagged,
    )


def predict_loader(
    dataset: Dataset[Any], *, global_batch_size: int, num_workers: int
) -> DataLoader[Any]:
    """A loader of every sample once, in order, with its index as ``sample_id``.

    Args:
        dataset: Samples for :func:`collate_jagged`.
        global_batch_size: Samples in one batch; the last one may have fewer.
        num_workers: Worker processes; 0 loads in this one.
    """
    return global_batch_loader(
        WithSampleIds(dataset),
        global_batch_size=global_batch_size,
        shuffle=False,
        drop_last=False,
        seed=0,
        num_workers=num_workers,
    )


def check_counts(**at_least: tuple[int, int]) -> None:
    """Raises a ``ValueError`` for the first option that is below its minimum.

    Args:
        at_least: Value and minimum by the name of the option.
    """
    for option, (value, minimum) in at_least.items():
        if value < minimum:
            raise ValueError(f"{option}={value}, but it must be {minimum} or more")


def check_predict_split(split: PredictSplit) -> PredictSplit:
    """A checked ``predict_split``.

    Raises:
        ValueError: It is none of the splits.
    """
    if split not in get_args(PredictSplit):
        choices = ", ".join(get_args(PredictSplit))
        raise ValueError(f"predict_split={split!r} is none of {choices}")
    return split
