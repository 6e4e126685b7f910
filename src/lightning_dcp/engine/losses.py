"""The losses of a step: what a user's step gives, their mean, and those that the model adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.model.experts import PackedTopKRouter
from lightning_dcp.model.mtp import MTPModel
from lightning_dcp.packing import MicroBatch
from lightning_dcp.parallel import ParallelContext

MicroBatchStep = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""Of a micro-batch: the sum of its target tokens' losses on this rank, and how many they are.

What is counted may be something else, pairs say; the step's loss is the mean over it."""


class LossTotals:
    """Sums of this rank over a step's micro-batches; nothing waits for the device.

    Args:
        micro_batch_step: Gives (loss sum, target tokens) of a micro-batch on this rank.
        device: Where the sums are.
    """

    def __init__(self, micro_batch_step: MicroBatchStep, device: torch.device) -> None:
        self._step = micro_batch_step
        # float64: the mean then hardly depends on how the batch was cut into micro-batches.
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, micro_batch: MicroBatch) -> Tensor:
        """Adds the loss of a micro-batch, and gives what its backward pass starts from."""
        loss_sum, num_tokens = _checked(self._step(micro_batch))
        if micro_batch.is_filler:
            # Whatever the loss makes of it, NaN included: a zero that still has a backward pass, in
            # which all stages of the pipeline take part.
            never = torch.zeros((), dtype=torch.bool, device=loss_sum.device)
            loss_sum, num_tokens = torch.where(never, loss_sum, 0), torch.zeros_like(num_tokens)
        # Detached: the sum would keep the graph of every micro-batch alive.
        self.loss_sum += loss_sum.detach()
        self.num_tokens += num_tokens
        return loss_sum

    def mean(self, context: ParallelContext) -> tuple[Tensor, Tensor]:
        """The mean loss of the global batch (float32) and what it is over (int64); a collective."""
        # One collective for both: float64 counts tokens exactly up to 2 ** 53.
        both = torch.stack((self.loss_sum, self.num_tokens.double()))
        dist.all_reduce(both, group=context.pg_collection.dp_cp)
        if context.sizes.pipeline_model_parallel_size > 1:
            # Only the last stage has sums; the others have zeros.
            dist.all_reduce(both, group=context.pg_collection.pp)
        # A batch without a target has a loss of 0, and not 0 / 0.
        return (both[0] / both[1].clamp(min=1)).float(), both[1].long()


class MetricSums:
    """What a step's micro-batches log on this rank: sums and counts by name.

    Args:
        device: Where the sums are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Adds scalars of a micro-batch's rows on this rank; nothing waits for the device."""
        both = [
            torch.as_tensor(value, dtype=torch.float64, device=self._device).detach()
            for value in (total, count)
        ]
        if any(value.dim() for value in both):
            raise ValueError(
                f"log_micro_batch({name!r}, ...) takes a sum and a count, two scalars, found "
                f"shapes {[tuple(value.shape) for value in both]}."
            )
        new = torch.stack(both)
        self._sums[name] = self._sums[name] + new if name in self._sums else new

    def means(self, context: ParallelContext) -> dict[str, tuple[Tensor, Tensor]]:
        """By name the mean over the global batch (float32) and its count; a collective."""
        # A rank may have run no micro-batch that logs, and stages but the last never do.
        of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, list(self._sums), group=context.host_group)
        names = sorted({name for of_rank in of_ranks for name in of_rank})
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        table = torch.stack([self._sums.get(name, nothing) for name in names])
        for group in (context.pg_collection.dp_cp, context.pg_collection.pp):
            dist.all_reduce(table, group=group)
        # Nothing counted is a mean of 0, and not 0 / 0.
        means = (table[:, 0] / torch.where(table[:, 1] == 0, 1, table[:, 1])).float()
        return {name: (means[i], table[i, 1]) for i, name in enumerate(names)}


def _checked(output: Any) -> tuple[Tensor, Tensor]:
    """What a user's step returned, or an error that says what it has to return."""
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], Tensor)):
        raise TypeError(
            "micro_batch_step must return (loss sum, number of target tokens), found "
            f"{type(output).__name__}."
        )
    loss_sum, num_tokens = output
    if loss_sum.dim() != 0:
        raise ValueError(
            "The loss of micro_batch_step must be a scalar: the sum over this rank's target "
            f"tokens, found shape {tuple(loss_sum.shape)}."
        )
    if torch.is_grad_enabled() and not loss_sum.requires_grad:
        raise ValueError(
            "The loss of micro_batch_step does not depend on the model. Without a target token it "
            "must still be made from the model's output, and be zero: the other ranks of the CP "
            "group wait for this one's backward pass."
        )
    return loss_sum, torch.as_tensor(num_tokens)


def collect_router_losses(
    chunks: Sequence[torch.nn.Module], context: ParallelContext
) -> dict[str, Tensor]:
    """Takes what the routers added up in a step; a collective where the model has such losses.

    Returns:
        By name the loss without its coefficient, a mean over the global batch's tokens or sequences
        and over the layers; float32 scalars, the same on every rank. Empty without such losses.
    """
    routers = [
        part for chunk in chunks for part in chunk.modules() if isinstance(part, PackedTopKRouter)
    ]
    names = sorted({name for router in routers for name in router.loss_sums})
    # Every layer of our models with experts has a router: all stages have these names, or none.
    if not names:
        return {}
    groups = context.pg_collection
    shares = [groups.dp_cp] + ([groups.tp] if context.sizes.sequence_parallel else [])
    copies = math.prod(group.size() for group in shares)
    sums = [torch.stack([router.loss_sums[name] for router in routers]).sum() for name in names]
    # The number of layers, in the same messages: ranks that hold the same layers share it.
    sums.append(torch.full_like(sums[0], len(routers) / copies))
    table = torch.stack(sums).double()
    for group in (*shares, groups.pp):
        dist.all_reduce(table, group=group)
    for router in routers:
        router.loss_sums.clear()
    return {name: (table[i] / table[-1]).float() for i, name in enumerate(names)}


def collect_mtp_losses(
    chunks: Sequence[torch.nn.Module], context: ParallelContext
) -> dict[str, Tensor]:
    """Takes what the depths added up in a step; a collective where the model has any.

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
