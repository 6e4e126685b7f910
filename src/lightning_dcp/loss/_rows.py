"""Which rows have a target, and what each of them needs: checked once, read chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dcp.config.checks import check_above_zero

IGNORE_INDEX = -100


@dataclass(frozen=True)
class TargetRows:
    """The rows that count.

    Attributes:
        num_rows: Rows of the caller's tensors.
        labels: Global target ids [n].
        inverse_temperature: 1 / temperature [n] or [1], None for a temperature of 1.
        index: Positions of the n rows among the caller's, None if n is ``num_rows``.
        valid: Whether each row counts [num_rows], None if all do.
    """

    num_rows: int
    labels: Tensor
    inverse_temperature: Tensor | None
    index: Tensor | None
    valid: Tensor | None

    def __len__(self) -> int:
        return self.labels.shape[0]

    def hidden(self, hidden: Tensor, rows: slice) -> Tensor:
        """The hidden states [n, h] of ``rows``, finite where a row does not count."""
        if self.index is not None:
            return hidden.index_select(0, self.index[rows])
        if self.valid is not None:
            return torch.where(self.valid[rows, None], hidden[rows], hidden.new_zeros(()))
        return hidden[rows]

    def select(self, values: Tensor) -> Tensor:
        """``values`` [num_rows, ...] as [n, ...], zero where a row does not count."""
        if self.index is not None:
            return values.index_select(0, self.index)
        return self._zero_where_invalid(values)

    def expand(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`select`: [n, ...] to [num_rows, ...]."""
        if self.index is not None:
            whole = values.new_zeros(self.num_rows, *values.shape[1:])
            return whole.index_copy_(0, self.index, values)
        return self._zero_where_invalid(values)

    def _zero_where_invalid(self, values: Tensor) -> Tensor:
        # Selected, not multiplied: 0 * NaN is NaN.
        if self.valid is None:
            return values
        return torch.where(self.valid.view(-1, *[1] * (values.dim() - 1)), values, 0)

    def store(self, target: Tensor, rows: slice, values: Tensor) -> None:
        """Writes ``values`` [n, h] of ``rows`` to their places in ``target`` [num_rows, h]."""
        if self.index is not None:
            target.index_copy_(0, self.index[rows], values)
        else:
            target[rows] = values


def target_rows(
    labels: Tensor,
    *,
    vocab_size: int,
    loss_mask: Tensor | None,
    temperature: float | Tensor | None,
    dtype: torch.dtype,
) -> TargetRows:
    """Finds the rows with a target; ``dtype`` is that of the statistics."""
    _check_mask(loss_mask)
    valid = _valid_rows(labels, loss_mask)
    check_labels(labels, vocab_size=vocab_size, loss_mask=loss_mask)
    inverse = _inverse_temperature(temperature, valid, dtype)
    num_rows = labels.shape[0]
    if not _may_synchronise(labels):
        # The number of rows that count would have to travel to the host. So every row is computed,
        # the others with zeros for hidden states and some id that exists as their target, and
        # their results are selected away.
        return TargetRows(num_rows, torch.where(valid, labels, 0), inverse, None, valid)
    # Nothing to pick: hidden states are then read as they lie, without a copy.
    if bool(valid.all()):
        return TargetRows(num_rows, labels, inverse, None, None)
    index = valid.nonzero().squeeze(1)
    if inverse is not None and inverse.numel() > 1:
        inverse = inverse[index]
    return TargetRows(num_rows, labels[index], inverse, index, valid)


def check_labels(labels: Tensor, *, vocab_size: int, loss_mask: Tensor | None = None) -> None:
    """Refuses labels [rows] that are neither ``IGNORE_INDEX`` nor in the real vocabulary.

    Rows that ``loss_mask`` [rows] leaves out may hold any label.

    Raises:
        ValueError: On the CPU. On another device the check is an asynchronous assertion, which
            fails at the next synchronisation: call this on ``labels.cpu()`` to see which label.
    """
    bad = _valid_rows(labels, loss_mask) & ((labels < 0) | (labels >= vocab_size))
    what = f"outside the vocabulary (0 to {vocab_size - 1}) and not {IGNORE_INDEX} (ignored)"
    for (row,) in first_bad(bad, f"labels: a label is {what}"):
        raise ValueError(
            f"labels[{row}] is {int(labels[row])}, {what}; {int(bad.sum())} of {labels.numel()} "
            f"labels are. Set rows without a target to {IGNORE_INDEX}"
        )


def first_bad(bad: Tensor, message: str) -> list[list[int]]:
    """The first index at which ``bad`` holds, if any; none on a GPU, where ``message`` is asserted.

    The host would wait for an answer from there, at every micro-batch.
    """
    if bad.device.type != "cpu":
        torch._assert_async(~bad.any(), message)
        return []
    # any() first: the indices of a mask without True cost a second pass.
    return bad.nonzero()[:1].tolist() if bool(bad.any()) else []


def _check_mask(loss_mask: Tensor | None) -> None:
    if loss_mask is None or loss_mask.dtype == torch.bool:
        return
    bad = (loss_mask != 0) & (loss_mask != 1)
    for (row,) in first_bad(bad, "loss_mask: a value is neither 0 nor 1"):
        raise ValueError(
            f"loss_mask[{row}] is {float(loss_mask[row])}: a mask holds 0 and 1 only. Multiply the "
            f"losses of reduction='none' by other weights"
        )


def _may_synchronise(tensor: Tensor) -> bool:
    """Whether shapes may depend on values: on a GPU the host would wait for them."""
    return tensor.device.type == "cpu"


def _valid_rows(labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    valid = labels != IGNORE_INDEX
    return valid if loss_mask is None else valid & (loss_mask != 0)


def _inverse_temperature(
    temperature: float | Tensor | None, valid: Tensor, dtype: torch.dtype
) -> Tensor | None:
    if temperature is None:
        return None
    if not isinstance(temperature, Tensor):
        check_above_zero(temperature=temperature)
        if temperature == 1:
            return None
        return torch.tensor([1 / temperature], dtype=dtype).to(valid.device)
    # Rows without a target may hold anything, zeros of a padded batch for one.
    temperature = torch.where(valid, temperature.to(dtype), 1)
    # Not "<= 0", which lets NaN pass.
    bad = ~((temperature > 0) & temperature.isfinite())
    for (row,) in first_bad(bad, "temperature: a value is not finite and above 0"):
        raise ValueError(
            f"temperature[{row}] is {float(temperature[row])}: every row with a target needs a "
            f"finite temperature above 0"
        )
    return temperature.reciprocal()
