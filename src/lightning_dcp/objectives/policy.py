"""Policy gradients for reinforcement learning: the clipped loss of PPO and GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

from lightning_dcp.config.checks import check_above_zero, check_not_negative
from lightning_dcp.objectives.objective import Extra, Objective
from lightning_dcp.objectives.target_outputs import TargetOutputs
from lightning_dcp.packing import MicroBatch


@dataclass(frozen=True)
class PolicyLoss(Objective):
    """The clipped surrogate of PPO (Schulman et al. 2017, equation 7), for PPO and GRPO alike.

    A token's loss is ``-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)`` with ``r`` the ratio
    of its probability to the old one and ``A`` its advantage; plus ``kl_coefficient`` times the
    estimate ``exp(d) - d - 1`` of the divergence from a reference policy, ``d`` the reference's
    log-probability less this one's (GRPO, Shao et al. 2024, equation 4); less
    ``entropy_coefficient`` times the entropy. The sum is divided by the number of target tokens.

    All keys belong to the token they stand at, as ``predict`` writes them: ``old_log_probs`` at a
    token is the log-probability of that token. The prompt's are ignored; mark them by
    ``loss_mask`` or labels.

    Raises:
        ValueError: An option out of its range.
    """

    clip_low: float = 0.2
    """Ratios below 1 - clip_low count as that."""
    clip_high: float = 0.2
    """Ratios above 1 + clip_high count as that; larger than clip_low for DAPO's "clip higher"."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference; above 0 the batch needs its log-probs."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    temperature: float = 1.0
    """What logits are divided by: the temperature that the tokens were sampled with."""
    old_log_probs: str = "old_log_probs"
    """Key of the log-probabilities under the policy that sampled the tokens, jagged."""
    advantages: str = "advantages"
    """Key of the advantages: jagged, or dense with one a sample (GRPO)."""
    ref_log_probs: str = "ref_log_probs"
    """Key of the log-probabilities under the reference policy, jagged."""

    def __post_init__(self) -> None:
        check_above_zero(temperature=self.temperature)
        check_not_negative(
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            kl_coefficient=self.kl_coefficient,
            entropy_coefficient=self.entropy_coefficient,
        )
        if self.clip_low >= 1:
            raise ValueError(f"clip_low={self.clip_low} must be below 1: ratios are above 0.")

    @property
    @override
    def extras(self) -> tuple[Extra, ...]:
        needed = (Extra(self.old_log_probs), Extra(self.advantages, of="either"))
        return (*needed, Extra(self.ref_log_probs)) if self.kl_coefficient else needed

    @override
    def __call__(self, outputs: TargetOutputs, micro_batch: MicroBatch) -> Tensor:
        extras = micro_batch.target_extras
        entropies: Tensor | None = None
        # Only when asked for: the entropy's gradient costs a pass over the logits.
        if self.entropy_coefficient:
            log_probs, entropies = outputs.log_probs_and_entropies(temperature=self.temperature)
        else:
            log_probs = outputs.log_probs(temperature=self.temperature)
        # Both are 0 in rows without a target, whatever the batch holds there: a ratio of 1.
        ratio = (log_probs - extras[self.old_log_probs]).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        advantages = extras[self.advantages]
        # The smaller of the two: clipping never makes an update look better than it is.
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.kl_coefficient:
            apart = extras[self.ref_log_probs] - log_probs
            # expm1: exp(d) - 1 has no digits left where the policies hardly differ.
            losses = losses + self.kl_coefficient * (torch.expm1(apart) - apart)
        return losses if entropies is None else losses - self.entropy_coefficient * entropies
