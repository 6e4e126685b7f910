"""Made-up rollouts: what reinforcement learning needs beside tokens, to try a run out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.packing import ROUTES, RouteShape


@dataclass(frozen=True, kw_only=True)
class SyntheticRollouts:
    """The keys of a sampler's output, as :class:`~lightning_dcp.PolicyLoss` reads them.

    ``old_log_probs`` are near those of a model that knows nothing, ``advantages`` one normal number
    a sample, ``loss_mask`` leaves the prompt out, and ``routed_experts`` are drawn at random for
    each token but the last, which a sampler never runs.

    Raises:
        ValueError: A size below 1, more experts a token than there are, or a share outside 0 to 1.
    """

    num_layers: int
    """MoE layers of the model."""
    num_experts: int
    """moe.num_experts of the model."""
    topk: int
    """moe.topk of the model."""
    prompt_share: float = 0.25
    """Share of each sample's tokens, rounded down, that are its prompt and no targets."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "topk"):
            check_at_least(f"rollouts.{name}", getattr(self, name))
        if self.topk > self.num_experts:
            raise ValueError(
                f"rollouts.topk={self.topk} is more than rollouts.num_experts={self.num_experts}."
            )
        if not 0 <= self.prompt_share <= 1:
            raise ValueError(f"rollouts.prompt_share={self.prompt_share} must be from 0 to 1.")

    def draw(self, length: int, vocab_size: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """The keys of one sample of ``length`` tokens, for a model of ``vocab_size`` ids."""
        shape = RouteShape(self.num_layers, self.topk, self.num_experts)
        # The first topk of a random order are different experts; the last token has none.
        order = rng.random((length - 1, self.num_layers, self.num_experts)).argsort(axis=-1)
        # A model that knows nothing gives each of its tokens the probability 1 / vocab_size.
        log_probs = rng.normal(-math.log(vocab_size), 0.1, length)
        return {
            "old_log_probs": torch.from_numpy(log_probs.astype(np.float32)),
            "advantages": torch.tensor(rng.standard_normal(), dtype=torch.float32),
            # A share of the length, not a fixed one: short samples have targets, too.
            "loss_mask": torch.arange(length) >= int(self.prompt_share * length),
            # [length - 1, num_layers, topk]
            ROUTES: torch.from_numpy(order[..., : self.topk]).to(shape.dtype),
        }
