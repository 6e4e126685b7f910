"""The optimizer's settings, and the course of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_dcp.config.checks import check_at_least, check_not_negative


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer: AdamW or SGD, by Megatron-Core."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW, or SGD with momentum, which needs use_distributed_optimizer=False."""
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
        check_not_negative(lr=self.lr, weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """Linear warm-up to the optimizer's lr, then a decay to a fraction of it."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay."""
    warmup_steps: int = 0
    """Steps from 0 to the highest learning rate."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end, as a fraction of the highest."""

    def __post_init__(self) -> None:
        check_at_least("warmup_steps", self.warmup_steps, 0)
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio must be in 0..1, found {self.min_lr_ratio}.")

    def factor(self, step: int, total_steps: int | None) -> float:
        """What the highest learning rate is multiplied by at ``step``, which counts from 0.

        ``total_steps`` are those of the whole fit; None means no decay.
        """
        if step < self.warmup_steps:
            # step + 1: a first step with a learning rate of 0 would change nothing.
            return (step + 1) / self.warmup_steps
        if total_steps is None or self.kind == "constant":
            return 1.0
        # A fit may end with its warm-up.
        length = max(total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / length, 1.0)
        shape = 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * shape
