"""How weights and optimizer states become what a checkpoint stores, and back: a format each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """Four collectives, as those of ``whole.WHOLE``, that a strategy saves and resumes with.

    Attributes:
        model_state: Of a module and a context, what is stored of the weights.
        load_model_state: Loads it into a module.
        optimizer_state: Of an optimizer, its module and a context, what is stored of its states.
        load_optimizer_state: Loads it into an optimizer.
    """

    model_state: Callable[..., dict[str, Any]]
    load_model_state: Callable[..., None]
    optimizer_state: Callable[..., dict[str, Any]]
    load_optimizer_state: Callable[..., None]
