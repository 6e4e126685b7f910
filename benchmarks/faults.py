"""Hurts one rank of a small run, and looks at how the run ends.

``python benchmarks/faults.py`` starts runs by every launcher and in several layouts, has a rank of
each raise, be killed, be sent a signal or hang at some moment, and prints a line for each: the exit
code, the seconds until every process was gone, and how often the cause was named.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, override

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader, Dataset

import lightning_dcp as dcp

CAUSE = "hurt on purpose"
TIMEOUT = 20.0
"""Seconds of the process groups' timeout, for ranks that hang."""
_MARK = "LIGHTNING_DCP_HURT_RUN"


@dataclass(frozen=True)
class Harm:
    """What happens to which rank.

    Attributes:
        launcher: ``popen``, ``fork``, ``spawn`` or ``torchrun``.
        layout: ``cp``, ``tp`` or ``pp``: two ranks, shared that way.
        kind: ``raise``, ``hang``, or the name of a signal.
        moment: A hook of the module, ``data`` (in a worker of the loader), or ``random``.
        rank: Which rank it happens to; -1 for all, -2 for what started them (by its first child).
    """

    launcher: str
    layout: str
    kind: str
    moment: str
    rank: int


@dataclass(frozen=True)
class End:
    """How a hurt run ended.

    Attributes:
        code: The exit code of what was started; None where it had to be killed.
        seconds: From the harm until every process was gone.
        left: Processes that were there ten seconds after the first had ended.
        output: What all of them wrote.
        saved: Whether OnExceptionCheckpoint wrote a checkpoint.
    """

    code: int | None
    seconds: float
    left: int
    output: str
    saved: bool

    def named(self, harm: Harm) -> int:
        """How often the output says what happened."""
        if harm.kind == "raise":
            # Lightning's launcher for notebooks quotes the traceback of the process.
            return self.output.count(f"RuntimeError: {CAUSE}") + self.output.count(
                f"ValueError: {CAUSE}"
            )
        # torchrun sums up, Lightning's launcher for notebooks numbers processes.
        names = (f"rank {harm.rank} ", f"process {harm.rank} term", f"rank      : {harm.rank} ")
        return sum(any(name in line for name in names) for line in self.output.splitlines())


