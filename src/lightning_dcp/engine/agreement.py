"""All ranks hold the same batch and the same cost model; an error on one is an error on all.

Before each step the ranks exchange one small message. A rank whose loader failed or ended, or whose
batch was refused, sends that in its place, so that nobody waits for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.config.model_sizes import ModelSizes
from lightning_dcp.packing import GlobalBatch, Jagged
from lightning_dcp.planning import CostModel
from lightning_dcp.planning.cost.calibration_file import read_calibration

_SAME_EVERYWHERE = (
    "Every rank plans the whole global batch, so that each must load the same ones: leave "
    "Trainer(use_distributed_sampler=True) as it is, or make a sampler of your own give all ranks "
    "the same samples in the same order, and seed what is random alike on all of them."
)


def _ignore(signum: int) -> None:
    """What a loop of one's own does about signals."""


class OtherRankError(ValueError):
    """What another rank has failed at, which has an error of its own."""


@dataclass
class Signals:
    """Signals of the operating system, which all ranks act on at the same batch.

    Attributes:
        pending: Number of the signal that this process got and nobody has acted on; 0 for none.
        act: Called with its number, on every rank, before the batch is run.
    """

    pending: int = 0
    act: Callable[[int], None] = _ignore


@dataclass(frozen=True)
class _Next:
    """What a rank has next.

    Attributes:
        kind: A loader's first batch, a batch of a step, a loader's end, or a new loader's length.
        text: The same for people, if the ranks do not agree.
        checksums: By name, what has to be equal on all ranks.
    """

    kind: Literal["start", "batch", "end", "loader"]
    text: str
    checksums: dict[str, int] = field(default_factory=dict)


def agree_on_batch(
    batch: GlobalBatch | None,
    error: Exception | None,
    group: dist.ProcessGroup,
    *,
    given: int = 0,
    signal: int = 0,
) -> int:
    """Compares checksums of all that a global batch holds over ``group``; a collective.

    Args:
        batch: This rank's; None where it was refused.
        error: Why this rank refused its batch, or None.
        group: A gloo group of all ranks.
        given: Batches that this rank's loader has given out, for errors.
        signal: Number of the signal that this process got; 0 for none.

    Returns:
        The highest ``signal`` of all ranks.

    Raises:
        Exception: ``error`` itself, on the rank that had it.
        ValueError: Another rank refused its batch or has none, or the batches differ; on all ranks.
    """
    if batch is None:
        return _agree(None, group, error=error, doing="refused its batch", signal=signal)
    size = f"{len(batch)} samples of {int(batch.lengths.sum())} tokens"
    text = f"{size}{f' after {given} batches from its loader' if given else ''}"
    return _agree(_Next("batch", text, checksums(batch)), group, signal=signal)


def agree_on_end(given: int, group: dist.ProcessGroup) -> None:
    """Lets the other ranks know that a loader has ended after ``given`` batches; a collective.

    Raises:
        ValueError: Another rank failed or goes on; on all ranks.
    """
    _agree(_Next("end", f"no more batches after {given}"), group)


def agree_on_start(group: dist.ProcessGroup) -> None:
    """Lets the other ranks know that a loader has a first batch; a collective.

    Raises:
        ValueError: That of another rank has none, or failed; on all ranks.
    """
    _agree(_Next("start", "a first batch"), group)


def agree_on_length(length: int | None, group: dist.ProcessGroup) -> None:
    """Compares the number of batches of a loader, None if it has no length; a collective.

    Raises:
        ValueError: They differ; on all ranks.
    """
    text = "no length" if length is None else f"{length} batches"
    _agree(_Next("loader", text, {"length": -1 if length is None else length}), group)


