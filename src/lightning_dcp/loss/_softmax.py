"""The arithmetic on one chunk of logits: statistics of each row, and the gradient in place.

Shapes: R rows of the chunk, B rows of a block, V local vocabulary (real rows only). Logits are in
the dtype of the inputs; everything else is float32 (float64 for float64 inputs), one block at a
time, so that a chunk never exists in float32 beside its bfloat16 form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.loss._shard import VocabShard

# Blocks of a chunk: few, since every operation on one waits for all threads or launches a kernel.
_BLOCKS = 16


@dataclass(frozen=True)
class LossTerms:
    """What is added to the plain cross-entropy, and what else is wanted of a row."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    entropy: bool = False


@dataclass(frozen=True)
class Chunk:
    """Some rows with their logits.

    Attributes:
        rows: Where they are among all rows that are computed.
        hidden: [R, h].
        logits: [R, V] before temperature, in a buffer that the next chunk overwrites.
        labels: Global ids [R].
        inverse_temperature: [R] or [1], None for 1.
    """

    rows: slice
    hidden: Tensor
    logits: Tensor
    labels: Tensor
    inverse_temperature: Tensor | None

    def over_temperature(self, values: Tensor) -> Tensor:
        """Per-row ``values`` [R] over the temperature."""
        return values if self.inverse_temperature is None else values * self.inverse_temperature

    def blocks(self) -> Iterator[tuple[slice, Chunk]]:
        """Pieces of some rows, each with where these are in this chunk."""
        size = max(-(-len(self.labels) // _BLOCKS), 1)
        inverse = self.inverse_temperature
        for first in range(0, len(self.labels), size):
            at = slice(first, first + size)
            of_block = inverse if inverse is None or inverse.numel() == 1 else inverse[at]
            yield at, Chunk(at, self.hidden[at], self.logits[at], self.labels[at], of_block)

    def scaled(self) -> Tensor:
        """A copy of the logits over the temperature, in the dtype of the statistics."""
        # A copy of float32 logits too: callers work on it in place.
        work = self.logits.to(statistics_dtype(self.logits.dtype), copy=True)
        inverse = self.inverse_temperature
        return work if inverse is None else work.mul_(inverse[:, None])


@dataclass(frozen=True)
class RowStatistics:
    """Results over the whole vocabulary, each [R]; logits are those after temperature."""

    maximum: Tensor
    # Relative to the maximum, and apart from it: their log-sum-exp would lose the digits of the sum
    # where logits are large.
    sum_exp: Tensor
    loss: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class RowGradient:
    """What the gradient of rows' logits is made of, each [R].

    Attributes:
        maximum: Of the rows' logits after temperature.
        sum_exp: Sum of the exponentials relative to the maximum.
        grad_loss: Gradient of each row's loss.
        entropy: Of each row; needed for ``grad_entropy`` only.
        grad_entropy: Gradient of each row's entropy, None for 0.
    """

    maximum: Tensor
    sum_exp: Tensor
    grad_loss: Tensor
    entropy: Tensor | None = None
    grad_entropy: Tensor | None = None

    def at(self, rows: slice) -> RowGradient:
        """That of ``rows`` only."""
        picked: dict[str, Any] = {
            name: None if values is None else values[rows] for name, values in vars(self).items()
        }
        return RowGradient(**picked)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for inputs of that dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_statistics(chunk: Chunk, terms: LossTerms, shard: VocabShard) -> RowStatistics:
    """Loss and entropy of every row, reduced over the tensor-parallel group."""
    # One collective a chunk: each rank sends its own maximum along with sums relative to it.
    sums = [_exponentials(block, terms, shard)[1] for _, block in chunk.blocks()]
    return _combine(shard.gather(torch.cat(sums, 1)), terms, shard)


def logits_to_gradient_(
    chunk: Chunk, gradient: RowGradient, terms: LossTerms, shard: VocabShard
) -> None:
    """Overwrites the chunk's logits [R, V] by the gradient with respect to them.

    With p the softmax, q the smoothed target and H the entropy, the gradient of a row is
    ``grad_loss * ((1 + 2 * z_loss * log_sum_exp) * p - q) - grad_entropy * p * (log p + H)``,
    over the temperature.
    """
    for at, block in chunk.blocks():
        of_block = gradient.at(at)
        shifted = block.scaled().sub_(of_block.maximum[:, None])
        if of_block.grad_entropy is None:
            _write_gradient(block, shifted.exp_(), None, of_block, terms, shard)
        else:
            _write_gradient(block, shifted.exp(), shifted, of_block, terms, shard)


def statistics_and_gradient_(
    chunk: Chunk, grad_loss: Tensor, terms: LossTerms, shard: VocabShard
) -> RowStatistics:
    """:func:`row_statistics` and :func:`logits_to_gradient_` for losses with ``grad_loss`` [R]."""
    # The gradient needs the sums of the other ranks: the exponentials are made again after.
    if shard.group is not None:
        found = row_statistics(chunk, terms, shard)
        gradient = RowGradient(found.maximum, found.sum_exp, grad_loss)
        logits_to_gradient_(chunk, gradient, terms, shard)
        return found
    blocks = []
    # With the whole vocabulary here, both are made of the same exponentials.
    for at, block in chunk.blocks():
        exponentials, sums = _exponentials(block, terms, shard)
        found = _combine(sums.unsqueeze(0), terms, shard)
        gradient = RowGradient(found.maximum, found.sum_exp, grad_loss[at])
        _write_gradient(block, exponentials, None, gradient, terms, shard)
        blocks.append(torch.stack([found.maximum, found.sum_exp, found.loss]))
    maximum, sum_exp, loss = torch.cat(blocks, 1)
    return RowStatistics(maximum, sum_exp, loss, None)


def _exponentials(block: Chunk, terms: LossTerms, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Exponentials [B, V] relative to the rank's maximum; the rank's sums [k, B].

    The sums: maximum, sum of exponentials, target logit, then what ``terms`` needs.
    """
    work = block.scaled()
    if shard.size == 0:
        count = 3 + bool(terms.label_smoothing) + terms.entropy
        sums = work.new_zeros(count, len(work))
        # A rank of padding alone: its maximum never wins, and its sums count as 0.
        sums[0] = -torch.inf
        return work, sums
    column, inside = shard.columns(block.labels[:, None])
    maximum = work.amax(1)
    target = torch.where(inside, work.gather(1, column), 0).squeeze(1)
    rest = [work.sum(1)] if terms.label_smoothing else []
    # From here on no exponential is above 1, so that none overflows.
    work.sub_(maximum[:, None])
    shifted = work.clone() if terms.entropy else None
    total = work.exp_().sum(1)
    if shifted is not None:
        rest.append(shifted.mul_(work).sum(1))
    return work, torch.stack([maximum, total, target, *rest])


def _combine(gathered: Tensor, terms: LossTerms, shard: VocabShard) -> RowStatistics:
    """Statistics of the whole vocabulary from the sums [ranks, k, R] of its slices."""
    maxima, sums, targets, *rest = gathered.unbind(1)
    # Each rank's sum of exponentials is relative to its own maximum, so that none overflows.
    maximum = maxima.amax(0)
    shift = maxima - maximum
    scale = shift.exp()
    sum_exp = (sums * scale).sum(0)
    log_sum = sum_exp.log()
    smoothing = terms.label_smoothing
    # One rank has the target's logit, the others 0; relative to the maximum, as the sum is.
    loss = log_sum - (1 - smoothing) * (targets.sum(0) - maximum)
    if smoothing:
        loss = loss - smoothing * (rest.pop(0).sum(0) / shard.vocab_size - maximum)
    if terms.z_loss:
        loss = loss + terms.z_loss * (maximum + log_sum).square()
    if not terms.entropy:
        return RowStatistics(maximum, sum_exp, loss, None)
    # A rank with padding only has a maximum of minus infinity, and 0 * inf is not 0.
    moments = torch.where(sums > 0, scale * (rest.pop(0) + sums * shift), 0).sum(0)
    return RowStatistics(maximum, sum_exp, loss, log_sum - moments / sum_exp)


def _write_gradient(
    block: Chunk,
    exponentials: Tensor,
    shifted: Tensor | None,
    gradient: RowGradient,
    terms: LossTerms,
    shard: VocabShard,
) -> None:
    """Overwrites the block's logits; uses up ``exponentials`` and ``shifted`` logits [B, V].

    Both are relative to the gradient's maximum; ``shifted`` is for the entropy's gradient only.
    """
    if shard.size == 0:
        return
    of_loss = block.over_temperature(gradient.grad_loss)
    log_sum = gradient.sum_exp.log()
    of_softmax = of_loss * (1 + 2 * terms.z_loss * (gradient.maximum + log_sum))
    if shifted is None:
        exponentials.mul_((of_softmax / gradient.sum_exp)[:, None])
    else:
        assert gradient.entropy is not None
        assert gradient.grad_entropy is not None
        of_entropy = block.over_temperature(gradient.grad_entropy)
        shifted.add_((gradient.entropy - log_sum)[:, None]).mul_(-of_entropy[:, None])
        shifted.add_(of_softmax[:, None]).div_(gradient.sum_exp[:, None])
        exponentials.mul_(shifted)
    if terms.label_smoothing:
        exponentials.sub_((of_loss * (terms.label_smoothing / shard.vocab_size))[:, None])
    # The target is taken off in float32: p - 1 of a sure prediction would vanish in bfloat16.
    column, inside = shard.columns(block.labels[:, None])
    of_target = torch.where(inside, (of_loss * (1 - terms.label_smoothing))[:, None], 0)
    at_target = exponentials.gather(1, column) - of_target
    block.logits.copy_(exponentials.scatter_(1, column, at_target))
