"""Distillation from a teacher's most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, override

import torch
from torch import Tensor

from lightning_dcp.config.checks import check_above_zero, check_one_of
from lightning_dcp.objectives.objective import Extra, Objective
from lightning_dcp.objectives.target_outputs import TargetOutputs
from lightning_dcp.packing import GlobalBatch, Jagged, MicroBatch


@dataclass(frozen=True)
class TopKDistillation(Objective):
    """Forward KL divergence from a teacher whose top ``k`` tokens the batch holds.

    A token's loss is ``sum over the k ids of p * (log p - log q)``, with ``p`` the teacher's and
    ``q`` the student's probability, the latter over the whole vocabulary. With
    ``teacher_values="logits"`` ``p`` is the softmax over the k values, so that they sum to 1; with
    ``"log_probs"`` ``p`` is taken as it is, and what the teacher gives to other ids is left out. A
    log-probability of minus infinity fills up where there are fewer than k.

    Both keys belong to the token they stand at: row ``i`` is the distribution from which token
    ``i`` was, or would have been, drawn.

    Raises:
        ValueError: An option out of its range.
    """

    teacher_values: Literal["logits", "log_probs"] = "logits"
    """What the batch holds: logits up to a constant, or log-probabilities of the vocabulary."""
    temperature: float = 1.0
    """What the logits of both are divided by; 1 for log_probs. The loss is not scaled by it."""
    ids: str = "teacher_ids"
    """Key of the teacher's token ids, jagged with k values a token."""
    values: str = "teacher_values"
    """Key of the values at these ids, jagged with k values a token."""

    def __post_init__(self) -> None:
        check_above_zero(temperature=self.temperature)
        check_one_of("teacher_values", self.teacher_values, ("logits", "log_probs"))
        if self.teacher_values == "log_probs" and self.temperature != 1:
            raise ValueError(
                f"temperature={self.temperature} needs teacher_values='logits': log-probabilities "
                "of the top k alone cannot be brought to another temperature."
            )

    @property
    @override
    def extras(self) -> tuple[Extra, ...]:
        return Extra(self.ids, num_dims=1, integer=True), Extra(self.values, num_dims=1)

    @override
    def check(self, batch: GlobalBatch, *, vocab_size: int | None = None) -> None:
        super().check(batch, vocab_size=vocab_size)
        ids, values = (batch.extras[key] for key in (self.ids, self.values))
        assert isinstance(ids, Jagged)
        assert isinstance(values, Jagged)
        if ids.values.shape[1:] != values.values.shape[1:]:
            raise ValueError(
                f"'{self.ids}' has {ids.values.shape[1]} ids a token, '{self.values}' "
                f"{values.values.shape[1]} values. Each id needs its value."
            )

    @override
    def __call__(self, outputs: TargetOutputs, micro_batch: MicroBatch) -> Tensor:
        extras = micro_batch.target_extras
        student = outputs.log_probs_at(extras[self.ids], temperature=self.temperature)
        # float32, as the student's: files may hold 16 bits, whose softmax has three digits.
        teacher = extras[self.values].to(student.dtype)
        if self.teacher_values == "logits":
            teacher = (teacher / self.temperature).log_softmax(1)
        probabilities = teacher.exp()
        # p log p is 0 for p = 0; as a product it would be NaN.
        divergences: Tensor = -torch.special.entr(probabilities) - probabilities * student
        # Rows without a target have a value too, which the sum over targets leaves out.
        return divergences.sum(1)
