"""The planning figures: quality against the bound, gain over static, planning time, fuzzing.

    python benchmarks/planning.py --quick
    python benchmarks/planning.py --lengths-dir ../shared/data/lengths --cells cells.csv
    python benchmarks/planning.py --fuzz 200000

Step times are predictions of the cost models; planning times are measured.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.padding import PackPadding, longest_that_fits
from lightning_dcp.data.lengths import LengthDistribution, LengthTable, read_length_file
from lightning_dcp.planning import (
    H200,
    LLAMA_8B,
    QWEN3_30B_A3B,
    CostModel,
    Plan,
    has_megatron_scheduler,
    plan_global_batch,
)

MODELS = {
    "8B": CostModel.from_sizes(LLAMA_8B, H200),
    "30B-A3B": CostModel.from_sizes(QWEN3_30B_A3B, H200, ep_size=8),
}
LENGTH_FILES = ("wikipedia", "python_source")
DISTRIBUTIONS = {
    "long_tail": LengthDistribution(kind="long_tail", low=1024, high=16_384),
    "bimodal": LengthDistribution(kind="bimodal", low=1024, high=16_384),
    "uniform": LengthDistribution(kind="uniform", low=1024, high=16_384),
    "equal": LengthDistribution(kind="constant", low=4096),
}
POOLS = (2, 3, 4, 6, 8, 10, 16, 32, 64, 256)
CAPS = (1024, 2048, 4096, 8192, 16_384)
BATCHES = (16, 64, 256, 1024, 4096, 8192)
QUICK_POOLS, QUICK_CAPS, QUICK_BATCHES = (3, 8, 32), (1024, 4096, 16_384), (16, 128, 512)
OTHERS = ("static", "longest_sequence")
# Megatron-Core's scheduler is asked up to so many samples times ranks: it takes 31 s for 2**21.
MEGATRON_CELLS = 2**13

Source = LengthDistribution | LengthTable


@dataclass(frozen=True)
class Cell:
    """One combination of the grid and what came out."""

    lengths: str
    model: str
    num_ranks: int
    cap: int
    num_samples: int
    plan: Plan
    others: dict[str, float]
    num_clipped: int
    planning_seconds: float

    @property
    def enough(self) -> bool:
        """Whether there are at least four samples a rank."""
        return self.num_samples >= 4 * self.num_ranks

    @property
    def worse(self) -> bool:
        """Whether another planner's predicted time is lower, beyond rounding."""
        assert self.plan.report is not None
        best = min(self.others.values(), default=math.inf)
        return self.plan.report.predicted_seconds > best * (1 + 1e-12)

    def reason(self) -> str:
        """Why the bound and the plan are apart."""
        report = self.plan.report
        assert report is not None
        longest = MODELS[self.model].parts(
            np.array([max(self.plan.lengths)]), tuple(self.plan.cp_sizes())
        )
        part = float(longest.total.min()) / report.predicted_seconds
        shares = f"idle {report.idle_share:.0%}, communication {report.communication_share:.0%}"
        if self.num_samples < self.num_ranks:
            why = "fewer samples than ranks: groups larger than samples need, since no rank is idle"
        elif part > 0.3:
            why = f"the longest sample alone takes {part:.0%} of the time; rows limit its step"
        elif self.num_ranks & (self.num_ranks - 1):
            why = "pool no power of two: large groups leave ranks that only short samples fit"
        else:
            why = f"{len(self.plan.steps)} steps: few samples to balance, or rows limit the steps"
        return f"{why} ({shares})"


def main() -> None:
    args = parse_args()
    sources = dict(length_sources(args.lengths_dir))
    if args.fuzz:
        fuzz(args.fuzz, seed=args.seed)
        return
    report_quality(list(grid(sources, quick=args.quick, seed=args.seed)), args.cells)
    report_gain(quick=args.quick)
    report_time(quick=args.quick)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = Path(__file__).resolve().parents[2] / "shared" / "data" / "lengths"
    parser.add_argument("--quick", action="store_true", help="a small part of the grid")
    parser.add_argument("--lengths-dir", type=Path, default=default, help="folder of length files")
    parser.add_argument("--cells", type=Path, help="CSV file to write every cell of the grid to")
    parser.add_argument("--fuzz", type=int, metavar="N", help="only: plan N random workloads")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def length_sources(folder: Path) -> Iterator[tuple[str, Source]]:
    for name in LENGTH_FILES:
        path = folder / f"{name}.csv.gz"
        if path.is_file():
            yield name, read_length_file(path)
        else:
            print(f"no length file {path}: left out (--lengths-dir)")
    yield from DISTRIBUTIONS.items()


