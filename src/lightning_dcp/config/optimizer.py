"""The optimizer's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer: AdamW or SGD, by Megatron-Core."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW, or SGD with momentum."""
    lr: float = 3e-4
    """Highest learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay; biases and norms are left out."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.95
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = 0.9
    """SGD's momentum."""

    def __post_init__(self) -> None:
        if self.lr < 0 or self.weight_decay < 0:
            raise ValueError(
                f"lr and weight_decay must not be negative, found {self.lr} and "
                f"{self.weight_decay}."
            )
