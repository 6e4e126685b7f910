"""Log-probabilities of several given ids per row, without the logits: for distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.loss._autograd import (
    LossArguments,
    apply,
    input_gradients,
    logit_chunks,
    per_row,
)
from lightning_dcp.loss._linear_cross_entropy import check_tensors, rows_of_chunk
from lightning_dcp.loss._rows import IGNORE_INDEX, first_bad, target_rows
from lightning_dcp.loss._shard import VocabShard, make_shard
from lightning_dcp.loss._softmax import Chunk, LossTerms, row_statistics, statistics_dtype


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
    and everything that is said there on arguments, types and ranks holds here. ``ids`` [rows, k]
    are global token ids, of which one may occur more than once in a row; those of rows that
    ``loss_mask`` leaves out may be anything.

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
    check_tensors(hidden, weight, ids[:, 0], loss_mask, temperature)
    shard = make_shard(weight, vocab_size, tp_group)
    counts = None if loss_mask is None else loss_mask != 0
    ids = _checked_ids(ids.long(), counts, shard.vocab_size)
    # Rows are told by labels: the first id stands for all k.
    labels = ids[:, 0] if counts is None else ids[:, 0].masked_fill(~counts, IGNORE_INDEX)
    rows = target_rows(
        labels,
        vocab_size=shard.vocab_size,
        loss_mask=None,
        temperature=temperature,
        dtype=statistics_dtype(hidden.dtype),
    )
    ids = ids if rows.index is None else ids[rows.index]
    chunk_size = rows_of_chunk(hidden, chunk_rows)
    arguments = _ArgumentsWithIds(rows, shard, LossTerms(), chunk_size, ids)
    return cast(Tensor, apply(_LogProbsAt, hidden, weight, arguments))


def _checked_ids(ids: Tensor, counts: Tensor | None, vocab_size: int) -> Tensor:
    """The ids, those of rows that do not count replaced by real ones."""
    if counts is not None:
        ids = ids.masked_fill(~counts[:, None], 0)
    bad = (ids < 0) | (ids >= vocab_size)
    what = f"outside the vocabulary (0 to {vocab_size - 1})"
    for row, column in first_bad(bad, f"ids: an id is {what}"):
        raise ValueError(f"ids[{row}, {column}] is {int(ids[row, column])}, {what}")
    return ids


@dataclass(frozen=True)
class _ArgumentsWithIds(LossArguments):
    """``ids`` are the wanted ones of the computed rows, [n, k]."""

    ids: Tensor


class _LogProbsAt(torch.autograd.Function):
    """As ``RowLosses``, for k ids a row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, arguments: _ArgumentsWithIds) -> Tensor:
        maxima, sums = per_row(2, hidden, arguments)
        found = maxima.new_empty(len(arguments.rows), arguments.ids.shape[1])
        # Two collectives a chunk, in this order on every rank; chunks are as many on all of them.
        for chunk in logit_chunks(hidden, weight, arguments):
            at = chunk.rows
            logits = _logits_at(chunk, arguments.ids[at], arguments.shard)
            statistics = row_statistics(chunk, arguments.terms, arguments.shard)
            maxima[at], sums[at] = statistics.maximum, statistics.sum_exp
            # One after the other: added up first, the logarithm would lose digits to the maximum.
            found[at] = logits - statistics.maximum[:, None] - statistics.sum_exp.log()[:, None]
        ctx.arguments = arguments
        ctx.save_for_backward(hidden, weight, maxima, sums)
        return arguments.rows.expand(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        arguments: _ArgumentsWithIds = ctx.arguments
        hidden, weight, maxima, sums = ctx.saved_tensors
        grad = arguments.rows.select(grad)

        def to_gradient_(chunk: Chunk) -> None:
            at = chunk.rows
            _logits_to_gradient_(chunk, maxima[at], sums[at], grad[at], arguments)

        needed = ctx.needs_input_grad
        return *input_gradients(hidden, weight, arguments, needed, to_gradient_), None


def _logits_at(chunk: Chunk, ids: Tensor, shard: VocabShard) -> Tensor:
    """Logits after temperature at ``ids`` [R, k], of whichever rank has them; a collective."""
    dtype = statistics_dtype(chunk.logits.dtype)
    if shard.size == 0:
        # A rank of padding alone: it takes part in the sum all the same.
        local = torch.zeros(ids.shape, dtype=dtype, device=ids.device)
    else:
        column, inside = shard.columns(ids)
        local = torch.where(inside, chunk.logits.gather(1, column), 0).to(dtype)
        if chunk.inverse_temperature is not None:
            local *= chunk.inverse_temperature[:, None]
    return shard.reduce_(local)


def _logits_to_gradient_(
    chunk: Chunk, maximum: Tensor, sum_exp: Tensor, grad: Tensor, arguments: _ArgumentsWithIds
) -> None:
    """Overwrites the logits by the gradient: ``grad`` at the ids, less its sum times softmax."""
    if arguments.shard.size == 0:
        return
    inverse = chunk.inverse_temperature
    grad = grad if inverse is None else grad * inverse[:, None]
    # Of all k ids, those of other ranks too: the softmax is over the whole vocabulary.
    factor = (-grad.sum(1) / sum_exp)[:, None]
    column, inside = arguments.shard.columns(arguments.ids[chunk.rows])
    grad = torch.where(inside, grad, 0)
    for at, block in chunk.blocks():
        work = block.scaled().sub_(maximum[at, None]).exp_().mul_(factor[at])
        # Added, since one id may stand in a row twice.
        block.logits.copy_(work.scatter_add_(1, column[at], grad[at]))
