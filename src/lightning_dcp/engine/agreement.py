"""All ranks hold the same batch and the same cost model; an error on one is an error on all."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from lightning_dcp.config.model_sizes import ModelSizes
from lightning_dcp.planning import CostModel
from lightning_dcp.planning.cost.calibration_file import read_calibration


def _ignore(signum: int) -> None:
    """What a loop of one's own does about signals."""


@dataclass
class Signals:
    """Signals of the operating system, which all ranks act on at the same batch.

    Attributes:
        pending: Number of the signal that this process got and nobody has acted on; 0 for none.
        act: Called with its number, on every rank, before the batch is run.
    """

    pending: int = 0
    act: Callable[[int], None] = _ignore


def agree_on_lengths(
    lengths: np.ndarray | None,
    error: Exception | None,
    group: dist.ProcessGroup,
    *,
    units: np.ndarray | None = None,
    signal: int = 0,
) -> int:
    """Compares a checksum of what a plan is made from over ``group``; a collective.

    A rank that refused its batch takes part as well, so that nobody waits for it.

    Args:
        lengths: ``[num_samples]`` of this rank's global batch; None where it was refused.
        error: Why this rank refused its batch, or None.
        group: A gloo group of all ranks.
        units: ``[num_samples]``: samples with equal ids stay together; None where all are free.
        signal: Number of the signal that this process got; 0 for none.

    Returns:
        The highest ``signal`` of all ranks.

    Raises:
        Exception: ``error`` itself, on the rank that had it.
        ValueError: Another rank refused its batch, or the batches differ; on every rank.
    """
    mine = torch.zeros(1, 5, dtype=torch.int64)
    if error is not None or lengths is None:
        mine[0, 0] = 1
    else:
        # int64, whatever offsets are stored in: a checksum of bytes must not depend on their type.
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        # crc32, since Python's own hash of bytes differs from process to process.
        checksum = zlib.crc32(lengths.tobytes())
        if units is not None:
            checksum = zlib.crc32(np.ascontiguousarray(units, dtype=np.int64).tobytes(), checksum)
        mine[0, 1:4] = torch.tensor([len(lengths), lengths.sum(), checksum])
    mine[0, 4] = signal
    # One small message a step tells whether all is well; texts travel only where it is not.
    table = torch.zeros(dist.get_world_size(group), 5, dtype=torch.int64)
    dist.all_gather_single(table, mine, group=group)
    if bool(table[:, 0].any()):
        raise_refusals(error, group, "its batch")
    different = (table[:, :4] != table[0, :4]).any(dim=1).nonzero().flatten().tolist()
    if different:
        rank = different[0]
        raise ValueError(
            "The ranks hold different global batches: rank 0 has "
            f"{_describe(table[0])}, rank {rank} has {_describe(table[rank])}. Every rank plans "
            "the whole global batch, so that each must load the same one: leave "
            "Trainer(use_distributed_sampler=True) as it is, or make a sampler of your own give "
            "all ranks the same samples in the same order."
        )
    return int(table[:, 4].max())


def _describe(row: torch.Tensor) -> str:
    _, samples, tokens, checksum, _ = row.tolist()
    return f"{samples} samples of {tokens} tokens (checksum of lengths and units {checksum:08x})"


def read_cost_model(
    path: str, *, model: ModelSizes, tp_size: int, group: dist.ProcessGroup
) -> CostModel:
    """The cost model of a calibration file, the same on all ranks; a collective.

    Args:
        path: What ``lightning-dcp calibrate`` wrote.
        model: Sizes of the model that is trained.
        tp_size: Its tensor-parallel size.
        group: A gloo group of all ranks.

    Raises:
        ValueError: This rank or another could not read the file, or it holds something else there;
            on every rank.
    """
    cost_model: CostModel | None = None
    error: ValueError | None = None
    try:
        cost_model = read_calibration(path, model=model, tp_size=tp_size).cost_model
    except ValueError as refused:
        # Kept till all ranks have met: raised here, it would leave the others in a collective.
        error = refused
    raise_refusals(error, group, f"cost_model={path!r}")
    figures = [""] * dist.get_world_size(group)
    # Figures and not the file: other spaces or keys plan alike, and floats print exactly.
    dist.all_gather_object(figures, str(cost_model), group=group)
    for rank, theirs in enumerate(figures):
        if theirs != figures[0]:
            raise ValueError(
                f"cost_model={path!r} holds other figures on rank {rank} than on rank 0; ranks "
                "would plan differently: put the same file on every machine"
            )
    assert cost_model is not None
    return cost_model


def raise_refusals(error: Exception | None, group: dist.ProcessGroup, refused: str) -> None:
    """Raises where any rank has an error, on every rank; a collective of a gloo group."""
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, None if error is None else str(error), group=group)
    # The rank at fault keeps its own type and traceback, the others say whose fault it is.
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(f"Rank {rank} refused {refused}: {message}")
