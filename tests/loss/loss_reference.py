"""Plain cross-entropy in float64, written from the definitions: what every form must equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    labels: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """Leaves of another dtype that require gradients."""
        hidden, weight = (
            one.detach().to(dtype).requires_grad_() for one in (self.hidden, self.weight)
        )
        return Inputs(hidden, weight, self.labels)


def make_inputs(
    rows: int = 23, width: int = 8, vocab: int = 37, *, real: int | None = None, seed: int = 0
) -> Inputs:
    """Random inputs in float64, a third of the rows without a target."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(real or vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.33] = IGNORED
    return Inputs(hidden, weight, labels).to(torch.float64)


def reference(
    inputs: Inputs,
    *,
    temperature: float | Tensor = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row's loss and entropy [rows], zero in ignored rows."""
    hidden, weight, labels = inputs.hidden, inputs.weight, inputs.labels
    logits = (hidden @ weight.T)[:, :vocab_size]
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    log_probs = logits.log_softmax(1)
    counts = labels != IGNORED
    target = log_probs.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    losses = -(1 - label_smoothing) * target - label_smoothing * log_probs.mean(1)
    losses = losses + z_loss * logits.logsumexp(1).square()
    entropy = -(log_probs.exp() * log_probs).sum(1)
    return torch.where(counts, losses, 0), torch.where(counts, entropy, 0)


def gradients(value: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    hidden, weight = torch.autograd.grad(value, (inputs.hidden, inputs.weight))
    return hidden, weight
