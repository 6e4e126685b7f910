"""Runs a function on processes of this machine, or on those that a launcher started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn


def started_by_launcher() -> bool:
    """Whether this process is one of several that torchrun or a like launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_on(num_processes: int, function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns on rank 0 of processes with a launcher's variables set.

    The function is pickled by name.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A process failed; all are ended.
    """
    # The system picks a free port. Another process may take it before torch does; that ends in an
    # error, not in a wrong time.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = get_context("spawn").SimpleQueue()
    # As torchrun does: processes with a thread for each core would fight for the cores.
    added = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    # The workers' torch reads it once, when it is imported.
    os.environ.update(added)
    try:
        spawn(_work, args=(num_processes, port, results, function, args), nprocs=num_processes)
    finally:
        for name in added:
            del os.environ[name]
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
        "LOCAL_WORLD_SIZE": str(num_processes),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
    }
    value = function(*args)
    if rank == 0:
        results.put(value)
