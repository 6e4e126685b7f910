"""Starts a benchmark's processes on this machine, reads their memory, sums up paired times."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from lightning_dcp.tools.calibrate import processes


def run_on(num_processes: int, function: Callable[..., Any], *args: Any) -> Any:
    """Runs ``function(*args)`` on processes with a launcher's environment variables set.

    Args:
        num_processes: How many.
        function: A function of the benchmark's module; it is pickled by name.
        args: Given to the function.

    Returns:
        What rank 0 returned.
    """
    return processes.run_on(num_processes, _without_warnings, function, *args)


def _without_warnings(function: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("ignore")
    return function(*args)


def proc_bytes(path: str, key: str) -> int:
    """A size that Linux reports, such as ``VmHWM`` of ``/proc/self/status``, in bytes."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no {key}")


def spread(values: Sequence[float]) -> str:
    """Median and the quartiles around it, in three digits after the point."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.3f} ({low:.3f} to {high:.3f})"
