"""The two forms as autograd functions, both a loop over chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.loss._rows import TargetRows
from lightning_dcp.loss._shard import VocabShard
from lightning_dcp.loss._softmax import (
    Chunk,
    Objective,
    RowGradient,
    logits_to_gradient_,
    row_statistics,
    statistics_and_gradient_,
    statistics_dtype,
)
from lightning_dcp.loss._weight_grad import WeightGradient


@dataclass(frozen=True)
class Problem:
    """Everything but the two differentiable inputs."""

    rows: TargetRows
    shard: VocabShard
    objective: Objective
    chunk_rows: int


class SummedLoss(torch.autograd.Function):
    """The sum of all rows' losses; the gradients are made along with it, while logits exist."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, problem: Problem) -> Tensor:
        losses, maxima, sums = _per_row(3, hidden, problem)
        gradients = _Gradients(hidden, weight, problem, ctx.needs_input_grad)
        ones = problem.rows.select(losses.new_ones(problem.rows.num_rows))
        for chunk in _chunks(hidden, weight, problem):
            at = chunk.rows
            if any(ctx.needs_input_grad):
                found = statistics_and_gradient_(chunk, ones[at], problem.objective, problem.shard)
                gradients.add(chunk)
            else:
                found = row_statistics(chunk, problem.objective, problem.shard)
            losses[at], maxima[at], sums[at] = found.loss, found.maximum, found.sum_exp
        ctx.problem, ctx.made = problem, gradients.result()
        ctx.save_for_backward(hidden, weight, maxima, sums)
        return problem.rows.expand(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, maxima, sums = ctx.saved_tensors
        made, ctx.made = ctx.made, None
        if made is not None:
            # In place: a copy of the weight's gradient would be as large as many chunks.
            return *(None if one is None else one.mul_(grad) for one in made), None
        # Another backward over a retained graph: the gradients made in forward were given away.
        rows = ctx.problem.rows
        gradient = RowGradient(maxima, sums, rows.select(grad.to(sums.dtype).expand(rows.num_rows)))
        return *_gradients(hidden, weight, ctx.problem, ctx.needs_input_grad, gradient), None


class RowLosses(torch.autograd.Function):
    """Each row's loss and, if asked for, entropy; backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        losses, maxima, sums, entropies = _per_row(4, hidden, problem)
        for chunk in _chunks(hidden, weight, problem):
            found = row_statistics(chunk, problem.objective, problem.shard)
            at = chunk.rows
            losses[at], maxima[at], sums[at] = found.loss, found.maximum, found.sum_exp
            if found.entropy is not None:
                entropies[at] = found.entropy
        entropy = entropies if problem.objective.entropy else None
        ctx.problem = problem
        ctx.save_for_backward(hidden, weight, maxima, sums, entropy)
        expand = problem.rows.expand
        return expand(losses), None if entropy is None else expand(entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor | None, grad_entropy: Tensor | None) -> Any:
        problem: Problem = ctx.problem
        hidden, weight, maxima, sums, entropy = ctx.saved_tensors
        if grad_losses is None and grad_entropy is None:
            return None, None, None
        select = problem.rows.select
        of_losses = torch.zeros_like(sums) if grad_losses is None else select(grad_losses)
        of_entropy = None if grad_entropy is None else select(grad_entropy)
        gradient = RowGradient(maxima, sums, of_losses, entropy, of_entropy)
        return *_gradients(hidden, weight, problem, ctx.needs_input_grad, gradient), None


class _Gradients:
    """Collects both inputs' gradients over the chunks, each only if it is needed."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, problem: Problem, needed: tuple[bool, ...]
    ) -> None:
        self._problem = problem
        self._weight = weight[: problem.shard.size]
        self._hidden_grad = torch.zeros_like(hidden) if needed[0] else None
        self._weight_grad = WeightGradient(weight, problem.shard.size) if needed[1] else None

    def add(self, chunk: Chunk) -> None:
        """Adds the share of one chunk, whose logits have been overwritten by their gradient."""
        if self._hidden_grad is not None:
            self._problem.rows.store(self._hidden_grad, chunk.rows, chunk.logits @ self._weight)
        if self._weight_grad is not None:
            self._weight_grad.add(chunk.logits, chunk.hidden)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of hidden (summed over the tensor-parallel group) and weight."""
        if self._hidden_grad is not None:
            self._problem.shard.reduce_(self._hidden_grad)
        return self._hidden_grad, None if self._weight_grad is None else self._weight_grad.result()


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    problem: Problem,
    needed: tuple[bool, ...],
    gradient: RowGradient,
) -> tuple[Tensor | None, Tensor | None]:
    """Both inputs' gradients with the statistics of an earlier pass; logits are made again."""
    with torch.autocast(hidden.device.type, enabled=False):
        gradients = _Gradients(hidden, weight, problem, needed)
        for chunk in _chunks(hidden, weight, problem):
            of_chunk = gradient.at(chunk.rows)
            logits_to_gradient_(chunk, of_chunk, problem.objective, problem.shard)
            gradients.add(chunk)
        return gradients.result()


def _chunks(hidden: Tensor, weight: Tensor, problem: Problem) -> Iterator[Chunk]:
    rows, real = problem.rows, weight[: problem.shard.size]
    buffer = hidden.new_empty(min(problem.chunk_rows, len(rows)), len(real))
    inverse = rows.inverse_temperature
    for first in range(0, len(rows), problem.chunk_rows):
        at = slice(first, min(first + problem.chunk_rows, len(rows)))
        states = rows.hidden(hidden, at)
        logits = torch.mm(states, real.t(), out=buffer[: len(states)])
        scale = inverse if inverse is None or inverse.numel() == 1 else inverse[at]
        yield Chunk(at, states, logits, rows.labels[at], scale)


def _per_row(count: int, hidden: Tensor, problem: Problem) -> Tensor:
    """``count`` results of each computed row, to be filled in: [count, n]."""
    dtype = statistics_dtype(hidden.dtype)
    return torch.empty(count, len(problem.rows), dtype=dtype, device=hidden.device)
