"""Micro-batches through the stages of a pipeline, by Megatron-Core's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import tee
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.utils import get_model_config
from torch import Tensor

from lightning_dcp.model import stage_output
from lightning_dcp.packing import MicroBatch
from lightning_dcp.parallel import ParallelContext

LastStage = Callable[[MicroBatch], Tensor]
"""Runs the model's last chunk on a micro-batch; gives what the backward pass starts from."""


def run_pipeline(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Iterator[MicroBatch],
    last_stage: LastStage,
    context: ParallelContext,
    *,
    num_micro_batches: int,
    no_sync: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
) -> None:
    """Runs one-forward-one-backward, interleaved if this rank has several chunks; a collective.

    Stages tell each other how many rows come, so that micro-batches may differ in length. All
    stages of a pipeline run the same micro-batches, in the same order.

    Args:
        chunks: This rank's chunks of the model, unwrapped.
        micro_batches: This rank's, bound and on its device.
        last_stage: Called for each micro-batch on the stage that ends the model.
        context: The parallel state.
        num_micro_batches: The same on all ranks; for several chunks a multiple of the stages.
        no_sync: Of each chunk what holds its gradients' reduction back until the last micro-batch;
            without any, backward passes are left out.
    """
    config = get_model_config(chunks[0])
    # The schedules hold reduction back themselves: they know which backward pass is the last.
    config.no_sync_func = (list(no_sync) if len(chunks) > 1 else no_sync[0]) if no_sync else None

    def forward_step(
        iterator: Iterator[MicroBatch], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, None]] | None]:
        micro_batch = next(iterator)
        if not chunk.post_process:
            # The schedule calls a loss function on the last chunk only.
            return stage_output(chunk, micro_batch), None
        return last_stage(micro_batch), _as_loss

    arguments: dict[str, Any] = {
        "forward_step_func": forward_step,
        "num_microbatches": num_micro_batches,
        # Both are asked for, and not used where stages tell each other the rows.
        "seq_length": 1,
        "micro_batch_size": 1,
        "forward_only": not no_sync,
        "p2p_communicator": P2PCommunicator(pp_group=context.pg_collection.pp, config=config),
        "pg_collection": context.pg_collection,
    }
    if len(chunks) > 1:
        # Each chunk goes through all micro-batches; they are packed once, and share tensors.
        forward_backward_pipelining_with_interleaving(
            data_iterator=list(tee(micro_batches, len(chunks))), model=list(chunks), **arguments
        )
    else:
        forward_backward_pipelining_without_interleaving(
            data_iterator=micro_batches, model=chunks[0], **arguments
        )


def _as_loss(output: Tensor) -> tuple[Tensor, Tensor, None]:
    """What the schedule wants of a loss; tokens are counted and divided by outside of it."""
    # Three values: of two the schedule would take a mean over micro-batches, times a CP size.
    return output, torch.zeros((), dtype=torch.int32, device=output.device), None
