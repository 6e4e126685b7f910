"""Checkpoints as files: what model wrote one, and errors that name the file."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.config.model import ModelConfig
from lightning_dcp.config.moe import MoEConfig
from lightning_dcp.config.optimizer import LRSchedule, OptimizerSettings
from lightning_dcp.engine.agreement import raise_refusals
from lightning_dcp.objectives import DPO, SFT, PolicyLoss, TopKDistillation, ValueLoss

_KEY = "lightning_dcp"

# What a module's save_hyperparameters() puts into a checkpoint: torch reads it back, which it does
# of classes alone that it is told of.
_HYPERPARAMETERS: list[Any] = [ModelConfig, MoEConfig, OptimizerSettings, LRSchedule]
_HYPERPARAMETERS += [SFT, DPO, PolicyLoss, TopKDistillation, ValueLoss]
torch.serialization.add_safe_globals(_HYPERPARAMETERS)


def sign(checkpoint: dict[str, Any], model: ModelConfig) -> None:
    """Writes into a checkpoint what model, and what version of this package, it is of."""
    try:
        written_by = version("lightning-dcp")
    except PackageNotFoundError:
        # Run from a source tree that is not installed.
        written_by = "unknown"
    checkpoint[_KEY] = {"version": written_by, "model": model.architecture}


def check_model(checkpoint: Mapping[str, Any], model: ModelConfig) -> None:
    """Compares what a checkpoint says of its model, if it says so, with ``model``.

    Shapes alone do not tell: other heads, or another base of rope, have the same.

    Raises:
        ValueError: They differ; the message has both sides.
    """
    signature = checkpoint.get(_KEY)
    if signature is None:
        return
    mine, theirs = model.architecture, signature["model"]
    # Of what both know: another version may have other options.
    different = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    if different:
        raise ValueError(
            f"The checkpoint (of lightning-dcp {signature['version']}) is of a model with "
            + ", ".join(f"{name}={theirs[name]!r}" for name in different)
            + ", this one has "
            + ", ".join(f"{name}={mine[name]!r}" for name in different)
            + ". Give the module a ModelConfig with the checkpoint's. To use its weights in "
            "another model on purpose: module.load_state_dict(...), which does not compare."
        )


@contextmanager
def _naming(path: Any) -> Iterator[None]:
    """Turns what reading a damaged file raises into a ValueError that names it."""
    try:
        yield
    except (EOFError, RuntimeError, IsADirectoryError, pickle.UnpicklingError) as error:
        size = f"{os.path.getsize(path)} bytes" if os.path.isfile(path) else "not a file"
        raise ValueError(
            f"{path} ({size}) cannot be read as a checkpoint: it is damaged, cut short, or of "
            f"another kind. {error}"
        ) from error


def _checked(checkpoint: Any, path: Any) -> dict[str, Any]:
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        found = sorted(checkpoint)[:5] if isinstance(checkpoint, dict) else type(checkpoint)
        raise ValueError(f"{path} is no checkpoint of Lightning: no 'state_dict', but {found}.")
    return checkpoint


def read_on_all_ranks(path: Any, read: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """What ``read`` gives of a checkpoint file; a collective of ``group``, a gloo group of all.

    Raises:
        OSError: There is no such file, or it cannot be opened.
        ValueError: It is damaged, or no checkpoint, or another rank could not read it.
    """
    checkpoint: dict[str, Any] = {}
    error: Exception | None = None
    try:
        with _naming(path):
            checkpoint = _checked(read(), path)
    except (OSError, ValueError) as refused:
        # Kept till all ranks have met: another's disk may have a whole file.
        error = refused
    raise_refusals(error, group, "could not load the checkpoint")
    return checkpoint


def read_weights(path: str, model: ModelConfig, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The whole weights of a checkpoint, read from the file as they are used; a collective.

    Raises:
        OSError, ValueError: As :func:`read_on_all_ranks`, or the weights are of another model.
    """
    # Of files that lie here: a rank reads its part alone.
    read = partial(torch.load, path, map_location="cpu", weights_only=True, mmap=True)
    checkpoint = read_on_all_ranks(path, read, group)
    check_model(checkpoint, model)
    state: dict[str, Tensor] = checkpoint["state_dict"]
    return state
