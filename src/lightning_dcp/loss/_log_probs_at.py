"""Log-probabilities of several given ids per row, without the logits: for distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.loss._autograd import Problem, _chunks, _per_row
from lightning_dcp.loss._linear_cross_entropy import (
    _check_tensors,
    _default_chunk_rows,
    _may_synchronise,
)
from lightning_dcp.loss._rows import IGNORE_INDEX, target_rows
from lightning_dcp.loss._shard import VocabShard, make_shard
from lightning_dcp.loss._softmax import Chunk, Objective, row_statistics, statistics_dtype
from lightning_dcp.loss._weight_grad import WeightGradient


def linear_log_probs_at(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    loss_mask: Tensor | None = None,
    temperature: float | Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Log-softmax of ``hidden @ weight.T / temperature`` at ``k`` ids a row, in chunks of rows.

    Backward computes the logits again, as ``linear_cross_entropy`` with ``reduction="none"`` does,
    and everything that is said there on types and ranks holds here.

    Args:
        hidden: Hidden states [rows, h], the same on all ranks of ``tp_group``.
        weight: Output weight [local vocabulary, h] of ``hidden``'s dtype.
        ids: Global token ids [rows, k]; an id may occur more than once in a row.
        loss_mask: Rows that count [rows], bool or 0 and 1; ids of others may be anything.
        temperature: What logits are divided by: a number, or one per row [rows]. Default: 1.
        tp_group: Tensor-parallel group over which the vocabulary is split.
        vocab_size: Real vocabulary; rows of the padded weight from there on never count.
        chunk_rows: Rows whose logits exist at a time, the same on all ranks of ``tp_group``.

    Returns:
        [rows, k], float32 (float64 for float64 inputs), exactly 0 in rows that do not count.

    Raises:
        ValueError: A value or a shape that does not fit; an id outside the vocabulary, which on a
            GPU is an asynchronous assertion.
        TypeError: Different or unsupported dtypes.
    """
    if ids.dim() != 2 or ids.shape[1] < 1 or ids.shape[:1] != hidden.shape[:1]:
        raise ValueError(
            f"ids is {list(ids.shape)} for {hidden.shape[0]} rows of hidden: it must be [rows, k] "
            "with k of 1 or more"
        )
    _check_tensors(hidden, weight, ids[:, 0], loss_mask, temperature)
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}: it must be at least 1")
    shard = make_shard(weight, vocab_size, tp_group)
    counts = None if loss_mask is None else loss_mask != 0
    ids = _checked_ids(ids.long(), counts, shard.vocab_size)
    labels = ids[:, 0] if counts is None else ids[:, 0].masked_fill(~counts, IGNORE_INDEX)
    rows = target_rows(
        labels,
        vocab_size=shard.vocab_size,
        loss_mask=None,
        temperature=temperature,
        dtype=statistics_dtype(hidden.dtype),
        compact=_may_synchronise(labels),
    )
    ids = ids if rows.index is None else ids[rows.index]
    objective = Objective(label_smoothing=0.0, z_loss=0.0, entropy=False)
    problem = _Problem(rows, shard, objective, chunk_rows or _default_chunk_rows(hidden), ids)
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    with torch.autocast(hidden.device.type, enabled=False):
        return cast(Tensor, _LogProbsAt.apply(hidden, weight, problem))


def _checked_ids(ids: Tensor, counts: Tensor | None, vocab_size: int) -> Tensor:
    """The ids, those of rows that do not count replaced by real ones."""
    if counts is not None:
        ids = ids.masked_fill(~counts[:, None], 0)
    bad = (ids < 0) | (ids >= vocab_size)
    what = f"outside the vocabulary (0 to {vocab_size - 1})"
    if ids.device.type != "cpu":
        torch._assert_async(~bad.any(), f"ids: an id is {what}")
    elif bool(bad.any()):
        row, column = (int(where) for where in bad.nonzero()[0])
        raise ValueError(f"ids[{row}, {column}] is {int(ids[row, column])}, {what}")
    return ids


@dataclass(frozen=True)
class _Problem(Problem):
    """``ids`` are the wanted ones of the computed rows, [n, k]."""

    ids: Tensor


