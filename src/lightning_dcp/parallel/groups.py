"""Process groups for every CP size of a DPxCP pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from lightning_dcp.config.parallel import cp_sizes_of_pool


def all_groups(size: int, num_ranks: int) -> list[range]:
    """The CP groups of ``size`` in a pool, as pool ranks: contiguous, aligned to ``size``.

    A last group that the pool cannot fill is left out (in a pool of 6 there is one group of 4).
    """
    return [range(first, first + size) for first in range(0, num_ranks - size + 1, size)]


@dataclass
class DynamicCPGroups:
    """The CP groups of this rank, one per CP size that it can be part of.

    Attributes:
        pool_ranks: Global ranks of the DPxCP pool, in pool order.
        rank: This process's index in the pool.
    """

    pool_ranks: tuple[int, ...]
    rank: int
    _groups: dict[int, dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def create(
        cls, pool_ranks: Sequence[int], *, timeout: timedelta | None = None
    ) -> DynamicCPGroups:
        """Makes the groups of this process's pool; a collective of the whole world."""
        # Ours, since Megatron-Core's own dynamic groups need an even pool. A rank is a member of
        # log2(pool) + 2 groups at most.
        pools: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(pools, list(pool_ranks))
        groups = cls(tuple(pool_ranks), pool_ranks.index(dist.get_rank()))
        # `new_group` wants every rank of the world, in one order, members or not. (With
        # `use_local_synchronization` its names are hashes of the ranks, and making the same groups
        # again after a teardown meets the stale addresses of the first ones in the store.)
        # Sorted, so that all ranks agree on the order of pools, whichever they are in.
        for pool in sorted({tuple(pool) for pool in pools}):
            for size in cp_sizes_of_pool(len(pool)):
                for members in all_groups(size, len(pool)):
                    ranks = [pool[member] for member in members]
                    group = dist.new_group(ranks, timeout=timeout, group_desc=f"DYNAMIC_CP_{size}")
                    if dist.get_rank() in ranks:
                        groups._groups[size] = group
        return groups

    @property
    def num_ranks(self) -> int:
        """Ranks of the pool."""
        return len(self.pool_ranks)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The CP sizes of which this rank has a group, ascending."""
        return tuple(self._groups)

    def __getitem__(self, size: int) -> dist.ProcessGroup:
        if size not in self._groups:
            raise ValueError(
                f"Rank {self.rank} of a pool of {self.num_ranks} has no CP group of {size} ranks; "
                f"it has groups of {', '.join(map(str, self._groups)) or 'none'}."
            )
        return self._groups[size]

    def destroy(self) -> None:
        """Tears the groups down; harmless when called twice."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()
