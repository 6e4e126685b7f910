"""The weight's gradient, added up over chunks."""

from __future__ import annotations

import torch
from torch import Tensor

# Products that a chunk's share is made of, each on its way into one half of the float32 sum.
_PRODUCTS = 32


class WeightGradient:
    """Adds up ``dlogits.T @ hidden`` of all chunks, in float32 for 16-bit inputs.

    For these the float32 sum of the first half of the vocabulary lies in the memory of the result,
    which is as large, and only the other half is extra.

    Args:
        weight: [local vocabulary, h].
        size: Rows that belong to the real vocabulary; the gradient of the others is zero.
    """

    def __init__(self, weight: Tensor, size: int) -> None:
        self._result = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        self._real = self._result[:size]
        if weight.dtype in (torch.float32, torch.float64):
            self._sums = None
            return
        head = size // 2
        width = weight.shape[1]
        in_result = self._real.view(-1)[: 2 * head * width].view(torch.float32).view(head, width)
        self._sums = (in_result, torch.zeros(size - head, width, device=weight.device))

    def add(self, dlogits: Tensor, hidden: Tensor) -> None:
        """Adds the share of one chunk: ``dlogits`` [R, size], ``hidden`` [R, h]."""
        if self._sums is None:
            self._real.addmm_(dlogits.t(), hidden)
            return
        first = 0
        for part in self._parts():
            columns = dlogits[:, first : first + len(part)]
            part.add_(_product(columns.t(), hidden))
            first += len(part)

    def result(self) -> Tensor:
        """The gradient [local vocabulary, h] in the weight's dtype; nothing can be added after."""
        if self._sums is not None:
            first = 0
            # In this order a part overwrites only sums that were read already.
            for part in self._parts():
                self._real[first : first + len(part)] = part.to(self._real.dtype)
                first += len(part)
            self._sums = None
        return self._result

    def _parts(self) -> list[Tensor]:
        """The float32 sums in pieces of some rows, in the order of the vocabulary."""
        assert self._sums is not None
        rows = max(-(-len(self._real) // _PRODUCTS), 1)
        return [part for half in self._sums for part in half.split(rows) if len(part)]


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right)