class _LogProbsAt(torch.autograd.Function):
    """As ``RowLosses``, for k ids a row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, problem: _Problem) -> Tensor:
        maxima, sums = _per_row(2, hidden, problem)
        found = maxima.new_empty(len(problem.rows), problem.ids.shape[1])
        for chunk in _chunks(hidden, weight, problem):
            at = chunk.rows
            logits = _logits_at(chunk, problem.ids[at], problem.shard)
            statistics = row_statistics(chunk, problem.objective, problem.shard)
            maxima[at], sums[at] = statistics.maximum, statistics.sum_exp
            found[at] = logits - statistics.maximum[:, None] - statistics.sum_exp.log()[:, None]
        ctx.problem = problem
        ctx.save_for_backward(hidden, weight, maxima, sums)
        return _expand(problem, found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        problem: _Problem = ctx.problem
        hidden, weight, maxima, sums = ctx.saved_tensors
        rows, shard = problem.rows, problem.shard
        real = weight[: shard.size]
        of_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = WeightGradient(weight, shard.size) if ctx.needs_input_grad[1] else None
        grad = _select(problem, grad)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(hidden, weight, problem):
                at = chunk.rows
                dlogits = _dlogits_(chunk, maxima[at], sums[at], grad[at], problem)
                if of_hidden is not None:
                    rows.store(of_hidden, at, dlogits @ real)
                if of_weight is not None:
                    of_weight.add(dlogits, chunk.hidden)
        if of_hidden is not None:
            shard.reduce_(of_hidden)
        return of_hidden, None if of_weight is None else of_weight.result(), None


def _logits_at(chunk: Chunk, ids: Tensor, shard: VocabShard) -> Tensor:
    """Logits after temperature at ``ids`` [R, k], of whichever rank has them."""
    dtype = statistics_dtype(chunk.logits.dtype)
    if shard.size == 0:
        local = torch.zeros(ids.shape, dtype=dtype, device=ids.device)
    else:
        column, inside = _columns(ids, shard.first, shard.size)
        local = torch.where(inside, chunk.logits.gather(1, column), 0).to(dtype)
        if chunk.inverse_temperature is not None:
            local *= chunk.inverse_temperature[:, None]
    return shard.reduce_(local)


def _dlogits_(
    chunk: Chunk, maximum: Tensor, sum_exp: Tensor, grad: Tensor, problem: _Problem
) -> Tensor:
    """Overwrites the logits by the gradient: ``grad`` at the ids, less its sum times softmax."""
    inverse = chunk.inverse_temperature
    grad = grad if inverse is None else grad * inverse[:, None]
    if problem.shard.size == 0:
        return chunk.logits
    factor = (-grad.sum(1) / sum_exp)[:, None]
    column, inside = _columns(problem.ids[chunk.rows], problem.shard.first, problem.shard.size)
    grad = torch.where(inside, grad, 0)
    for at, block in chunk.blocks():
        work = block.scaled().sub_(maximum[at, None]).exp_().mul_(factor[at])
        block.logits.copy_(work.scatter_add_(1, column[at], grad[at]))
    return chunk.logits


def _columns(ids: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Columns of ``ids`` [R, k] among ``width`` from id ``first``; whether they are there."""
    column = ids - first
    inside = (column >= 0) & (column < width)
    return column.clamp(0, width - 1), inside


def _select(problem: Problem, grad: Tensor) -> Tensor:
    """``TargetRows.select`` for [num_rows, k]."""
    rows = problem.rows
    if rows.index is not None:
        return grad.index_select(0, rows.index)
    return grad if rows.valid is None else torch.where(rows.valid[:, None], grad, 0)


def _expand(problem: Problem, found: Tensor) -> Tensor:
    """``TargetRows.expand`` for [n, k]."""
    rows = problem.rows
    if rows.index is not None:
        whole = found.new_zeros(rows.num_rows, found.shape[1])
        return whole.index_copy_(0, rows.index, found)
    return found if rows.valid is None else torch.where(rows.valid[:, None], found, 0)