def agree_on_outputs(outputs: Mapping[str, Tensor] | None, group: dist.ProcessGroup) -> None:
    """Compares names, types and trailing shapes of predictions; a collective.

    Args:
        outputs: This rank's by name, ``[rows, ...]``; None where it has none.
        group: A gloo group of all ranks.

    Raises:
        ValueError: They differ; on all ranks.
    """
    ranks: list[list[str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, None if outputs is None else form_of(outputs), group=group)
    found = [(rank, form) for rank, form in enumerate(ranks) if form is not None]
    for rank, form in found:
        if form != found[0][1]:
            raise ValueError(
                f"predict_micro_batch gave {', '.join(found[0][1])} on rank {found[0][0]}, "
                f"{', '.join(form)} on rank {rank}; it must give the same names, types and shapes "
                "on every rank."
            )


def form_of(outputs: Mapping[str, Tensor]) -> list[str]:
    """Of each output its name, type and shape but for the rows, in the order of names."""
    return [
        f"'{name}' ({str(value.dtype).removeprefix('torch.')} {['rows', *value.shape[1:]]})"
        for name, value in sorted(outputs.items())
    ]


@contextmanager
def raised_on_all(doing: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raises on all ranks what this one raises inside, where the others meet next.

    Args:
        doing: What fails then, after "Rank N", for the other ranks.
        group: A gloo group of all ranks; None lets nobody know.
    """
    try:
        yield
    except Exception as error:
        # Of any kind: a collate function may raise whatever it likes, and raises it here again.
        if group is not None:
            _agree(None, group, error=error, doing=doing)
        raise


def checksums(batch: GlobalBatch) -> dict[str, int]:
    """By key a checksum of type, shape, lengths and, where they are on the host, values.

    On a device it would wait for them, at every step.
    """
    keys: dict[str, Jagged | Tensor | None] = {
        "input_ids": batch.input_ids,
        "labels": None if batch.labels is batch.input_ids else batch.labels,
        "loss_mask": batch.loss_mask,
        **batch.extras,
    }
    return {key: _checksum(value) for key, value in sorted(keys.items()) if value is not None}


def _checksum(value: Jagged | Tensor) -> int:
    rows = value.token_rows() if isinstance(value, Jagged) else value
    # crc32: Python's own hash of bytes differs from process to process.
    checksum = zlib.crc32(f"{rows.dtype} {list(rows.shape)}".encode())
    if isinstance(value, Jagged):
        checksum = zlib.crc32(np.ascontiguousarray(value.lengths), checksum)
    if rows.device.type != "cpu":
        return checksum
    return zlib.crc32(rows.detach().contiguous().flatten().view(torch.uint8).numpy(), checksum)


def _agree(
    mine: _Next | None,
    group: dist.ProcessGroup,
    *,
    error: Exception | None = None,
    doing: str = "failed",
    signal: int = 0,
) -> int:
    # One small message a step tells whether all is well; texts travel only where it is not.
    facts = None if mine is None else (mine.kind, *mine.checksums.items())
    checksum = zlib.crc32(repr(facts).encode())
    row = torch.tensor([[mine is None, checksum, signal]], dtype=torch.int64)
    table = torch.zeros(dist.get_world_size(group), 3, dtype=torch.int64)
    dist.all_gather_single(table, row, group=group)
    if bool(table[:, 0].any()):
        raise_refusals(error, group, doing)
    if bool((table[:, :2] == table[0, :2]).all()):
        return int(table[:, 2].max())
    ranks: list[_Next] = [_Next("end", "")] * len(table)
    dist.all_gather_object(ranks, mine, group=group)
    found = "; ".join(
        f"{_named(where)}: {text}" for text, where in _ranks_by([one.text for one in ranks]).items()
    )
    kinds = {one.kind for one in ranks}
    if kinds == {"batch"}:
        raise ValueError(
            f"The ranks hold different global batches ({found}): {_different_keys(ranks)}. "
            f"{_SAME_EVERYWHERE}"
        )
    what = "have different lengths" if kinds == {"loader"} else "do not end together"
    raise ValueError(f"The loaders of the ranks {what} ({found}). {_SAME_EVERYWHERE}")


def _different_keys(ranks: list[_Next]) -> str:
    """Which keys of which ranks are not those of rank 0."""
    parts = []
    for key in sorted({key for one in ranks for key in one.checksums}):
        reference = ranks[0].checksums.get(key)
        differs = [r for r, one in enumerate(ranks) if one.checksums.get(key) != reference]
        if differs and reference is not None:
            missing = [rank for rank in differs if key not in ranks[rank].checksums]
            differs = [rank for rank in differs if key in ranks[rank].checksums]
            parts += [f"'{key}' of {_named(differs)} is not that of rank 0"] if differs else []
            parts += [f"'{key}' is missing on {_named(missing)}"] if missing else []
        elif differs:
            parts.append(f"'{key}' is on {_named(differs)} alone")
    return ", ".join(parts)


def _ranks_by(texts: list[str]) -> dict[str, list[int]]:
    by: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by.setdefault(text, []).append(rank)
    return by


def _named(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    rest = f" and {len(ranks) - most} others" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"


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
    raise_refusals(error, group, f"refused cost_model={path!r}")
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


def raise_refusals(error: Exception | None, group: dist.ProcessGroup, doing: str) -> None:
    """Raises on all ranks once each knows that one has an ``error``; a collective.

    Raises:
        Exception: ``error`` itself, on a rank that has one.
        OtherRankError: Another rank has one; with its number, its ``doing`` and the error.
    """
    messages: list[str | None] = [None] * dist.get_world_size(group)
    mine = None if error is None else f"{doing}: {_in_short(error)}"
    dist.all_gather_object(messages, mine, group=group)
    # The rank at fault keeps its own type and traceback, the others say whose fault it is.
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise OtherRankError(f"Rank {rank} {message}")


def _in_short(error: Exception) -> str:
    text = str(error).strip()
    if "Original Traceback" in text:
        # From a worker of a DataLoader, whose traceback the rank itself prints.
        return f"{text.splitlines()[-1]} (in a worker of its loader)"
    return f"{type(error).__name__}: {text}"