def grid(sources: dict[str, Source], *, quick: bool, seed: int) -> Iterator[Cell]:
    pools = QUICK_POOLS if quick else POOLS
    caps = QUICK_CAPS if quick else CAPS
    batches = QUICK_BATCHES if quick else BATCHES
    for num_ranks, cap, number in itertools.product(pools, caps, batches):
        for (name, source), model in itertools.product(sources.items(), MODELS):
            lengths = source.sample(number, np.random.default_rng(seed))
            most = longest_that_fits(cap, num_ranks)
            yield plan_cell(name, model, num_ranks, cap, np.minimum(lengths, most), lengths)


def plan_cell(
    name: str,
    model: str,
    num_ranks: int,
    cap: int,
    lengths: NDArray[np.int64],
    original: NDArray[np.int64],
) -> Cell:
    def plan(planner: str) -> Plan:
        return plan_global_batch(
            lengths, num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=cap, planner=planner,
            cost_model=MODELS[model],
        )  # fmt: skip

    planners = list(OTHERS)
    if has_megatron_scheduler() and len(lengths) * num_ranks <= MEGATRON_CELLS:
        planners.append("megatron")
    others = {planner: seconds_of(plan(planner)) for planner in planners}
    clipped = int((lengths < original).sum())
    start = time.process_time()
    balanced = plan("balanced")
    seconds = time.process_time() - start
    return Cell(name, model, num_ranks, cap, len(lengths), balanced, others, clipped, seconds)


def seconds_of(plan: Plan) -> float:
    assert plan.report is not None
    return plan.report.predicted_seconds


def report_quality(cells: list[Cell], path: Path | None) -> None:
    if path:
        write_cells(cells, path)
    enough = [cell for cell in cells if cell.enough]
    rest = [cell for cell in cells if not cell.enough]
    samples = sum(cell.num_samples for cell in cells)
    clipped = sum(cell.num_clipped for cell in cells)
    print(f"\n{len(cells)} cells, {clipped / samples:.1%} of the samples clipped to their pool")
    for key in ("num_ranks", "cap", "num_samples", "lengths", "model"):
        print_groups(enough, key)
    print_line("all cells with >= 4 samples a rank (goal: mean 0.97)", enough)
    print_line("the other cells", rest)
    worse = sum(cell.worse for cell in cells)
    print(f"cells where another planner is predicted to be faster (goal: 0): {worse}")
    print("\ncells under 0.90 with >= 4 samples a rank")
    for cell in sorted(enough, key=lambda cell: cell.plan.quality):
        if cell.plan.quality < 0.9:
            print(describe(cell))
    print("\nthe other cells under 0.90, by pool (all of them: --cells)")
    low = [cell for cell in rest if cell.plan.quality < 0.9]
    print_groups(low, "num_ranks")
    for cell in sorted(low, key=lambda cell: cell.plan.quality)[:20]:
        print(describe(cell))


