"""The routers' losses of a step, for logs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.model.moe import PackedTopKRouter
from lightning_dcp.parallel import ParallelContext


def collect_router_losses(
    chunks: Sequence[torch.nn.Module], context: ParallelContext
) -> dict[str, Tensor]:
    """Takes what the routers added up in a step; a collective where the model has such losses.

    Args:
        chunks: This rank's chunks of the model.
        context: The parallel state.

    Returns:
        By name the loss without its coefficient, a mean over the global batch's tokens or sequences
        and over the layers; float32 scalars, the same on every rank. Empty without such losses.
    """
    routers = [
        part for chunk in chunks for part in chunk.modules() if isinstance(part, PackedTopKRouter)
    ]
    names = sorted({name for router in routers for name in router.loss_sums})
    if not names:
        return {}
    groups = context.pg_collection
    shares = [groups.dp_cp] + ([groups.tp] if context.sizes.sequence_parallel else [])
    copies = 1
    for group in shares:
        copies *= dist.get_world_size(group)
    sums = [torch.stack([router.loss_sums[name] for router in routers]).sum() for name in names]
    sums.append(torch.full_like(sums[0], len(routers) / copies))
    table = torch.stack(sums).double()
    for group in (*shares, groups.pp):
        dist.all_reduce(table, group=group)
    for router in routers:
        router.loss_sums.clear()
    return {name: (table[i] / table[-1]).float() for i, name in enumerate(names)}