def run(harm: Harm, *, limit: float = 300.0) -> End:
    """Starts a run, and waits until it is gone."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        script = [str(Path(__file__).resolve()), "--train", folder, *map(str, astuple(harm))]
        command = [sys.executable, *script]
        if harm.launcher == "torchrun":
            agent = "torch.distributed.run"
            command = [sys.executable, "-m", agent, "--standalone", "--nproc-per-node=2", *script]
        output = Path(folder, "output")
        with output.open("w") as file:
            process = subprocess.Popen(
                command, env={**os.environ, _MARK: mark}, stdout=file, stderr=file, cwd=folder
            )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        ended = time.time()
        deadline = time.monotonic() + 10.0
        while (left := list(_processes(mark))) and code is not None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
            ended = time.time()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        hurt = Path(folder, "hurt")
        since = float(hurt.read_text()) if hurt.exists() else ended
        saved = Path(folder, "on_exception.ckpt").exists()
        return End(code, ended - since, len(left), output.read_text(), saved)


def _processes(mark: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        try:
            environment = Path(entry, "environ").read_bytes()
        except OSError:
            continue
        if f"{_MARK}={mark}".encode() in environment:
            yield int(entry.name)


# -- the run that is hurt ---------------------------------------------------------------------


@dataclass(frozen=True)
class Hurt:
    """Hurts this process where the harm says so.

    Attributes:
        folder: Where it writes when that was.
        harm: What happens where.
    """

    folder: str
    harm: Harm

    def at(self, moment: str) -> None:
        """Hurts the process if this is the moment."""
        if self.harm.moment == moment:
            self()

    def __call__(self) -> None:
        """Hurts the process, if it is the one."""
        rank, harm = int(os.environ.get("LOCAL_RANK", "0")), self.harm
        if harm.rank not in (rank, -1) and (harm.rank, rank) != (-2, 0):
            return
        Path(self.folder, "hurt").write_text(str(time.time()))
        if harm.kind == "raise":
            raise ValueError(CAUSE)
        if harm.kind == "hang":
            time.sleep(3600)
        os.kill(os.getppid() if harm.rank == -2 else os.getpid(), getattr(signal, harm.kind))


@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """The same batch again and again."""

    hurt: Hurt

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 3:
            self.hurt.at("data")
        rows = [torch.arange(length) % 61 for length in (40, 9, 17, 3)]
        return {"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}


class Module(dcp.DynamicCPModule):
    """Is hurt in its hooks."""

    def __init__(self, hurt: Hurt) -> None:
        config = dcp.ModelConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, vocab_size=61
        )
        super().__init__(config, lr_schedule=dcp.LRSchedule(kind="constant"))
        self.hurt = hurt

    @override
    def configure_model(self) -> None:
        super().configure_model()
        self.hurt.at("configure_model")

    @override
    def micro_batch_step(self, micro_batch: Any) -> Any:
        if self.trainer.global_step == 2:
            self.hurt.at("micro_batch_step")
        return super().micro_batch_step(micro_batch)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.hurt.at("validation_step")
        super().validation_step(batch, batch_idx)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hurt.at("on_save_checkpoint")

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.trainer.global_step == 3:
            self.hurt.at("on_train_batch_end")
            if self.hurt.harm.moment == "random":
                threading.Timer(random.uniform(0, 1), self.hurt).start()


def train(folder: str, harm: Harm) -> None:
    """A few steps, validation and checkpoints, in which one rank is hurt."""
    hurt = Hurt(folder, harm)
    layouts: dict[str, dict[str, Any]] = {
        "cp": {},
        "tp": {"tensor_model_parallel_size": 2},
        "pp": {"pipeline_model_parallel_size": 2},
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=dcp.DynamicCPStrategy(
            max_seqlen_per_dp_cp_rank=64,
            start_method="popen" if harm.launcher == "torchrun" else harm.launcher,
            # It rules how long ranks wait for others to start, too.
            timeout=timedelta(seconds=TIMEOUT) if harm.kind == "hang" else default_pg_timeout,
            **layouts[harm.layout],
        ),
        max_steps=200,
        val_check_interval=10,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            OnExceptionCheckpoint(folder),
            ModelCheckpoint(folder, every_n_train_steps=5, save_on_exception=True),
        ],
    )
    samples = Samples(hurt)
    workers = 1 if harm.moment == "data" else 0
    loader: DataLoader[Any] = DataLoader(samples, batch_size=None, num_workers=workers)
    trainer.fit(Module(hurt), loader, DataLoader(samples, batch_size=None))


SAMPLE = [
    Harm(launcher, "cp", kind, moment, rank)
    for launcher in ("popen", "torchrun", "fork", "spawn")
    for kind, moment, rank in (
        ("raise", "micro_batch_step", 1),
        ("raise", "configure_model", 0),
        ("raise", "data", 1),
        ("raise", "on_train_batch_end", -1),
        ("SIGKILL", "random", 1),
        ("SIGTERM", "random", 1),
        ("SIGTERM", "random", 0),
        ("SIGINT", "random", 1),
        ("hang", "on_train_batch_end", 1),
    )
] + [Harm(launcher, "cp", "SIGTERM", "random", -2) for launcher in ("fork", "torchrun")]
SAMPLE += [
    Harm("popen", layout, kind, moment, rank)
    for layout in ("tp", "pp")
    for kind, moment, rank in (
        ("raise", "micro_batch_step", 1),
        ("raise", "validation_step", 0),
        ("SIGKILL", "random", 0),
        ("SIGTERM", "random", 1),
        ("SIGTERM", "on_save_checkpoint", 1),
    )
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs=6, metavar="ARG", help="a run that is hurt")
    parser.add_argument("--only", default="", help="runs whose description holds these words")
    parser.add_argument("--output", type=Path, help="folder for what the runs wrote")
    options = parser.parse_args()
    if options.train:
        folder, launcher, layout, kind, moment, rank = options.train
        train(folder, Harm(launcher, layout, kind, moment, int(rank)))
        return
    print("| run | exit code | seconds | left | named | saved |\n|---|---|---|---|---|---|")
    for harm in SAMPLE:
        what = f"{harm.launcher} {harm.layout} {harm.kind} {harm.moment} rank {harm.rank}"
        if not all(word in what for word in options.only.split()):
            continue
        end = run(harm)
        row = (what, end.code, f"{end.seconds:.1f}", end.left, end.named(harm), end.saved)
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / what.replace(" ", "-")).write_text(end.output)


if __name__ == "__main__":
    main()
