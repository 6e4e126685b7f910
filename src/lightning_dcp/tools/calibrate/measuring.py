"""Times micro-batches of a model: forward and backward pass, on CP groups of several sizes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from lightning_dcp.config.padding import longest_that_fits, rows_per_rank
from lightning_dcp.config.parallel import cp_sizes_of_pool
from lightning_dcp.engine import wrap_ddp
from lightning_dcp.loss import linear_cross_entropy
from lightning_dcp.model import ModelConfig, build_gpt_model, hidden_states
from lightning_dcp.packing import GlobalBatch, pack_micro_batch, read_global_batch
from lightning_dcp.parallel import (
    ParallelContext,
    ParallelSizes,
    bind_micro_batch,
    install_cp_hooks,
    quiet_megatron,
    setup_parallel,
)
from lightning_dcp.planning import MeasuredMicroBatch

# Micro-batches of unlike lengths for each CP size; the others hold equal lengths.
_NUM_MIXED = 6


@dataclass(frozen=True)
class MicroBatchShape:
    """A micro-batch to time: tokens of its samples, ranks of its CP group."""

    lengths: tuple[int, ...]
    size: int


@dataclass(frozen=True, kw_only=True)
class TimingJob:
    """What to time, and on what; see the options of ``calibrate``."""

    model: ModelConfig
    tp_size: int
    dtype: torch.dtype
    shapes: tuple[MicroBatchShape, ...]
    repeats: int
    quantile: float
    seed: int


def shapes_to_time(
    num_ranks: int, *, cap: int, tp_size: int, shortest: int, seed: int
) -> tuple[MicroBatchShape, ...]:
    """Micro-batches of all CP sizes: lengths a factor of two apart, alone and in packs, and mixed.

    ``num_ranks`` are those of the DPxCP pool, ``cap`` the most rows of a rank, ``shortest`` tokens.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[MicroBatchShape, None] = {}
    for size in cp_sizes_of_pool(num_ranks):
        longest = longest_that_fits(cap, size, tp_size)
        length = shortest
        while length <= longest:
            fit = cap // rows_per_rank(length, size, tp_size)
            # One sample, a few and a full pack: rows and pairs of rows then grow apart, so that a
            # fit can tell their prices.
            for count in sorted({1, max(1, round(fit**0.5)), max(1, fit // 2), fit}):
                shapes[MicroBatchShape((length,) * count, size)] = None
            length *= 2
        shapes[MicroBatchShape((longest,), size)] = None
        for k in range(_NUM_MIXED):
            filled = cap * (k + 1) // _NUM_MIXED
            shapes[MicroBatchShape(_mixed(rng, filled, size, tp_size, shortest, longest), size)] = (
                None
            )
    return tuple(shapes)


def _mixed(
    rng: np.random.Generator, rows: int, size: int, tp_size: int, shortest: int, longest: int
) -> tuple[int, ...]:
    """Lengths, evenly spread over orders of magnitude, that take at most ``rows`` rows of a rank.

    One of the shortest where none does.
    """
    lengths: list[int] = []
    drawn = np.exp(rng.uniform(np.log(shortest), np.log(longest + 1), 4096)).astype(np.int64)
    left = rows
    for length in drawn.tolist():
        needed = rows_per_rank(length, size, tp_size)
        if needed > left:
            break
        lengths.append(length)
        left -= needed
    return tuple(lengths) or (shortest,)


def measure(job: TimingJob) -> list[MeasuredMicroBatch]:
    """Times micro-batches; run by every process of a launcher, with its environment variables set.

    The micro-batches take turns, so that a slow minute of the machine falls on all of them. All
    groups of a size run the same micro-batch at once, as in a step of a plan.

    Returns:
        A time for each shape: the quantile, over repeats and groups, of the slowest member's.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    sizes = ParallelSizes(
        world_size=dist.get_world_size(),
        tensor_model_parallel_size=job.tp_size,
        # Experts under tensor parallelism need it (ModelConfig.check_parallel).
        sequence_parallel=job.tp_size > 1 and job.model.moe is not None,
    )
    context = setup_parallel(sizes)
    try:
        with quiet_megatron():
            stopwatch = _Stopwatch(job, context)
        rounds = []
        hidden = dist.get_rank() != 0
        total = (1 + job.repeats) * len(job.shapes)
        with tqdm(total=total, desc="Timing", unit="micro-batch", disable=hidden) as bar:
            for _ in range(1 + job.repeats):
                seconds = []
                for shape in job.shapes:
                    seconds.append(stopwatch.time(shape))
                    bar.update()
                rounds.append(seconds)
        tables: list[Any] = [None] * dist.get_world_size()
        # Without the first round, which allocates and loads kernels. On gloo: NCCL would go
        # through the GPU.
        dist.all_gather_object(tables, np.array(rounds[1:]), group=context.host_group)
        table = np.stack(tables)  # [num_processes, repeats, num_shapes]
        return [
            MeasuredMicroBatch(
                lengths=shape.lengths,
                size=shape.size,
                seconds=_slowest_of_groups(table[:, :, k], shape.size * job.tp_size, job.quantile),
                tp_size=job.tp_size,
            )
            for k, shape in enumerate(job.shapes)
        ]
    finally:
        context.destroy()
        dist.destroy_process_group()


def _slowest_of_groups(seconds: NDArray[np.float64], num_members: int, quantile: float) -> float:
    """Of times ``[num_processes, repeats]``: a quantile over groups and repeats of the slowest."""
    num_groups = len(seconds) // num_members
    # Tensor-parallel ranks are innermost, so the members of a group are neighbours.
    groups = seconds[: num_groups * num_members].reshape(num_groups, num_members, -1)
    return float(np.quantile(groups.max(axis=1), quantile))


class _Stopwatch:
    """The model, and the time of one micro-batch on it."""

    def __init__(self, job: TimingJob, context: ParallelContext) -> None:
        self.job = job
        self.context = context
        self.model = build_gpt_model(job.model, context, dtype=job.dtype)
        self.model.to(context.device)
        install_cp_hooks(self.model)
        self.ddp = wrap_ddp(self.model, context)
        self.batches = {shape: _batch(shape.lengths, job) for shape in job.shapes}

    def time(self, shape: MicroBatchShape) -> float:
        """Seconds of packing, forward and backward pass; 0 on ranks that are in no whole group."""
        context = self.context
        # Before the clock starts: a run does it once a step.
        self.ddp.zero_grad_buffer()
        # On the host: nothing of it runs on the device while the clock does.
        dist.barrier(context.host_group)
        rank = context.pool_rank
        # An odd pool leaves ranks beyond its last whole group of this size.
        if rank >= context.sizes.dp_cp_size // shape.size * shape.size:
            return 0.0
        self._synchronize()
        start = time.perf_counter()
        # Without the reduction of gradients, which comes once a step and not with each micro-batch.
        with self.ddp.no_sync():
            self._loss(self.batches[shape], shape.size, rank % shape.size).backward()
        self._synchronize()
        return time.perf_counter() - start

    def _loss(self, batch: GlobalBatch, cp_size: int, cp_rank: int) -> Tensor:
        context, config = self.context, self.job.model
        micro_batch = pack_micro_batch(
            batch,
            range(len(batch)),
            cp_size=cp_size,
            cp_rank=cp_rank,
            tp_size=self.job.tp_size,
            mtp_depths=config.mtp_num_layers,
        )
        micro_batch.to(context.device, non_blocking=True)
        micro_batch = bind_micro_batch(micro_batch, context.cp_groups)
        hidden, weight = hidden_states(self.model, micro_batch)
        if config.head == "value":
            # A critic has no vocabulary; for the time any scalar will do.
            return (hidden @ weight.t()).sum()
        tp_group = context.pg_collection.tp
        return linear_cross_entropy(
            hidden,
            weight,
            micro_batch.labels,
            tp_group=tp_group if tp_group.size() > 1 else None,
            vocab_size=config.vocab_size,
        )

    def _synchronize(self) -> None:
        if not self.context.cpu_mode:
            torch.cuda.synchronize()


def _batch(lengths: Sequence[int], job: TimingJob) -> GlobalBatch:
    rng = np.random.default_rng(job.seed)
    vocab_size = job.model.vocab_size
    rows = [torch.from_numpy(rng.integers(0, vocab_size, length)) for length in lengths]
    return read_global_batch({"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)})
