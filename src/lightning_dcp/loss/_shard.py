"""The slice of the vocabulary that one tensor-parallel rank holds."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Local sizes known to be equal over a group: the check costs a collective, so it is made once.
# Weakly: it must not keep the groups of a run that is over.
_checked: weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class VocabShard:
    """Where this rank's rows of the output weight lie in the vocabulary.

    Attributes:
        first: Global id of the first local row.
        size: Local rows that belong to the real vocabulary; the rest is padding.
        vocab_size: Real vocabulary over all ranks.
        group: The tensor-parallel group, None if this rank holds the whole vocabulary.
    """

    first: int
    size: int
    vocab_size: int
    group: dist.ProcessGroup | None

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The local column of each of ``ids``, of any shape, and whether this rank has it.

        This rank must have a column at all; ids of other ranks get one that stands for nothing.
        """
        column = ids - self.first
        inside = (column >= 0) & (column < self.size)
        return column.clamp(0, self.size - 1), inside

    def gather(self, statistics: Tensor) -> Tensor:
        """``statistics`` [k, rows] of every rank of the group: [ranks, k, rows]."""
        if self.group is None:
            return statistics.unsqueeze(0)
        ranks, (k, rows) = self.group.size(), statistics.shape
        gathered = statistics.new_empty(ranks * k, rows)
        dist.all_gather_single(gathered, statistics.contiguous(), group=self.group)
        return gathered.view(ranks, k, rows)

    def reduce_(self, partial: Tensor) -> Tensor:
        """Sums ``partial`` over the group, in place."""
        if self.group is not None:
            dist.all_reduce(partial, group=self.group)
        return partial


def make_shard(
    weight: Tensor, vocab_size: int | None, group: dist.ProcessGroup | None
) -> VocabShard:
    """The shard that ``weight`` [local vocabulary, h] is on this rank.

    Raises:
        ValueError: The ranks of ``group`` hold different numbers of rows, or ``vocab_size`` is not
            in 1 to ranks * local vocabulary.
    """
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    local = weight.shape[0]
    if group is not None and ranks > 1:
        _check_equal_sizes(local, group, weight.device)
    padded = ranks * local
    real = padded if vocab_size is None else vocab_size
    if not 1 <= real <= padded:
        raise ValueError(
            f"vocab_size is {real}, but the weight has {ranks} * {local} = {padded} rows over "
            f"tp_group: give the unpadded vocabulary, between 1 and {padded}"
        )
    size = min(max(real - rank * local, 0), local)
    # A group of one rank is none: the loss then makes its exponentials only once.
    return VocabShard(rank * local, size, real, group if ranks > 1 else None)


def _check_equal_sizes(local: int, group: dist.ProcessGroup, device: torch.device) -> None:
    if local in _checked.setdefault(group, set()):
        return
    sizes = torch.empty(group.size(), dtype=torch.long, device=device)
    mine = torch.tensor([local], dtype=torch.long, device=device)
    dist.all_gather_single(sizes, mine, group=group)
    if sizes.unique().numel() > 1:
        raise ValueError(
            f"weight has {sizes.tolist()} rows on the ranks of tp_group: pad the vocabulary to a "
            f"multiple of {group.size()} so that every rank holds the same number, and give "
            f"vocab_size"
        )
    _checked[group].add(local)
