"""The arithmetic on one chunk of logits: statistics of each row, and the gradient in place.

Shapes: R rows of the chunk, V local vocabulary (real rows only), T columns of a tile. Logits are in
the dtype of the inputs; everything else is float32 (float64 for float64 inputs), one tile at a
time, so that a chunk never exists in float32 beside its bfloat16 form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dcp.loss._shard import VocabShard

# Tiles of a chunk: few, since every operation on one waits for all threads or launches a kernel.
_TILES = 16


@dataclass(frozen=True)
class Objective:
    """What is added to the plain cross-entropy, and what else is wanted of a row."""

    label_smoothing: float
    z_loss: float
    entropy: bool


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

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """Views of the logits [R, T] that cover all columns, each with its first column."""
        width = max(-(-self.logits.shape[1] // _TILES), 1)
        for first in range(0, self.logits.shape[1], width):
            yield first, self.logits[:, first : first + width]

    def scaled(self, tile: Tensor) -> Tensor:
        """A copy of ``tile`` over the temperature, in the dtype of the statistics."""
        work = tile.to(statistics_dtype(tile.dtype), copy=True)
        inverse = self.inverse_temperature
        return work if inverse is None else work.mul_(inverse[:, None])


@dataclass(frozen=True)
class RowStatistics:
    """Results over the whole vocabulary, each [R]; logits are those after temperature.

    The maximum and the sum of exponentials relative to it stay apart: their log-sum-exp would lose
    the digits of the sum where logits are large.
    """

    maximum: Tensor
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
        return RowGradient(
            self.maximum[rows],
            self.sum_exp[rows],
            self.grad_loss[rows],
            None if self.entropy is None else self.entropy[rows],
            None if self.grad_entropy is None else self.grad_entropy[rows],
        )


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for inputs of that dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_statistics(chunk: Chunk, objective: Objective, shard: VocabShard) -> RowStatistics:
    """Loss and entropy of every row, reduced over the tensor-parallel group.

    One collective: each rank sends its own maximum along with sums relative to it.
    """
    gathered = shard.gather(_local_sums(chunk, objective, shard))
    maxima, sums, targets, *rest = gathered.unbind(1)
    maximum = maxima.amax(0)
    shift = maxima - maximum
    scale = shift.exp()
    sum_exp = (sums * scale).sum(0)
    log_sum = sum_exp.log()
    smoothing = objective.label_smoothing
    loss = log_sum - (1 - smoothing) * (targets.sum(0) - maximum)
    if smoothing:
        loss = loss - smoothing * (rest.pop(0).sum(0) / shard.vocab_size - maximum)
    if objective.z_loss:
        loss = loss + objective.z_loss * (maximum + log_sum).square()
    if not objective.entropy:
        return RowStatistics(maximum, sum_exp, loss, None)
    # A rank with padding only has a maximum of minus infinity, and 0 * inf is not 0.
    moments = torch.where(sums > 0, scale * (rest.pop(0) + sums * shift), 0).sum(0)
    return RowStatistics(maximum, sum_exp, loss, log_sum - moments / sum_exp)


def _local_sums(chunk: Chunk, objective: Objective, shard: VocabShard) -> Tensor:
    """[k, R]: maximum, sum of exp, target logit, then what ``objective`` needs."""
    logits, num_rows = chunk.logits, len(chunk.labels)
    dtype = statistics_dtype(logits.dtype)
    total, logit_sum, moment = torch.zeros(3, num_rows, dtype=dtype, device=logits.device)
    if shard.size == 0:
        maximum, target = torch.full_like(total, -torch.inf), total
    else:
        column, inside = _column(chunk.labels, shard.first, shard.size)
        target = torch.where(inside, logits.gather(1, column).squeeze(1), 0).to(dtype)
        target = chunk.over_temperature(target)
        maximum = chunk.over_temperature(logits.amax(1).to(dtype))
    for _, tile in chunk.tiles():
        shifted = chunk.scaled(tile).sub_(maximum[:, None])
        if objective.label_smoothing:
            logit_sum += (shifted + maximum[:, None]).sum(1)
        if objective.entropy:
            exponentials = shifted.exp()
            total += exponentials.sum(1)
            moment += exponentials.mul_(shifted).sum(1)
        else:
            total += shifted.exp_().sum(1)
    sums = [maximum, total, target]
    if objective.label_smoothing:
        sums.append(logit_sum)
    if objective.entropy:
        sums.append(moment)
    return torch.stack(sums)


def logits_to_gradient_(
    chunk: Chunk, gradient: RowGradient, objective: Objective, shard: VocabShard
) -> Tensor:
    """Overwrites the chunk's logits [R, V] by the gradient with respect to them.

    With p the softmax, q the smoothed target and H the entropy, the gradient of a row is
    ``grad_loss * ((1 + 2 * z_loss * log_sum_exp) * p - q) - grad_entropy * p * (log p + H)``,
    over the temperature.
    """
    of_loss = chunk.over_temperature(gradient.grad_loss)
    log_sum = gradient.sum_exp.log()
    of_softmax = of_loss * (1 + 2 * objective.z_loss * (gradient.maximum + log_sum))
    of_uniform = of_loss * (objective.label_smoothing / shard.vocab_size)
    of_target = of_loss * (1 - objective.label_smoothing)
    for first, tile in chunk.tiles():
        work = chunk.scaled(tile).sub_(gradient.maximum[:, None])
        if gradient.grad_entropy is None:
            work.exp_().mul_((of_softmax / gradient.sum_exp)[:, None])
        else:
            assert gradient.entropy is not None
            of_entropy = chunk.over_temperature(gradient.grad_entropy)
            factor = (work + (gradient.entropy - log_sum)[:, None]).mul_(-of_entropy[:, None])
            factor.add_(of_softmax[:, None]).div_(gradient.sum_exp[:, None])
            work.exp_().mul_(factor)
        if objective.label_smoothing:
            work.sub_(of_uniform[:, None])
        # The target is taken off in float32: p - 1 of a sure prediction would vanish in bfloat16.
        column, inside = _column(chunk.labels, shard.first + first, tile.shape[1])
        at_target = work.gather(1, column) - torch.where(inside, of_target, 0)[:, None]
        tile.copy_(work.scatter_(1, column, at_target))
    return chunk.logits


def _column(labels: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Column [R, 1] of each label among ``width`` from id ``first``; whether it is there [R]."""
    column = labels - first
    inside = (column >= 0) & (column < width)
    return column.clamp(0, width - 1)[:, None], inside