def print_groups(cells: list[Cell], key: str) -> None:
    groups: dict[object, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[getattr(cell, key)].append(cell)
    for value, some in groups.items():
        print_line(f"{key} {value}", some)


def print_line(name: str, cells: list[Cell]) -> None:
    quality = np.array([cell.plan.quality for cell in cells] or [math.nan])
    low = int((quality < 0.9).sum())
    milliseconds = 1e3 * np.array([cell.planning_seconds for cell in cells] or [math.nan])
    print(
        f"{name:52} cells {len(cells):5}  quality mean {quality.mean():.4f}"
        f"  min {quality.min():.3f}  under 0.90: {low:3}  CPU ms a plan, median"
        f" {np.median(milliseconds):6.1f}  max {milliseconds.max():7.1f}"
    )


def describe(cell: Cell) -> str:
    return (
        f"  {cell.plan.quality:.3f}  {cell.lengths:13} {cell.model:7} ranks {cell.num_ranks:3} "
        f"cap {cell.cap:5} samples {cell.num_samples:4}: {cell.reason()}"
    )


def write_cells(cells: list[Cell], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        head = "lengths,model,num_ranks,cap,num_samples,num_clipped,enough,quality,seconds"
        writer.writerow([*head.split(","), *OTHERS, "megatron", "reason"])
        for cell in cells:
            others = [cell.others.get(name, "") for name in (*OTHERS, "megatron")]
            writer.writerow([
                cell.lengths, cell.model, cell.num_ranks, cell.cap, cell.num_samples,
                cell.num_clipped, cell.enough, cell.plan.quality, seconds_of(cell.plan), *others,
                cell.reason(),
            ])  # fmt: skip


def report_gain(*, quick: bool) -> None:
    print("\ngain over static CP 4: long_tail, cap 4096, 8 ranks (published for 30B-A3B: 1.606)")
    for model, number in itertools.product(MODELS, (64, 256) if quick else (64, 128, 256, 512)):
        gains = []
        for seed in range(4 if quick else 16):
            lengths = DISTRIBUTIONS["long_tail"].sample(number, np.random.default_rng(seed))
            options = {"num_ranks": 8, "max_seqlen_per_dp_cp_rank": 4096}
            static = plan_global_batch(
                lengths, **options, cost_model=MODELS[model], planner="static",
                context_parallel_size=4,
            )  # fmt: skip
            balanced = plan_global_batch(lengths, **options, cost_model=MODELS[model])
            gains.append(seconds_of(static) / seconds_of(balanced))
        print(f"  {model:7} {number:4} samples: mean {np.mean(gains):.3f}, max {max(gains):.3f}")


def report_time(*, quick: bool) -> None:
    print("\nplanning time, one core, long_tail at cap 4096, 8B; CPU time and wall time in ms")
    print("  goals: 5 ms for 512 on 8, 150 ms for 8192 on 256")
    for number, num_ranks in ((512, 8), (2048, 64), (8192, 256)):
        print_time(number, num_ranks, repeats=7)
    print("  growth at 32 samples a rank; us over samples * log2(samples) should stay level")
    for number in (1024, 4096, 8192) if quick else (1024, 2048, 4096, 8192, 16_384, 32_768):
        print_time(number, number // 32, repeats=3)


def print_time(number: int, num_ranks: int, *, repeats: int) -> None:
    lengths = DISTRIBUTIONS["long_tail"].sample(number, np.random.default_rng(0))
    cpu, wall = best_times(
        lambda: plan_global_batch(lengths, num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=4096),
        repeats,
    )
    per = 1e6 * cpu / (number * math.log2(number))
    print(
        f"  {number:6} samples on {num_ranks:4} ranks: CPU {1e3 * cpu:8.1f}  wall {1e3 * wall:8.1f}"
        f"  {per:.2f} us a sample * log2(samples)"
    )


def best_times(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    cpu = wall = math.inf
    for _ in range(repeats):
        start_wall, start_cpu = time.perf_counter(), time.process_time()
        call()
        cpu = min(cpu, time.process_time() - start_cpu)
        wall = min(wall, time.perf_counter() - start_wall)
    return cpu, wall


def fuzz(number: int, *, seed: int) -> None:
    """Plans random workloads with every planner; stops at the first failure."""
    rng = random.Random(seed)
    planners = ("balanced", "static", "longest_sequence")
    for done in range(number):
        workload = random_workload(rng)
        planner = planners[done % len(planners)]
        try:
            plan = plan_global_batch(**workload, planner=planner)
            plan.validate()
            if plan.quality > 1 + 1e-9:
                raise AssertionError(f"quality {plan.quality} is above 1")
        except Exception:
            print(f"failed after {done} workloads: planner={planner!r}, {workload}")
            raise
        if (done + 1) % 10_000 == 0:
            print(f"  {done + 1} workloads", flush=True)
    print(f"{number} random workloads through Plan.validate() without a failure (goal: 200000)")


def random_workload(rng: random.Random) -> dict:
    num_ranks, tp_size = rng.randint(1, 64), rng.choice([1, 1, 2, 3, 4, 8])
    least = tp_size * (2 if num_ranks > 1 else 1)
    cap = rng.choice([least, least + 1, 7 * least, 64 * least, 100 * least + 3, 4096 * least])
    bucket = rng.choice([None, None, 1, rng.randint(1, max(1, cap // least // 2))])
    padding = PackPadding(pad_to_length_bucket=bucket and bucket * least)
    most = longest_that_fits(cap, num_ranks, tp_size, padding)
    number = min(rng.choice([1, 2, 3, num_ranks, 4 * num_ranks, rng.randint(1, 300)]), 300)
    lengths = [
        rng.choice([max(1, int(most ** rng.random())), rng.randint(1, most), most, 1])
        for _ in range(number)
    ]
    return {
        "lengths": lengths,
        "keep_together": random_units(rng, lengths, most, 2 * tp_size * num_ranks),
        "pad_to_length_bucket": padding.pad_to_length_bucket,
        "num_ranks": num_ranks,
        "max_seqlen_per_dp_cp_rank": cap,
        "tp_size": tp_size,
        "execution": rng.choice(["lockstep", "free_running"]),
        "cost_model": rng.choice([CostModel(), MODELS["30B-A3B"], CostModel(ranks_per_node=2)]),
    }


def random_units(rng: random.Random, lengths: list[int], most: int, align: int) -> list[int] | None:
    """Unit ids of neighbours that fit the pool together, or none."""
    if rng.random() < 0.6:
        return None
    units, tokens = [0], -(-lengths[0] // align) * align
    for length in lengths[1:]:
        padded = -(-length // align) * align
        joins = tokens + padded <= most and rng.random() < 0.5
        units.append(units[-1] + (not joins))
        tokens = padded + (tokens if joins else 0)
    return units


if __name__ == "__main__":
    main()
