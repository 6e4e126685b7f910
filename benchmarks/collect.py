"""Collecting per-token outputs in the order of the batch, against all_gather_object of lists.

Both start from the same rows of the same plan on every rank, and end with log-probabilities and
entropies of every sample on rank 0 (the rival: on every rank, as that collective does). They take
turns in one run; results are compared for equality. A time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bare_loop import parallel_processes
from launch import run_on, spread
from lightning_dcp.data.lengths import LengthDistribution
from lightning_dcp.engine.collect import collect_outputs
from lightning_dcp.packing import PackLayout
from lightning_dcp.planning import Plan, plan_global_batch

LENGTHS = LengthDistribution(kind="long_tail", low=256, high=16384)
NAMES = ("entropies", "log_probs")


@dataclass(frozen=True)
class Options:
    """What the workers need to know."""

    tokens: int
    cap: int
    rounds: int
    warmup: int


def sample_lengths(tokens: int) -> list[int]:
    """Long-tailed lengths of ``tokens`` in all."""
    lengths = LENGTHS.sample(tokens // 256, np.random.default_rng(0))
    count = int(np.searchsorted(np.cumsum(lengths), tokens))
    chosen = lengths[:count].tolist()
    return [*chosen, tokens - sum(chosen)]


def made_rows(plan: Plan, rank: int) -> list[dict[str, Tensor]]:
    """This rank's outputs of every step, from what they belong to: the same in any layout."""
    starts = np.concatenate([[0], np.cumsum(plan.lengths)])
    steps = []
    for step in plan.steps:
        group = step.group_of(rank)
        layout = layout_of(plan, group, rank - group.first_rank)
        ids = np.asarray(group.sample_ids)[layout.sequence_of_row]
        number = torch.from_numpy(starts[ids] + layout.positions)
        values = {"log_probs": -(number % 977 + 1) / 64, "entropies": (number % 1013 + 1) / 128}
        steps.append({name: value.float() for name, value in values.items()})
    return steps


def layout_of(plan: Plan, group, cp_rank: int) -> PackLayout:
    lengths = [plan.lengths[sample] for sample in group.sample_ids]
    return PackLayout.of(lengths, cp_size=group.size, cp_rank=cp_rank)


def by_objects(rows: Sequence[dict[str, Tensor]], plan: Plan, rank: int) -> dict[str, list]:
    """The rival: each rank's pieces as lists with sample and positions, pickled and put together.

    A piece is a run of consecutive tokens of one sample, so that few objects travel beside the
    numbers themselves.
    """
    pieces = []
    for step, outputs in zip(plan.steps, rows, strict=True):
        group = step.group_of(rank)
        layout = layout_of(plan, group, rank - group.first_rank)
        lists = [outputs[name].tolist() for name in NAMES]
        row = 0
        firsts, counts = layout.runs
        per_sample = len(firsts) // len(group.sample_ids)
        for run, (first, count) in enumerate(zip(firsts.tolist(), counts.tolist(), strict=True)):
            sample = group.sample_ids[run // per_sample]
            pieces.append((sample, first, [one[row : row + count] for one in lists]))
            row += count
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    found = {name: [[0.0] * length for length in plan.lengths] for name in NAMES}
    for of_rank in gathered:
        for sample, first, lists in of_rank:
            length = plan.lengths[sample]
            for name, values in zip(NAMES, lists, strict=True):
                # A row is about the next token.
                count = min(len(values), length - first - 1)
                if count > 0:
                    found[name][sample][first + 1 : first + 1 + count] = values[:count]
    return found


def timed(function: Callable[[], object]) -> tuple[float, object]:
    """Seconds of the slowest rank, and the result."""
    dist.barrier()
    start = time.perf_counter()
    result = function()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), result


def work(options: Options) -> list[tuple[float, float]]:
    torch.set_num_threads(1)
    with parallel_processes() as context:
        rank = dist.get_rank()
        plan = plan_global_batch(
            sample_lengths(options.tokens),
            num_ranks=dist.get_world_size(),
            max_seqlen_per_dp_cp_rank=options.cap,
        )
        rows = made_rows(plan, rank)
        times = []
        for turn in range(options.warmup + options.rounds):
            ours, found = timed(lambda: collect_outputs(rows, plan, context))
            theirs, lists = timed(lambda: by_objects(rows, plan, rank))
            if turn >= options.warmup:
                times.append((ours, theirs))
        if rank == 0:
            for name in NAMES:
                wanted = torch.tensor([value for sample in lists[name] for value in sample])
                assert torch.equal(found[name].values(), wanted), name
                assert found[name].offsets().diff().tolist() == list(plan.lengths)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--cap", type=int, default=8192, help="max_seqlen_per_dp_cp_rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1)
    given = parser.parse_args()
    options = Options(given.tokens, given.cap, given.rounds, given.warmup)
    times = run_on(given.processes, work, options)
    ours, theirs = zip(*times, strict=True)
    print(f"{given.tokens:,} tokens, two float32 each, over {given.processes} processes")
    print(f"tensors to rank 0       {1000 * median(ours):8.1f} ms")
    print(f"all_gather_object, lists{1000 * median(theirs):8.1f} ms")
    print(f"times faster            {spread([b / a for a, b in times])}")


if __name__ == "__main__":
    main()
