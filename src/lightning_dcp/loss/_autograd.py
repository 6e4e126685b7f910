"""The two forms as autograd functions, both a loop over chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.loss._rows import TargetRows
from lightning_dcp.loss._shard import VocabShard
from lightning_dcp.loss._softmax import (
    Chunk,
    LossTerms,
    RowGradient,
    logits_to_gradient_,
    row_statistics,
    statistics_and_gradient_,
    statistics_dtype,
)

# Products that a chunk's share is made of, each on its way into one half of the float32 sum.
_PRODUCTS = 32


@dataclass(frozen=True)
class LossArguments:
    """Everything but the two differentiable inputs."""

    rows: TargetRows
    shard: VocabShard
    terms: LossTerms
    chunk_rows: int


def apply(function: Any, hidden: Tensor, weight: Tensor, arguments: LossArguments) -> Any:
    """``function``, one of the autograd functions, of the two differentiable inputs."""
    if not torch.is_grad_enabled():
        # needs_input_grad does not know of no_grad, and would have the gradients made.
        hidden, weight = hidden.detach(), weight.detach()
    # Products stay in the dtype of the inputs, where autocast would cut float32 down to 16 bits.
    with torch.autocast(hidden.device.type, enabled=False):
        return function.apply(hidden, weight, arguments)


class SummedLoss(torch.autograd.Function):
    """The sum of all rows' losses; the gradients are made along with it, while logits exist."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, arguments: LossArguments) -> Tensor:
        losses, maxima, sums = per_row(3, hidden, arguments)
        gradients = _Gradients(hidden, weight, arguments, ctx.needs_input_grad)
        # 0 in rows that do not count: their logits' gradient is 0 then.
        ones = arguments.rows.select(losses.new_ones(arguments.rows.num_rows))
        for chunk in logit_chunks(hidden, weight, arguments):
            at = chunk.rows
            # Now, while the chunk's logits exist: the backward pass would have to make them again.
            if any(ctx.needs_input_grad):
                found = statistics_and_gradient_(chunk, ones[at], arguments.terms, arguments.shard)
                gradients.add(chunk)
            else:
                found = row_statistics(chunk, arguments.terms, arguments.shard)
            losses[at], maxima[at], sums[at] = found.loss, found.maximum, found.sum_exp
        ctx.arguments, ctx.made = arguments, gradients.result()
        ctx.save_for_backward(hidden, weight, maxima, sums)
        return arguments.rows.expand(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, maxima, sums = ctx.saved_tensors
        made, ctx.made = ctx.made, None
        if made is not None:
            # In place: a copy of the weight's gradient would be as large as many chunks.
            return *(None if one is None else one.mul_(grad) for one in made), None
        # Another backward over a retained graph: the gradients made in forward were given away.
        arguments: LossArguments = ctx.arguments
        rows = arguments.rows
        gradient = RowGradient(maxima, sums, rows.select(grad.to(sums.dtype).expand(rows.num_rows)))
        return _from_row_gradient(ctx, hidden, weight, gradient)


class RowLosses(torch.autograd.Function):
    """Each row's loss and, if asked for, entropy; backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, arguments: LossArguments
    ) -> tuple[Tensor, Tensor | None]:
        # None for an output that nobody used: zeros would cost its terms a pass.
        ctx.set_materialize_grads(False)
        losses, maxima, sums, entropies = per_row(4, hidden, arguments)
        for chunk in logit_chunks(hidden, weight, arguments):
            found = row_statistics(chunk, arguments.terms, arguments.shard)
            at = chunk.rows
            losses[at], maxima[at], sums[at] = found.loss, found.maximum, found.sum_exp
            if found.entropy is not None:
                entropies[at] = found.entropy
        entropy = entropies if arguments.terms.entropy else None
        ctx.arguments = arguments
        ctx.save_for_backward(hidden, weight, maxima, sums, entropy)
        expand = arguments.rows.expand
        return expand(losses), None if entropy is None else expand(entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, maxima, sums, entropy = ctx.saved_tensors
        if grad_losses is None and grad_entropy is None:
            return None, None, None
        select = ctx.arguments.rows.select
        of_losses = torch.zeros_like(sums) if grad_losses is None else select(grad_losses)
        of_entropy = None if grad_entropy is None else select(grad_entropy)
        gradient = RowGradient(maxima, sums, of_losses, entropy, of_entropy)
        return _from_row_gradient(ctx, hidden, weight, gradient)


def _from_row_gradient(ctx: Any, hidden: Tensor, weight: Tensor, gradient: RowGradient) -> Any:
    """What a backward pass gives, from what ``gradient`` has of all rows."""
    arguments: LossArguments = ctx.arguments

    def to_gradient_(chunk: Chunk) -> None:
        logits_to_gradient_(chunk, gradient.at(chunk.rows), arguments.terms, arguments.shard)

    needed = ctx.needs_input_grad
    return *input_gradients(hidden, weight, arguments, needed, to_gradient_), None


class _WeightGradient:
    """Adds up ``dlogits.T @ hidden`` of all chunks, in float32 for 16-bit inputs.

    Of ``weight`` [local vocabulary, h] the first ``size`` rows belong to the real vocabulary; the
    gradient of the others is zero.
    """

    def __init__(self, weight: Tensor, size: int) -> None:
        self._result = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        self._real = self._result[:size]
        if weight.dtype in (torch.float32, torch.float64):
            self._sums = None
            return
        # The float32 sum of the vocabulary's first half lies in the memory of the result, of which
        # two rows hold one of the sum: only the other half is extra memory.
        head = size // 2
        width = weight.shape[1]
        in_result = self._real.view(-1)[: 2 * head * width].view(torch.float32).view(head, width)
        self._sums = (in_result, torch.zeros(size - head, width, device=weight.device))

    def add(self, dlogits: Tensor, hidden: Tensor) -> None:
        """Adds the share of one chunk: ``dlogits`` [R, size], ``hidden`` [R, h]."""
        if self._sums is None:
            # As exact as the result: it adds up in place.
            self._real.addmm_(dlogits.t(), hidden)
            return
        # The CPU has no such product: there each is rounded to 16 bits before it is added.
        on_gpu: dict[str, Any] = {"out_dtype": torch.float32} if hidden.is_cuda else {}
        for at, part in self._parts():
            part.add_(torch.mm(dlogits[:, at].t(), hidden, **on_gpu))

    def result(self) -> Tensor:
        """The gradient [local vocabulary, h] in the weight's dtype; nothing can be added after."""
        if self._sums is not None:
            # In this order a part overwrites only sums that were read already.
            for at, part in self._parts():
                self._real[at] = part.to(self._real.dtype)
            self._sums = None
        return self._result

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """The float32 sums in pieces of some rows and where these are, in vocabulary order."""
        assert self._sums is not None
        rows, first = max(-(-len(self._real) // _PRODUCTS), 1), 0
        for half in self._sums:
            for part in half.split(rows) if len(half) else ():
                yield slice(first, first + len(part)), part
                first += len(part)


class _Gradients:
    """Collects both inputs' gradients over the chunks, each only if it is needed."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, arguments: LossArguments, needed: tuple[bool, ...]
    ) -> None:
        self._arguments = arguments
        self._weight = weight[: arguments.shard.size]
        self._hidden_grad = torch.zeros_like(hidden) if needed[0] else None
        self._weight_grad = _WeightGradient(weight, arguments.shard.size) if needed[1] else None

    def add(self, chunk: Chunk) -> None:
        """Adds the share of one chunk, whose logits have been overwritten by their gradient."""
        if self._hidden_grad is not None:
            self._arguments.rows.store(self._hidden_grad, chunk.rows, chunk.logits @ self._weight)
        if self._weight_grad is not None:
            self._weight_grad.add(chunk.logits, chunk.hidden)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of hidden (summed over the tensor-parallel group) and weight."""
        if self._hidden_grad is not None:
            # Each rank has the share of its slice of the vocabulary: one sum for all chunks.
            self._arguments.shard.reduce_(self._hidden_grad)
        return self._hidden_grad, None if self._weight_grad is None else self._weight_grad.result()


def input_gradients(
    hidden: Tensor,
    weight: Tensor,
    arguments: LossArguments,
    needed: tuple[bool, ...],
    to_gradient_: Callable[[Chunk], None],
) -> tuple[Tensor | None, Tensor | None]:
    """Both inputs' gradients in a pass of its own; ``to_gradient_`` overwrites a chunk's logits."""
    # Autograd runs backward passes under whatever autocast their caller has.
    with torch.autocast(hidden.device.type, enabled=False):
        gradients = _Gradients(hidden, weight, arguments, needed)
        for chunk in logit_chunks(hidden, weight, arguments):
            to_gradient_(chunk)
            gradients.add(chunk)
        return gradients.result()


def logit_chunks(hidden: Tensor, weight: Tensor, arguments: LossArguments) -> Iterator[Chunk]:
    # The padded vocabulary's last rows never count: their logits are not even made.
    rows, real = arguments.rows, weight[: arguments.shard.size]
    # One buffer for all chunks: the next one's, made anew, would lie beside this one's.
    buffer = hidden.new_empty(min(arguments.chunk_rows, len(rows)), len(real))
    inverse = rows.inverse_temperature
    for first in range(0, len(rows), arguments.chunk_rows):
        at = slice(first, min(first + arguments.chunk_rows, len(rows)))
        states = rows.hidden(hidden, at)
        logits = torch.mm(states, real.t(), out=buffer[: len(states)])
        scale = inverse if inverse is None or inverse.numel() == 1 else inverse[at]
        yield Chunk(at, states, logits, rows.labels[at], scale)


def per_row(count: int, hidden: Tensor, arguments: LossArguments) -> Tensor:
    """``count`` results of each computed row, to be filled in: [count, n]."""
    dtype = statistics_dtype(hidden.dtype)
    return torch.empty(count, len(arguments.rows), dtype=dtype, device=hidden.device)
