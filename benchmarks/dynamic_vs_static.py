"""Step time of dynamic against static context parallelism: same ranks, model, batches and cap.

The longest sequence of the batches needs the whole pool, so that a static run has to put every
sequence on all ranks. For each batch the planners take turns, in one run, on one model, its
process groups and its optimizer; only the plan differs. The learning rate is 0, so that all of them
work on the same weights, and their losses and numbers of tokens are compared.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from bare_loop import BareLoop, parallel_processes, random_batch
from launch import run_on, spread
from lightning_dcp import ModelConfig
from lightning_dcp.data.lengths import LengthDistribution
from lightning_dcp.engine import DynamicCPEngine
from lightning_dcp.parallel import ParallelSizes
from lightning_dcp.planning import CostModel, PlanSettings

PLANNERS = ("static", "balanced", "longest_sequence")


@dataclass(frozen=True)
class Options:
    """What the workers need to know."""

    steps: int
    warmup: int
    samples: int
    shortest: int
    longest: int
    layers: int
    hidden: int
    planners: tuple[str, ...] = PLANNERS
    cost_model: CostModel | None = None

    @property
    def model(self) -> ModelConfig:
        """Of all planners."""
        return ModelConfig(num_layers=self.layers, hidden_size=self.hidden, num_attention_heads=8)

    def cap(self, num_ranks: int) -> int:
        """The rows of a rank with which the longest sequence just fits the pool."""
        return -(-self.longest // (2 * num_ranks)) * 2

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """Long-tailed lengths, one sequence of the longest in each batch."""
        rng = np.random.default_rng(0)
        vocab_size = self.model.vocab_size
        lengths_of = LengthDistribution(kind="long_tail", low=self.shortest, high=self.longest)
        return [
            random_batch([self.longest, *lengths_of.sample(self.samples - 1, rng)], vocab_size, rng)
            for _ in range(self.warmup + self.steps)
        ]

    def settings(self, planner: str, num_ranks: int) -> PlanSettings:
        """How a planner plans on a pool."""
        return PlanSettings.of_run(
            ParallelSizes(world_size=num_ranks),
            max_seqlen_per_dp_cp_rank=self.cap(num_ranks),
            planner=planner,
            context_parallel_size=num_ranks,
            cost_model=self.cost_model,
        )


@dataclass
class Figures:
    """What one planner took, a list with an entry a step.

    Attributes:
        seconds: Wall-clock time of the step: planning, packing, passes, reduction, optimizer.
        cpu_seconds: CPU time of all ranks together; waiting for other ranks is not in it.
        tokens: Tokens of the batch.
        targets: Target tokens that the step counted.
        losses: Mean loss.
        micro_batches: Steps of the plan.
        cp_sizes: Groups of each CP size, over all steps.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    cp_sizes: Counter[int] = field(default_factory=Counter)


def timed_step(
    loop: BareLoop, engine: DynamicCPEngine, batch: dict[str, torch.Tensor], figures: Figures
) -> None:
    """Trains on a batch and adds what it took."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    planned, result = loop.step(engine, batch)
    dist.barrier()
    figures.seconds.append(time.perf_counter() - start)
    cpu_seconds = torch.tensor(time.process_time() - cpu_start)
    dist.all_reduce(cpu_seconds)
    figures.cpu_seconds.append(float(cpu_seconds))
    figures.tokens.append(planned.plan.num_tokens)
    figures.targets.append(int(result.num_tokens))
    figures.losses.append(float(result.loss))
    figures.micro_batches.append(len(planned.plan.steps))
    figures.cp_sizes.update(planned.plan.cp_sizes())


def work(options: Options) -> dict[str, Figures]:
    """What each process runs: every batch under every planner, the order turning."""
    planners = options.planners
    warm = {planner: Figures() for planner in planners}
    figures = {planner: Figures() for planner in planners}
    with parallel_processes() as context:
        loop = BareLoop(options.model, context, lr=0.0)
        engines = {
            planner: DynamicCPEngine(context, options.settings(planner, dist.get_world_size()))
            for planner in planners
        }
        for index, batch in enumerate(options.batches()):
            counted = warm if index < options.warmup else figures
            for turn in range(len(planners)):
                planner = planners[(index + turn) % len(planners)]
                timed_step(loop, engines[planner], batch, counted[planner])
    return figures


def check_same_work(figures: dict[str, Figures]) -> None:
    static = figures["static"]
    for planner, found in figures.items():
        assert found.targets == static.targets, f"{planner} processed other tokens than static"
        np.testing.assert_allclose(found.losses, static.losses, rtol=1e-5, err_msg=planner)


def report(figures: dict[str, Figures], num_processes: int) -> None:
    """The planners' lines of the table."""
    for planner, found in figures.items():
        time_ratios, cpu_ratios = (
            [static / own for static, own in zip(of_static, of_planner, strict=True)]
            for of_static, of_planner in (
                (figures["static"].seconds, found.seconds),
                (figures["static"].cpu_seconds, found.cpu_seconds),
            )
        )
        sizes = ", ".join(f"{size} (x{num})" for size, num in sorted(found.cp_sizes.items()))
        print(
            f"{num_processes:>9}  {planner:<16} {median(found.seconds):>6.2f} "
            f"{sum(found.tokens) / sum(found.seconds):>8,.0f}  {spread(time_ratios)}  "
            f"{spread(cpu_ratios)}  {sum(found.tokens):>7,} "
            f"{sum(found.micro_batches):>13}  {sizes}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Step time of dynamic against static context parallelism.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="pool sizes")
    parser.add_argument("--steps", type=int, default=7, help="measured global batches")
    parser.add_argument("--warmup", type=int, default=1, help="global batches before")
    parser.add_argument("--samples", type=int, default=16, help="sequences of a global batch")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of the shortest sequences")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest sequence")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the model")
    given = vars(parser.parse_args())
    processes = given.pop("processes")
    options = Options(**given)
    print(
        "static / own: static's time over the planner's own on a batch, median (quartiles)\n"
        f"{'static / own':>56}{'static / own':>24}\n"
        f"processes  {'planner':<16} step s tokens/s  {'step time':<22}  {'CPU, all ranks':<22}  "
        f"{'tokens':>7} micro-batches  CP sizes (groups)"
    )
    for num_processes in processes:
        figures = run_on(num_processes, work, options)
        check_same_work(figures)
        report(figures, num_processes)


if __name__ == "__main__":
    main()
