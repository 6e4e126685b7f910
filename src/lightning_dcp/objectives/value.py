"""Regression of a value a token: the critic of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, override

import torch
from torch import Tensor

from lightning_dcp.config.checks import check_above_zero
from lightning_dcp.objectives.objective import Extra, Objective
from lightning_dcp.objectives.target_outputs import ValueOutputs
from lightning_dcp.packing import MicroBatch


@dataclass(frozen=True)
class ValueLoss(Objective):
    """Half the squared error of a value head, clipped or not.

    The loss of a value ``v`` with return ``R`` is ``(v - R)^2 / 2``; with ``clip`` it is the larger
    of that and the same with ``v`` brought within ``clip`` of the old value, as implementations of
    PPO have it (Engstrom et al. 2020, section 3). The sum is divided by the number of values that
    count in the global batch.

    The value at a token is that of the sequence up to and with this token, and all keys are too:
    ``returns`` at a token is what follows it. (Log-probabilities and advantages are about the token
    they stand at. With an advantage ``A`` at token ``i + 1``, the return at token ``i`` is the
    value at ``i`` plus ``A``.)

    Raises:
        ValueError: An option out of its range.
    """

    head: ClassVar[Literal["vocabulary", "value"]] = "value"

    clip: float | None = None
    """How far a value may go from the old one before it gains nothing; needs old_values."""
    returns: str = "returns"
    """Key of the returns, jagged."""
    old_values: str = "old_values"
    """Key of the values under the critic that made the advantages, jagged, as `predict` gives."""
    mask: str | None = None
    """Key of the tokens whose values count, jagged, bool; without one they are those before a
    target token (loss_mask, labels): where the policy chose. For a reward model mark the last
    token, which is before none."""

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_above_zero(clip=self.clip)

    @property
    @override
    def extras(self) -> tuple[Extra, ...]:
        mask = [] if self.mask is None else [Extra(self.mask, boolean=True)]
        old_values = [] if self.clip is None else [Extra(self.old_values)]
        return (Extra(self.returns), *old_values, *mask)

    @override
    def __call__(self, outputs: ValueOutputs, micro_batch: MicroBatch) -> Tensor:
        counted = self._counted(micro_batch)

        def selected(values: Tensor) -> Tensor:
            # Before any arithmetic: NaN elsewhere would reach the gradient.
            return torch.where(counted, values, 0)

        values = selected(outputs.values())
        returns = selected(micro_batch.extras[self.returns]).to(values.dtype)
        errors = (values - returns).square()
        if self.clip is not None:
            old = selected(micro_batch.extras[self.old_values]).to(values.dtype)
            clipped = old + (values - old).clamp(-self.clip, self.clip)
            errors = torch.maximum(errors, (clipped - returns).square())
        # Summed here: `mask` may count rows without a target, which losses by row would lose.
        return errors.sum() / 2

    @override
    def count(self, micro_batch: MicroBatch) -> Tensor:
        """The values of this rank that count."""
        return self._counted(micro_batch).sum()

    def _counted(self, micro_batch: MicroBatch) -> Tensor:
        return micro_batch.loss_mask if self.mask is None else micro_batch.extras[self.mask]
