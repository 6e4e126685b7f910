"""Preferences between whole sequences: direct preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, override

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dcp.config.checks import check_above_zero, check_not_negative, check_one_of
from lightning_dcp.objectives.objective import Extra, Objective
from lightning_dcp.objectives.sequences import once_per_group, sequence_means, sequence_sums
from lightning_dcp.objectives.target_outputs import TargetOutputs
from lightning_dcp.packing import GlobalBatch, MicroBatch


@dataclass(frozen=True)
class DPO(Objective):
    """Direct preference optimization on pairs of sequences (Rafailov et al. 2023, equation 7).

    With ``r`` a sequence's log-probability, summed over its target tokens, less the reference
    model's, and ``m = beta * (r of the chosen one - r of the rejected one)``, a pair's loss is
    ``-(1 - label_smoothing) * log sigmoid(m) - label_smoothing * log sigmoid(-m)`` (the second
    term: Mitchell 2023, "conservative DPO"). The step's loss is the sum over the pairs of the
    global batch, divided by their number.

    Both samples of a pair carry the same ``pair_id``, anywhere in the batch; the plan keeps them in
    one micro-batch. Prompts are marked as no targets by ``loss_mask`` or labels.

    Raises:
        ValueError: An option out of its range.
    """

    counts: ClassVar[str] = "pairs"

    beta: float = 0.1
    """How strongly preferences pull away from the reference: the factor of the margin."""
    label_smoothing: float = 0.0
    """Share of the pairs that are taken to be labelled the wrong way round, in [0, 0.5)."""
    average_log_prob: bool = False
    """Means over a sequence's target tokens instead of sums, so that length does not matter."""
    reference_free: bool = False
    """Whether there is no reference model: log-probabilities are taken as they are."""
    reference_per: Literal["token", "sample"] = "token"
    """What the reference's log-probabilities are of: jagged, one at each token, as `predict` gives
    them, or dense, one a sample: its sum over targets, its mean with average_log_prob."""
    reference_log_probs: str = "reference_log_probs"
    """Key of the log-probabilities under the reference model."""
    pair_id: str = "pair_id"
    """Key of the pair that a sample is of, an integer [num_samples], two samples each."""
    is_chosen: str = "is_chosen"
    """Key of whether a sample is its pair's preferred one, a bool [num_samples]."""

    def __post_init__(self) -> None:
        check_above_zero(beta=self.beta)
        check_not_negative(label_smoothing=self.label_smoothing)
        if self.label_smoothing >= 0.5:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} must be below 0.5: from there on the "
                "rejected sample would be preferred."
            )
        check_one_of("reference_per", self.reference_per, ("token", "sample"))

    @property
    @override
    def extras(self) -> tuple[Extra, ...]:
        pairs = (
            Extra(self.pair_id, of="sample", integer=True),
            Extra(self.is_chosen, of="sample", boolean=True),
        )
        if self.reference_free:
            return pairs
        return (*pairs, Extra(self.reference_log_probs, of=self.reference_per))

    @property
    @override
    def keep_together(self) -> str:
        return self.pair_id

    @override
    def check(self, batch: GlobalBatch, *, vocab_size: int | None = None) -> None:
        super().check(batch, vocab_size=vocab_size)
        ids, chosen = batch.extras[self.pair_id], batch.extras[self.is_chosen]
        assert isinstance(ids, Tensor)
        assert isinstance(chosen, Tensor)
        # On a device the check would wait for it at every step, as that of tokens would.
        if ids.device.type == chosen.device.type == "cpu":
            self._check_pairs(ids.numpy(), chosen.numpy())

    def _check_pairs(self, ids: np.ndarray, chosen: np.ndarray) -> None:
        pairs, pair_of, sizes = np.unique(ids, return_inverse=True, return_counts=True)
        num_chosen = np.bincount(pair_of, weights=chosen)
        for pair in np.flatnonzero(sizes != 2)[:1]:
            samples = np.flatnonzero(pair_of == pair)
            raise ValueError(
                f"'{self.pair_id}'={pairs[pair]} is that of {len(samples)} samples of the batch, "
                f"{_some(samples)}; a pair is two. Have the DataModule give both samples of a pair "
                "in one batch, with an id that no other pair of the batch has."
            )
        for pair in np.flatnonzero(num_chosen != 1)[:1]:
            samples = np.flatnonzero(pair_of == pair)
            raise ValueError(
                f"'{self.is_chosen}' is {bool(chosen[samples[0]])} for both samples of the pair "
                f"'{self.pair_id}'={pairs[pair]}, {_some(samples)}; it must be True for one of "
                "them."
            )

    @override
    def __call__(self, outputs: TargetOutputs, micro_batch: MicroBatch) -> Tensor:
        by_row = outputs.log_probs()
        if not self.reference_free and self.reference_per == "token":
            # Before the sum: the difference is small where both sums are large.
            by_row = by_row.double() - micro_batch.target_extras[self.reference_log_probs]
        of_sequences = sequence_means if self.average_log_prob else sequence_sums
        ratios = of_sequences(by_row, micro_batch)
        if not self.reference_free and self.reference_per == "sample":
            # One a sample, in the order of the pack, as the sums are.
            ratios = ratios - micro_batch.extras[self.reference_log_probs]
        chosen, rejected = self._pairs(micro_batch)
        margins = self.beta * (ratios[chosen] - ratios[rejected])
        # logsigmoid: the sigmoid of a large negative margin is 0, and its logarithm no number.
        losses = -(1 - self.label_smoothing) * F.logsigmoid(margins)
        losses = losses - self.label_smoothing * F.logsigmoid(-margins)
        return once_per_group(losses.sum(), micro_batch)

    @override
    def count(self, micro_batch: MicroBatch) -> Tensor:
        """The pairs of the micro-batch, on the first rank of its CP group."""
        # All ranks of a CP group hold the same pairs: counted by one, as the loss is.
        num_pairs = len(micro_batch.sample_ids) // 2 if micro_batch.is_group_leader else 0
        return torch.full_like(micro_batch.num_tokens, num_pairs)

    def _pairs(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """``[pairs]`` each: where the chosen and the rejected samples are in the micro-batch."""
        ids, is_chosen = (micro_batch.extras[key] for key in (self.pair_id, self.is_chosen))
        # Two stable sorts: by pair, and in each pair the chosen one first.
        chosen_first = torch.argsort((~is_chosen).int(), stable=True)
        order = chosen_first[torch.argsort(ids[chosen_first], stable=True)]
        chosen, rejected = order[0::2], order[1::2]
        is_torn = len(ids) % 2 == 1
        # On a device the comparison would wait for it, at every micro-batch.
        if not is_torn and ids.device.type == "cpu":
            is_torn = not (torch.equal(ids[chosen], ids[rejected]) and is_chosen[chosen].all())
        if is_torn:
            raise ValueError(
                f"The micro-batch of samples {list(micro_batch.sample_ids)} does not hold both of "
                f"each pair. Plan with keep_together='{self.pair_id}'."
            )
        return chosen, rejected


def _some(samples: np.ndarray) -> str:
    shown = ", ".join(map(str, samples[:5].tolist()))
    return f"sample{'s' if len(samples) > 1 else ''} {shown}{', ...' if len(samples) > 5 else ''}"
