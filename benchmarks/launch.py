"""Starts a benchmark's processes on this machine, and sums up paired times."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

import torch.multiprocessing as mp


def run_on(num_processes: int, function: Callable[..., Any], *args: Any) -> Any:
    """Runs ``function(*args)`` on processes with a launcher's environment variables set.

    Args:
        num_processes: How many.
        function: A function of the benchmark's module; it is pickled by name.
        args: Given to the function.

    Returns:
        What rank 0 returned.
    """
    # Before the workers import torch, which reads it once.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_work, args=(num_processes, port, results, function, args), nprocs=num_processes)
    return results.get()


def _work(
    rank: int,
    num_processes: int,
    port: int,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
    }
    warnings.simplefilter("ignore")
    value = function(*args)
    if rank == 0:
        results.put(value)


def spread(values: Sequence[float]) -> str:
    """Median and the quartiles around it, in three digits after the point."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.3f} ({low:.3f} to {high:.3f})"
