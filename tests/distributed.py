"""The one helper that runs a function on several gloo processes."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PRELOAD = ["lightning", "lightning_dcp.engine"]


class WorkerError(AssertionError):
    """A worker failed or hung; the message holds the traceback of every rank that did."""


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    init_process_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Runs ``function(*args, **kwargs)`` on ``world_size`` processes that share a gloo group.

    Args:
        function: A function of a test module (it is pickled by name).
        world_size: Number of processes, at most 8.
        args: Given to the function.
        timeout: Seconds until every process is killed and the test fails; shortly before, the
            stack of every worker is printed.
        init_process_group: Whether the workers find an initialised default process group.
        kwargs: Given to the function.

    Returns:
        What the function returned, by rank. Return NumPy arrays or plain values: tensors would
        travel through shared memory that dies with the worker.

    Raises:
        WorkerError: A worker raised, died or did not finish in time.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        settings = (store, world_size, timeout, init_process_group, list(sys.path))
        workers = [
            context.Process(
                target=_work, args=(results, rank, settings, function, args, kwargs), daemon=True
            )
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        outcome = _collect(results, workers, time.monotonic() + timeout)
    failures = {rank: text for rank, (ok, text) in outcome.items() if not ok}
    if failures:
        raise WorkerError("\n".join(f"rank {rank}:\n{failures[rank]}" for rank in sorted(failures)))
    return [outcome[rank][1] for rank in range(world_size)]


def _collect(results: Any, workers: list[Any], deadline: float) -> dict[int, tuple[bool, Any]]:
    outcome: dict[int, tuple[bool, Any]] = {}
    try:
        while len(outcome) < len(workers):
            try:
                rank, ok, value = results.get(timeout=0.2)
                outcome[rank] = (ok, value)
            except queue.Empty:
                for rank, worker in enumerate(workers):
                    if rank not in outcome and worker.exitcode not in (None, 0):
                        outcome[rank] = (False, f"died with exit code {worker.exitcode}")
                if time.monotonic() > deadline:
                    for rank in range(len(workers)):
                        outcome.setdefault(rank, (False, "did not finish in time"))
            if any(not ok for ok, _ in outcome.values()):
                # The others may wait in a collective for the one that failed: a short grace.
                deadline = min(deadline, time.monotonic() + 10.0)
    finally:
        for worker in workers:
            worker.join(timeout=5.0)
            if worker.is_alive():
                worker.kill()
                worker.join()
    return outcome


def _work(
    results: Any,
    rank: int,
    settings: tuple[str, int, float, bool, list[str]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    store, world_size, timeout, init_process_group, path = settings
    sys.path[:] = path
    faulthandler.dump_traceback_later(max(timeout - 3.0, 1.0), exit=False)
    # A Trainer inside finds itself started from outside, as under torchrun.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="tests",
    )
    try:
        if init_process_group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
        value = function(*args, **kwargs)
        if dist.is_initialized():
            dist.barrier()
        results.put((rank, True, value))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.destroy_process_group()
