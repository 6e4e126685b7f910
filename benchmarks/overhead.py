"""Step time of the whole Lightning path over a bare loop that calls the same engine.

The Trainer's batches come from an iterable that, before it hands one out, trains a twin of the
model on the same batch with nothing but the engine and the optimizer. A Lightning step is the time
from handing a batch out to being asked for the next: all that the Trainer, the strategy, the
module, the logger and the callbacks do. Bare and Lightning steps thus alternate one by one, on the
same processes, groups, batches and plans; their losses are compared, so that both do the same work.

The last column is what the ranks' comparison of their batches costs: the time of the checksums of
one batch over that of the bare step that trains it.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from bare_loop import BareLoop, random_batch
from launch import run_on, spread
from lightning_dcp import (
    DynamicCPModule,
    DynamicCPStrategy,
    LRSchedule,
    ModelConfig,
    StepReport,
)
from lightning_dcp.data.lengths import LengthDistribution
from lightning_dcp.engine import DynamicCPEngine
from lightning_dcp.engine.agreement import checksums
from lightning_dcp.packing import read_global_batch

CLIP = 1.0
LENGTHS = LengthDistribution(kind="long_tail", low=64, high=1024)


@dataclass(frozen=True)
class Options:
    """What the workers need to know."""

    steps: int
    warmup: int
    samples: int
    layers: int
    hidden: int
    log_every_n_steps: int
    step_report: bool

    @property
    def model(self) -> ModelConfig:
        """Of both loops."""
        return ModelConfig(num_layers=self.layers, hidden_size=self.hidden, num_attention_heads=8)

    def cap(self, num_ranks: int) -> int:
        """The rows of a rank with which the longest sequence just fits the pool."""
        return -(-LENGTHS.longest // num_ranks)

    def batches(self, num_batches: int) -> list[dict[str, torch.Tensor]]:
        """Random tokens, the same on every rank."""
        rng = np.random.default_rng(0)
        vocab_size = self.model.vocab_size
        return [
            random_batch(LENGTHS.sample(self.samples, rng), vocab_size, rng)
            for _ in range(num_batches)
        ]


@dataclass
class Clock:
    """Wall-clock and CPU seconds of this process, a list of each."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Waits for all ranks first."""
        dist.barrier()
        self._start = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """Adds the time since the start."""
        self.wall.append(time.perf_counter() - self._start[0])
        self.cpu.append(time.process_time() - self._start[1])


class AlternatingBatches:
    """Hands out batches, and trains the bare loop on each before."""

    def __init__(self, options: Options, module: DynamicCPModule) -> None:
        self.options = options
        self.module = module
        self.bare, self.lightning, self.checksums = Clock(), Clock(), Clock()
        self.losses: list[tuple[float, float]] = []

    def __len__(self) -> int:
        # With a length known, Lightning asks for no batch ahead of the step that it is for.
        return self.options.warmup + self.options.steps + 1

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        strategy = self.module.trainer.strategy
        # A twin of the Trainer's model on its process groups, planned in the same way.
        loop = BareLoop(self.options.model, strategy.context, clip_grad=CLIP)
        engine = DynamicCPEngine(strategy.context, strategy.engine.settings)
        for batch in self.options.batches(len(self)):
            read = read_global_batch(batch)
            self.checksums.start()
            checksums(read)
            self.checksums.stop()
            self.bare.start()
            _, result = loop.step(engine, batch)
            self.bare.stop()
            self.lightning.start()
            yield batch
            # Not reached after the last batch: nobody asks for another.
            self.lightning.stop()
            self.losses.append((float(result.loss), float(self.module.last_step.loss)))


def work(options: Options) -> dict[str, list[float]]:
    """What each process runs; the seconds of every step but the first few."""
    for name in ("lightning.pytorch", "lightning.fabric", "megatron.core"):
        logging.getLogger(name).setLevel(logging.ERROR)
    world_size = int(os.environ["WORLD_SIZE"])
    module = DynamicCPModule(options.model, lr_schedule=LRSchedule(kind="constant"))
    batches = AlternatingBatches(options, module)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        trainer = Trainer(
            strategy=DynamicCPStrategy(max_seqlen_per_dp_cp_rank=options.cap(world_size)),
            accelerator="cpu",
            devices=world_size,
            max_epochs=1,
            logger=CSVLogger(folder),
            log_every_n_steps=options.log_every_n_steps,
            callbacks=[StepReport()] if options.step_report else [],
            gradient_clip_val=CLIP,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, batches)
    for step, (bare, lightning) in enumerate(batches.losses):
        assert abs(bare - lightning) <= 1e-5 * abs(bare), (
            f"step {step}: the bare loop has loss {bare}, the Trainer {lightning}"
        )
    return {
        f"{name} {kind}": getattr(clock, kind)[options.warmup : options.warmup + options.steps]
        for name, clock in (
            ("bare", batches.bare),
            ("lightning", batches.lightning),
            ("checksums", batches.checksums),
        )
        for kind in ("wall", "cpu")
    }


def report(num_processes: int, seconds: dict[str, list[float]]) -> str:
    """A line of the table."""
    ratios = {
        kind: [
            lightning / bare
            for lightning, bare in zip(
                seconds[f"lightning {kind}"], seconds[f"bare {kind}"], strict=True
            )
        ]
        for kind in ("wall", "cpu")
    }
    share = median(
        checked / bare
        for checked, bare in zip(seconds["checksums wall"], seconds["bare wall"], strict=True)
    )
    return (
        f"{num_processes:>9} {median(seconds['bare wall']):>11.2f} "
        f"{median(seconds['lightning wall']):>12.2f}   {spread(ratios['wall'])}   "
        f"{spread(ratios['cpu'])}   {share:.5%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Step time of the whole Lightning path over a bare loop on the same engine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="one line each")
    parser.add_argument("--steps", type=int, default=12, help="measured pairs of steps")
    parser.add_argument("--warmup", type=int, default=2, help="pairs of steps before")
    parser.add_argument("--samples", type=int, default=16, help="sequences of a global batch")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--log-every-n-steps", type=int, default=1, help="for the CSV logger")
    parser.add_argument("--step-report", action="store_true", help="with the StepReport callback")
    given = vars(parser.parse_args())
    processes = given.pop("processes")
    options = Options(**given)
    print("ratio Lightning / bare of paired steps: median (quartiles), of rank 0")
    print(
        "processes  bare step s  Lightning s   of wall-clock time       of CPU time             "
        "checksums"
    )
    for num_processes in processes:
        print(report(num_processes, run_on(num_processes, work, options)), flush=True)


if __name__ == "__main__":
    main()
