"""The one helper that runs a function on several gloo processes.

The processes are kept from one call to the next, at most eight (for each of pytest's workers): what
costs is their start and their imports. A call on N ranks uses the first N of them, with a process
group of its own. After each call a worker must be as it was: no process group, CPU mode, thread or
environment variable may stay. Those that failed, or left something, are replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

import hygiene
from hygiene import load

# Everything that tests import: a worker is forked from a process that has it.
mp.get_context("forkserver").set_forkserver_preload(
    ["lightning.pytorch", "lightning_dcp.strategy", "pytest", "distributed"]
)
_MOST = 8
# A collective that waits for a rank that failed is ended by killing the worker, not by gloo.
_COLLECTIVE = timedelta(hours=2)
_GRACE = 10.0


class WorkerError(AssertionError):
    """A worker failed or hung; the message holds the traceback of every rank that did."""


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 600.0,
    init_process_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Runs ``function(*args, **kwargs)`` on ``world_size`` processes that share a gloo group.

    Args:
        function: A function of a test module (it is pickled by name).
        world_size: Number of processes, at most 8.
        args: Given to the function.
        timeout: Seconds on an idle machine until every process is killed and the test fails with
            the stack of every worker. It is there for hangs only.
        init_process_group: Whether the workers find an initialised default process group.
        kwargs: Given to the function.

    Returns:
        What the function returned, by rank.

    Raises:
        WorkerError: A worker raised, died, did not finish in time, or left something behind.
    """
    while len(_workers) < world_size:
        _workers.append(_Worker(len(_workers)))
    workers = _workers[:world_size]
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store") if init_process_group else None
        call, port = pickle.dumps((function, args, kwargs)), _free_port()
        for worker in workers:
            worker.connection.send((list(sys.path), world_size, store, port, call))
        outcome = _collect(workers, timeout)
    failures = {rank: text for rank, (ok, text) in outcome.items() if not ok}
    if failures:
        texts = [f"rank {rank}:\n{failures[rank]}{workers[rank].said()}" for rank in failures]
        _replace(workers)
        raise WorkerError("\n".join(texts))
    return [pickle.loads(outcome[rank][1]) for rank in range(world_size)]


def _free_port() -> str:
    """A port of this call alone: at another's, the store would have that one's keys."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@dataclass
class _Worker:
    """A process that waits for calls, the parent's end of its pipe, and what it wrote."""

    rank: int
    process: Any = field(init=False)
    connection: Connection = field(init=False)
    output: Path = field(init=False)

    def __post_init__(self) -> None:
        context = mp.get_context("forkserver")
        self.connection, other = context.Pipe()
        handle, name = tempfile.mkstemp(prefix=f"rank-{self.rank}-")
        os.close(handle)
        self.output = Path(name)
        # Not a daemon: data loaders in it have workers of their own.
        self.process = context.Process(target=_serve, args=(other, self.rank, name))
        self.process.start()
        other.close()

    def said(self) -> str:
        text = self.output.read_text(errors="replace")[-6000:].strip()
        return f"\nIts output:\n{text}\n" if text else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.output.unlink(missing_ok=True)


_workers: list[_Worker] = []


def _replace(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()
        _workers[worker.rank] = _Worker(worker.rank)


@atexit.register
def close() -> None:
    """Ends every worker."""
    while _workers:
        _workers.pop().kill()


def _collect(workers: list[_Worker], timeout: float) -> dict[int, tuple[bool, Any]]:
    """By rank, whether it went well, and the pickled result or the failure."""
    outcome: dict[int, tuple[bool, Any]] = {}
    start, failed_at = time.monotonic(), None
    try:
        while len(outcome) < len(workers):
            left = {w.connection: w for w in workers if w.rank not in outcome}
            for connection in wait(list(left), timeout=1.0):
                rank = left[connection].rank
                try:
                    outcome[rank] = left[connection].connection.recv()
                except (EOFError, ConnectionResetError):
                    left[connection].process.join()
                    code = left[connection].process.exitcode
                    outcome[rank] = (False, f"died with exit code {code}")
            now = time.monotonic()
            if failed_at is None and any(not ok for ok, _ in outcome.values()):
                failed_at = now
            # The others may wait in a collective for the one that failed: a short grace.
            waits_in_vain = failed_at is not None and now - failed_at > _GRACE * load()
            if waits_in_vain or now - start > timeout * load():
                hanging = [worker for worker in workers if worker.rank not in outcome]
                for worker in hanging:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.process.pid, signal.SIGUSR1)
                time.sleep(1.0 * load())
                outcome |= {w.rank: (False, "did not finish in time") for w in hanging}
    except BaseException:
        # Interrupted, or over pytest's own limit: the workers are still busy.
        _replace(workers)
        raise
    return outcome


def _serve(connection: Connection, rank: int, output: str) -> None:
    """The life of a worker: calls, one after the other, until the parent is gone."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _share_device()
    # As in a user's process: the forkserver's way, which it hands on, would have the workers of a
    # data loader import everything anew.
    mp.set_start_method("fork", force=True)
    # What is imported stays: the collector need not look at it again.
    gc.freeze()
    state = hygiene.State.now()
    while True:
        try:
            path, *task = connection.recv()
        except EOFError:
            return
        os.ftruncate(descriptor, 0)
        sys.path[:] = path
        try:
            value = pickle.dumps(_call(rank, *task))
            gc.collect()
            left = state.restore()
            answer = (False, f"left behind: {'; '.join(left)}") if left else (True, value)
        except BaseException:
            answer = (False, traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(answer)


def _share_device() -> None:
    """Lets all gloo groups of this process share one device.

    Each would have one of its own otherwise, whose thread wakes up a hundred times a second: with
    Megatron-Core's dozens of groups on each of eight ranks these threads take a core of their own.
    """
    device = dist.ProcessGroupGloo.create_default_device()

    class OnOneDevice(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [device], 1, timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OnOneDevice


def _call(rank: int, world_size: int, store: str | None, port: str, call: bytes) -> Any:
    # A Trainer inside finds itself started from outside, as under torchrun.
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "tests",
    }
    os.environ.update(environment)
    function, args, kwargs = pickle.loads(call)
    try:
        if store is not None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=_COLLECTIVE,
            )
        value = function(*args, **kwargs)
        if dist.is_initialized():
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in environment:
            os.environ.pop(name, None)
    return value
