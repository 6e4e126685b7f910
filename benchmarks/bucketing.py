"""What bucketed lengths save and cost: shapes of micro-batches, padded rows, recompilations.

    python benchmarks/bucketing.py --lengths-dir ../shared/data/lengths

Global batches of real lengths are planned with and without a bucket. Counted are the numbers of
rows that occur in any micro-batch, the rows that all ranks hold over those of the plans without a
bucket, and how often ``torch.compile`` compiles a small transformer MLP block that is run, as one
process would, on the rows of rank 0's micro-batches in turn. The block is compiled for static
shapes (``dynamic=False``) by TorchDynamo with its ``eager`` backend: it decides alone whether to
compile again, and no code is generated, so that only numbers are measured, no times.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_dcp.config.padding import TIGHT, PackPadding, longest_that_fits
from lightning_dcp.data.lengths import read_length_file
from lightning_dcp.planning import Plan, plan_global_batch


class Block(nn.Module):
    """A norm and a gated MLP, rows in, rows out; the shape of its input is that of a layer's."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps ``[rows, 1, width]`` to the same."""
        gate, up = self.up(self.norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


@dataclass(frozen=True)
class Counts:
    """What some plans amount to.

    Attributes:
        shapes: Numbers of rows that occur on any rank.
        of_rank_0: The rows of rank 0's micro-batches, in turn.
        rows: Rows that all ranks hold in all micro-batches.
    """

    shapes: int
    of_rank_0: list[int]
    rows: int


def count(plans: Iterator[Plan]) -> Counts:
    shapes: set[int] = set()
    of_rank_0: list[int] = []
    total = 0
    for plan in plans:
        rows = [[plan.rows(group) for group in step.groups] for step in plan.steps]
        shapes.update(*rows)
        of_rank_0 += [step[0] for step in rows]
        total += plan.num_padded_tokens
    return Counts(len(shapes), of_rank_0, total)


def plans(batches: list[NDArray[np.int64]], args: argparse.Namespace, padding: PackPadding):
    for lengths in batches:
        yield plan_global_batch(
            lengths,
            num_ranks=args.ranks,
            max_seqlen_per_dp_cp_rank=args.cap,
            execution="free_running",
            pad_to_length=padding.pad_to_length,
            pad_to_length_bucket=padding.pad_to_length_bucket,
        )


def compilations(rows: list[int]) -> int:
    """Graphs that TorchDynamo compiles for a block that meets these numbers of rows."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    block = torch.compile(Block(), dynamic=False, backend="eager")
    # By default it gives up after 8 and runs uncompiled.
    limits = {"recompile_limit": len(rows) + 1, "accumulated_recompile_limit": len(rows) + 1}
    with torch.no_grad(), torch._dynamo.config.patch(**limits):
        for number in rows:
            block(torch.zeros(number, 1, 16))
    return counters["stats"]["unique_graphs"]


def main() -> None:
    args = parse_args()
    source = read_length_file(args.lengths_dir / f"{args.lengths}.csv.gz")
    rng = np.random.default_rng(args.seed)
    most = longest_that_fits(args.cap, args.ranks)
    batches = [np.minimum(source.sample(args.samples, rng), most) for _ in range(args.steps)]
    tokens = sum(int(batch.sum()) for batch in batches)
    print(
        f"{args.steps} steps of {args.samples} {args.lengths} sequences ({tokens:,} tokens) on "
        f"{args.ranks} ranks, cap {args.cap}\n"
        f"{'padding':25} {'shapes':>8} {'rank 0':>10} {'compiled':>10} {'rows / tokens':>15} "
        f"{'rows / no bucket':>18}"
    )
    base = count(plans(batches, args, TIGHT))
    for bucket in (None, *args.buckets):
        print_line(
            f"bucket {bucket}", args, batches, base, PackPadding(pad_to_length_bucket=bucket)
        )
    print_line("one length, the cap", args, batches, base, PackPadding(pad_to_length=args.cap))


def print_line(
    name: str,
    args: argparse.Namespace,
    batches: list[NDArray[np.int64]],
    base: Counts,
    padding: PackPadding,
) -> None:
    found = base if padding.is_tight else count(plans(batches, args, padding))
    tokens = sum(int(batch.sum()) for batch in batches)
    print(
        f"{name:25} {found.shapes:8} {len(set(found.of_rank_0)):10} "
        f"{compilations(found.of_rank_0):10} {found.rows / tokens:15.4f} "
        f"{found.rows / base.rows:18.4f}"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = Path(__file__).resolve().parents[2] / "shared" / "data" / "lengths"
    parser.add_argument("--lengths-dir", type=Path, default=default, help="folder of length files")
    parser.add_argument("--lengths", default="wikipedia", help="name of a length file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=64, help="sequences of a global batch")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cap", type=int, default=8192)
    parser.add_argument("--buckets", type=int, nargs="*", default=[256, 512, 1024])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
