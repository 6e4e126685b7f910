"""What multi-token prediction lost in a step, for logs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.model.mtp import MTPModel
from lightning_dcp.parallel import ParallelContext


def collect_mtp_losses(
    chunks: Sequence[torch.nn.Module], context: ParallelContext
) -> dict[str, Tensor]:
    """Takes what the depths added up in a step; a collective where the model has any.

    Args:
        chunks: This rank's chunks of the model.
        context: The parallel state.

    Returns:
        ``mtp_loss_1`` and so on: each depth's mean loss over its targets in the global batch;
        float32 scalars, the same on every rank. Empty without multi-token prediction.
    """
    models = [part for chunk in chunks for part in chunk.modules() if isinstance(part, MTPModel)]
    if not models:
        return {}
    means = torch.zeros(models[0].config.mtp_num_layers, device=context.device)
    for model in models:
        if model.mtp_loss_sums is not None:
            means += model.mtp_loss_sums
            model.mtp_loss_sums = None
    # Only the last stage has depths; the others add nothing, and take part.
    for group in (context.pg_collection.dp_cp, context.pg_collection.pp):
        dist.all_reduce(means, group=group)
    return {f"mtp_loss_{depth}": mean for depth, mean in enumerate(means, start=1)}
