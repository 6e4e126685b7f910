"""Wraps the model in Megatron-Core's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.utils import get_model_config
from torch import Tensor

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


class OutsideParameters(torch.nn.Module):
    """What a LightningModule trains beside its model, as a chunk that DDP and optimizer take.

    Every rank has a copy. A pipeline uses them where the model ends: in ``micro_batch_step``.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], like: torch.nn.Module) -> None:
        super().__init__()
        self.config = get_model_config(like)
        for name, parameter in parameters.items():
            self.register_parameter(name.replace(".", "__"), parameter)


def wrap_module(
    module: torch.nn.Module,
    chunks: Sequence[torch.nn.Module],
    context: ParallelContext,
    **options: bool,
) -> list[DistributedDataParallel]:
    """:func:`wrap_chunks`, and one more for the parameters that ``module`` has outside of them."""
    for parameter in module.parameters():
        # Of an earlier fit, whose buffers are gone: it says below who has one now.
        parameter.__dict__.pop("main_grad", None)
    in_chunks = {id(parameter) for chunk in chunks for parameter in chunk.parameters()}
    outside = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in in_chunks
    }
    wrapped = wrap_chunks(chunks, context, **options)
    if not outside:
        return wrapped
    stages = context.pg_collection.pp
    for parameter in outside.values():
        # Nobody else makes them equal: each process has drawn its own.
        dist.broadcast(parameter.data, src=0)
        # Megatron-Core's mark of copies that other stages count in the norm.
        parameter.shared = stages.rank() < stages.size() - 1  # type: ignore[attr-defined]
    chunk = OutsideParameters(outside, chunks[0])
    return [*wrapped, wrap_ddp(chunk, context, is_later_chunk=True, **options)]


def check_wrapped(module: torch.nn.Module) -> None:
    """Refuses weights that ask for a gradient and came too late to get one.

    Raises:
        ValueError: They were frozen, or not there, when the fit began.
    """
    late = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not hasattr(parameter, "main_grad")
    ]
    if late:
        raise ValueError(
            f"{', '.join(late[:3])} ({len(late)} in all) would not be trained: gradients and "
            "optimizer states were laid out when the fit began, for what then had requires_grad. "
            "Make parameters in __init__ or configure_model; what you freeze for a time, freeze in "
            "on_fit_start, and no earlier."
        )


def finalize_outside(
    ddp: DistributedDataParallel,
    num_tokens: Tensor,
    context: ParallelContext,
    *,
    force_all_reduce: bool,
) -> None:
    """Sums gradients of :class:`OutsideParameters` over pool and stages, and divides; a collective.

    Args:
        ddp: Their wrapper.
        num_tokens: What the whole global batch counts.
        context: The parallel state.
        force_all_reduce: As ``DynamicCPEngine.train_step`` has it.
    """
    ddp.finish_grad_sync(force_all_reduce=force_all_reduce)
    groups, tp_size = context.pg_collection, context.sizes.tensor_model_parallel_size
    for buffer in ddp.buffers:
        # Tensor-parallel ranks have found the same; summed, so that they stay the same to the bit.
        for group in (groups.pp, groups.tp):
            if group.size() > 1:
                dist.all_reduce(buffer.grad_data, group=group)
    ddp.scale_gradients(1.0 / (num_tokens.clamp(min=1) * tp_size))
