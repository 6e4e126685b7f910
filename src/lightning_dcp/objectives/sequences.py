"""From values of rows to sums and means of whole sequences, which a CP group shares."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.packing import MicroBatch


def sequence_sums(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The sum of ``values`` over the targets of each sequence; a collective of the CP group.

    The rows of a sequence are spread over its CP group. Every rank of the group must call this, one
    without a target too, and let its loss depend on the result: the backward pass is a collective
    as well. Every rank then has the same sums, and a loss that each made from them would count once
    a rank: count it on one, with :func:`once_per_group`.

    Args:
        values: ``[rows]``, one for each row's target; what it holds elsewhere is left out.
        micro_batch: A micro-batch with its CP group bound.

    Returns:
        ``[sequences of the pack]`` float64, the same on every rank of the group; 0 for a sequence
        without a target.
    """
    return _reduce(values, micro_batch)[0]


def sequence_means(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The same divided by each sequence's number of targets; 0 for one without a target."""
    sums, counts = _reduce(values, micro_batch)
    return sums / counts.clamp(min=1)


def once_per_group(loss: Tensor, micro_batch: MicroBatch) -> Tensor:
    """``loss`` on the first rank of the CP group; on the others a 0 that depends on it too.

    It is a scalar that every rank of the group has, made from :func:`sequence_sums`.
    """
    counts = torch.full_like(loss, micro_batch.is_group_leader, dtype=torch.bool)
    # The gradient is an exact 0 on the others, and their backward collective still runs.
    return torch.where(counts, loss, 0)


def _reduce(values: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Sums and numbers of targets, each ``[sequences of the pack]`` float64."""
    if values.shape != micro_batch.labels.shape:
        raise ValueError(
            f"Values of shape {list(values.shape)} for {len(micro_batch.labels)} rows: give one "
            "a row."
        )
    layout, is_target = micro_batch.layout, micro_batch.loss_mask
    sequence = torch.from_numpy(layout.sequence_of_row).to(values.device, non_blocking=True)
    # Selected, not multiplied: elsewhere values may be NaN. Both sums in one collective, and in
    # float64, since differences of such sums are what losses are made of.
    rows = torch.stack((torch.where(is_target, values.double(), 0), is_target.double()))
    local = rows.new_zeros(2, len(layout.lengths)).index_add(1, sequence, rows)
    whole = local
    if micro_batch.local_cp_size > 1:
        group = getattr(micro_batch.packed_seq_params, "cp_group", None)
        if group is None:
            raise ValueError(
                f"The micro-batch is cut for a CP group of {micro_batch.local_cp_size} ranks that "
                "it does not have yet. Bind it first; DynamicCPEngine.micro_batches gives bound "
                "ones."
            )
        whole = _AllReduce.apply(local, group)
    # The counts share a tensor with the sums, and would pass for differentiable as well.
    return whole[0], whole[1].detach()


class _AllReduce(torch.autograd.Function):
    """Sum over the group; all ranks' losses depend on it, so that their gradients are summed."""

    # torch.distributed.nn has the same and is deprecated.
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = local.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        grad = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
