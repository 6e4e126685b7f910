"""Supervised fine-tuning and pre-training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import override

from torch import Tensor

from lightning_dcp.config.checks import check_not_negative
from lightning_dcp.objectives.objective import Extra, Objective
from lightning_dcp.objectives.target_outputs import TargetOutputs
from lightning_dcp.packing import MicroBatch


@dataclass(frozen=True)
class SFT(Objective):
    """Cross-entropy, optionally with weights of samples and tokens.

    Weights multiply losses and do not change what the sum is divided by, the number of target
    tokens: to have a mean over samples, give weights that say so.

    Raises:
        ValueError: An option out of its range, or smoothing together with weights.
    """

    sample_weight: str | None = None
    """Key of the batch with one weight a sample, [num_samples]; none for 1."""
    token_weight: str | None = None
    """Key of the batch with one weight a token (the token as target), jagged; none for 1."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary, in [0, 1)."""
    z_loss: float = 0.0
    """Factor of the squared log-sum-exp that is added to each token's loss."""

    def __post_init__(self) -> None:
        check_not_negative(label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        if self.label_smoothing >= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be below 1.")
        if self._weights and (self.label_smoothing or self.z_loss):
            raise ValueError(
                "Weights do not go with label_smoothing or z_loss: found sample_weight="
                f"{self.sample_weight!r}, token_weight={self.token_weight!r}, label_smoothing="
                f"{self.label_smoothing}, z_loss={self.z_loss}. Leave one of the two out."
            )

    @property
    def _weights(self) -> tuple[str, ...]:
        return tuple(key for key in (self.sample_weight, self.token_weight) if key)

    @property
    @override
    def extras(self) -> tuple[Extra, ...]:
        of_sample = (Extra(self.sample_weight, of="sample"),) if self.sample_weight else ()
        return (*of_sample, Extra(self.token_weight)) if self.token_weight else of_sample

    @override
    def __call__(self, outputs: TargetOutputs, micro_batch: MicroBatch) -> Tensor:
        if not self._weights:
            # Its gradients are made in the forward pass: one matrix product less than by row.
            return outputs.loss_sum(label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        losses = -outputs.log_probs()
        for key in self._weights:
            losses = losses * micro_batch.target_extras[key]
        return losses
