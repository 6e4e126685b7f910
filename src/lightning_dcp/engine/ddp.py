"""Wraps the model in Megatron-Core's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.utils import get_model_config

from lightning_dcp.parallel import ParallelContext, quiet_megatron


def wrap_ddp(
    model: torch.nn.Module,
    context: ParallelContext,
    *,
    use_distributed_optimizer: bool = True,
    overlap_grad_reduce: bool = False,
    is_later_chunk: bool = False,
) -> DistributedDataParallel:
    """Megatron-Core's DDP around ``model``, with weights made equal over the pool.

    Gradients add up in float32 buffers and are reduced once a step, over all DPxCP ranks.

    Args:
        model: The Megatron-Core model.
        context: The parallel state.
        use_distributed_optimizer: Reduce-scatter gradients for an optimizer with sharded states.
        overlap_grad_reduce: Reduce while the last micro-batch's backward pass runs.
        is_later_chunk: Whether another chunk of this rank comes first: its gradients go in one
            bucket, since the backward passes of the chunks are interleaved.
    """
    # float32: a sum over many micro-batches loses too much in bfloat16, and would depend on how
    # the batch was cut into them.
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_grad_reduce=overlap_grad_reduce,
    )
    with quiet_megatron():
        ddp = DistributedDataParallel(
            get_model_config(model),
            config,
            model,
            disable_bucketing=is_later_chunk,
            pg_collection=context.pg_collection,
        )
    # Ours are drawn by name and equal already; a user's configure_model may do otherwise.
    ddp.broadcast_params()
    return ddp


def wrap_chunks(
    chunks: Sequence[torch.nn.Module],
    context: ParallelContext,
    **options: bool,
) -> list[DistributedDataParallel]:
    """:func:`wrap_ddp`, with its options, around each chunk of this rank's part of the model."""
    return [
        wrap_ddp(chunk, context, is_later_chunk=index > 0, **options)
        for index, chunk in enumerate(chunks)
    ]
