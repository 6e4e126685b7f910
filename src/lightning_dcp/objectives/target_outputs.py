"""What a model says about the rows of a micro-batch, made only when an objective asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast, override

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.loss import IGNORE_INDEX, linear_cross_entropy, linear_log_probs_at

type Temperature = float | Tensor
"""What logits are divided by: a number, or one per row [rows]."""


class TargetOutputs(ABC):
    """Log-probabilities and entropies of one micro-batch's rows on this rank.

    A row's target is its label, the next token. All values are float32 (float64 for a float64
    model), differentiable, the same on all tensor-parallel ranks, and exactly 0 in rows without a
    target.
    """

    @abstractmethod
    def loss_sum(self, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
        """The sum of all targets' cross-entropies, a scalar: the fastest form."""

    @abstractmethod
    def log_probs(self, *, temperature: Temperature = 1.0) -> Tensor:
        """Each target's log-probability [rows]."""

    @abstractmethod
    def log_probs_and_entropies(self, *, temperature: Temperature = 1.0) -> tuple[Tensor, Tensor]:
        """The same and the entropy in nats of each row's distribution, each [rows]."""

    @abstractmethod
    def log_probs_at(self, ids: Tensor, *, temperature: Temperature = 1.0) -> Tensor:
        """Log-probabilities [rows, k] of ``ids`` [rows, k] instead of the target."""


@dataclass(frozen=True, kw_only=True)
class FusedOutputs(TargetOutputs):
    """:class:`TargetOutputs` that never hold the logits.

    Attributes:
        hidden: [rows, h].
        weight: [local vocabulary, h].
        labels: [rows]; ``IGNORE_INDEX`` where there is no target.
        vocab_size: Real vocabulary.
        tp_group: Over which the vocabulary is split; None if it is not.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    vocab_size: int | None
    tp_group: dist.ProcessGroup | None

    @override
    def loss_sum(self, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
        return cast(Tensor, self._cross_entropy(label_smoothing=label_smoothing, z_loss=z_loss))

    @override
    def log_probs(self, *, temperature: Temperature = 1.0) -> Tensor:
        return -cast(Tensor, self._cross_entropy(reduction="none", temperature=temperature))

    @override
    def log_probs_and_entropies(self, *, temperature: Temperature = 1.0) -> tuple[Tensor, Tensor]:
        losses, entropies = self._cross_entropy(
            reduction="none", return_entropy=True, temperature=temperature
        )
        return -losses, entropies

    @override
    def log_probs_at(self, ids: Tensor, *, temperature: Temperature = 1.0) -> Tensor:
        # By mask: ids of rows without a target may be anything.
        options: Any = {"loss_mask": self.labels != IGNORE_INDEX, "temperature": temperature}
        return linear_log_probs_at(self.hidden, self.weight, ids, **options, **self._vocabulary)

    def _cross_entropy(self, **options: Any) -> Any:
        options |= self._vocabulary
        return linear_cross_entropy(self.hidden, self.weight, self.labels, **options)

    @property
    def _vocabulary(self) -> dict[str, Any]:
        return {"tp_group": self.tp_group, "vocab_size": self.vocab_size}


@dataclass(frozen=True, kw_only=True)
class LogitsOutputs(TargetOutputs):
    """:class:`TargetOutputs` from logits that are all there: memory for simplicity.

    Attributes:
        logits: [rows, vocabulary], without padded columns, the same on all tensor-parallel ranks.
        labels: [rows]; ``IGNORE_INDEX`` where there is no target.
    """

    logits: Tensor
    labels: Tensor

    @override
    def loss_sum(self, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
        logits = self._logits(1.0)
        log_probs = logits.log_softmax(1)
        losses = -(1 - label_smoothing) * self._at_labels(log_probs)
        losses = losses - label_smoothing * log_probs.mean(1)
        losses = losses + z_loss * logits.logsumexp(1).square()
        return self._targets_only(losses).sum()

    @override
    def log_probs(self, *, temperature: Temperature = 1.0) -> Tensor:
        return self._targets_only(self._at_labels(self._logits(temperature).log_softmax(1)))

    @override
    def log_probs_and_entropies(self, *, temperature: Temperature = 1.0) -> tuple[Tensor, Tensor]:
        log_probs = self._logits(temperature).log_softmax(1)
        entropies = -(log_probs.exp() * log_probs).sum(1)
        of_targets = self._targets_only(self._at_labels(log_probs))
        return of_targets, self._targets_only(entropies)

    @override
    def log_probs_at(self, ids: Tensor, *, temperature: Temperature = 1.0) -> Tensor:
        valid = (self.labels != IGNORE_INDEX)[:, None]
        log_probs = self._logits(temperature).log_softmax(1)
        # Ids of rows without a target may be anything, out of range as well.
        return torch.where(valid, log_probs.gather(1, ids.long().where(valid, 0)), 0)

    def _logits(self, temperature: Temperature) -> Tensor:
        # float32, as the fused loss: a log-softmax in bfloat16 has three digits.
        logits = self.logits if self.logits.dtype == torch.float64 else self.logits.float()
        return logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)

    def _at_labels(self, log_probs: Tensor) -> Tensor:
        # IGNORE_INDEX is no column; what it reads instead is selected away.
        labels = self.labels.where(self.labels != IGNORE_INDEX, 0)
        return log_probs.gather(1, labels[:, None])[:, 0]

    def _targets_only(self, values: Tensor) -> Tensor:
        # Selected, not multiplied: 0 * NaN is NaN.
        return torch.where(self.labels != IGNORE_INDEX, values, 0)


@dataclass(frozen=True, kw_only=True)
class ValueOutputs:
    """What a model with a value head says about one micro-batch's rows on this rank.

    Attributes:
        hidden: ``[rows, h]``, the same on all tensor-parallel ranks.
        weight: ``[1, h]``, the same on all of them too.
    """

    hidden: Tensor
    weight: Tensor

    def values(self) -> Tensor:
        """``[rows]``: the value of each row's prefix, which ends with the row's own token.

        float32 (float64 for a float64 model), differentiable; anything at padding.
        """
        # A product in bfloat16 would round values to three digits.
        exact = torch.promote_types(self.hidden.dtype, torch.float32)
        return torch.mv(self.hidden.to(exact), self.weight[0].to(exact))
