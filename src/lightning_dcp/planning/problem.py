"""A checked planning request, and the tables that planners look costs up in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.alignment import longest_that_fits, row_alignment
from lightning_dcp.planning.bound import lower_bound
from lightning_dcp.planning.cost import CostModel, CostParts

Execution = Literal["lockstep", "free_running"]
"""Who waits for whom: a step for all of its ranks, or only the members of a group."""


def execution_of(
    *, pipeline_model_parallel_size: int = 1, expert_model_parallel_size: int = 1
) -> Execution:
    """How a run of these sizes executes its steps.

    Stages hand micro-batches on in one order, and experts exchange rows over the whole pool: every
    step then waits for its slowest rank. Without either, a rank meets others only in its CP group,
    and in the reduction of gradients at the end.

    Args:
        pipeline_model_parallel_size: Pipeline stages.
        expert_model_parallel_size: Ranks that share the experts.
    """
    together = pipeline_model_parallel_size > 1 or expert_model_parallel_size > 1
    return "lockstep" if together else "free_running"


@dataclass(frozen=True, eq=False)
class Problem:
    """What a planner gets: the lengths, the pool, and rows and time of each sample at each size.

    Attributes:
        lengths: Tokens of each sample, without padding.
        num_ranks: Size of the DPxCP pool.
        cap: The most rows a rank may hold in a step, padding included
            (``max_seqlen_per_dp_cp_rank``).
        tp_size: Tensor-parallel size.
        context_parallel_size: The size asked for, for the ``static`` planner.
        cost_model: Predicts times.
        execution: Whether a step waits for its slowest rank (``"lockstep"``), or only the members
            of a group for each other (``"free_running"``).
        sizes: The CP sizes that a group may have, ascending: the powers of two below the pool's
            size, and the pool itself.
        rows: By CP size: rows a rank holds of each sample.
        times: By CP size: seconds that each sample adds to its micro-batch.
        fixed: By CP size: seconds of a micro-batch whatever its samples.
        parts: Where the times of the samples go.
        row_table: The same as ``rows``; int64, ``[num_sizes, num_samples]``.
        time_table: The same as ``times``; float64, ``[num_sizes, num_samples]``.
        min_sizes: The smallest CP size that holds each sample.
        order: Sample ids, longest first; equal lengths by id.
    """

    lengths: tuple[int, ...]
    num_ranks: int
    cap: int
    tp_size: int = 1
    context_parallel_size: int | None = None
    cost_model: CostModel = field(default_factory=CostModel)
    execution: Execution = "lockstep"
    sizes: tuple[int, ...] = field(init=False)
    rows: dict[int, list[int]] = field(init=False, repr=False)
    times: dict[int, list[float]] = field(init=False, repr=False)
    fixed: dict[int, float] = field(init=False, repr=False)
    parts: CostParts = field(init=False, repr=False)
    row_table: NDArray[np.int64] = field(init=False, repr=False)
    time_table: NDArray[np.float64] = field(init=False, repr=False)
    min_sizes: list[int] = field(init=False, repr=False)
    order: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_ranks", "cap", "tp_size"):
            label = "max_seqlen_per_dp_cp_rank" if name == "cap" else name
            check_positive_int(label, getattr(self, name))
        if self.execution not in get_args(Execution):
            raise ValueError(
                f"execution={self.execution!r} is unknown; choose 'lockstep' or 'free_running'"
            )
        self._check_cap()
        self._check_lengths()
        lengths = np.asarray(self.lengths, dtype=np.int64)
        sizes = cp_sizes_of_pool(self.num_ranks)
        parts = self.cost_model.parts(lengths, sizes, self.tp_size)
        rows, times = parts.rows, parts.total
        smallest = np.full(len(lengths), self.num_ranks)
        for size, row in zip(reversed(sizes), rows[::-1], strict=True):
            smallest[row <= self.cap] = size
        derived = {
            "sizes": sizes,
            "rows": dict(zip(sizes, rows.tolist(), strict=True)),
            "times": dict(zip(sizes, times.tolist(), strict=True)),
            "fixed": {size: self.cost_model.fixed_time(size) for size in sizes},
            "parts": parts,
            "row_table": rows,
            "time_table": times,
            "min_sizes": smallest.tolist(),
            "order": np.argsort(-lengths, kind="stable").tolist(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @cached_property
    def bound(self) -> float:
        """:func:`lightning_dcp.planning.bound.lower_bound` of this problem, seconds."""
        return lower_bound(self)

    def _check_cap(self) -> None:
        cp_size = min(self.num_ranks, 2)
        least = row_alignment(cp_size, self.tp_size) // cp_size
        if self.cap < least:
            raise ValueError(
                f"max_seqlen_per_dp_cp_rank={self.cap} holds no sequence: with {self.num_ranks} "
                f"DPxCP ranks and tp_size={self.tp_size} each sequence takes {least} rows or more "
                f"on a rank after padding; set max_seqlen_per_dp_cp_rank to at least {least}"
            )

    def _check_lengths(self) -> None:
        if not self.lengths:
            raise ValueError("lengths is empty: a global batch needs at least one sample")
        most = longest_that_fits(self.cap, self.num_ranks, self.tp_size)
        if min(self.lengths) > 0 and max(self.lengths) <= most:
            return
        for sample, length in enumerate(self.lengths):
            if length <= 0:
                raise ValueError(
                    f"sample {sample} has length {length}; every sequence needs 1 to {most} "
                    "tokens: drop empty samples before the batch is made"
                )
            if length > most:
                raise ValueError(
                    f"sample {sample} has length {length}, but at most {most} tokens fit "
                    f"{self.num_ranks} DPxCP ranks of max_seqlen_per_dp_cp_rank={self.cap} rows "
                    f"with tp_size={self.tp_size}; raise max_seqlen_per_dp_cp_rank, use more "
                    "ranks, or shorten the sequence, e.g. by max_length of the DataModule"
                )


def cp_sizes_of_pool(num_ranks: int) -> tuple[int, ...]:
    """The CP sizes that a pool offers, ascending: powers of two below its size, and its size."""
    powers = [1 << k for k in range((num_ranks - 1).bit_length())]
    return (*powers, num_ranks)


def check_positive_int(name: str, value: object) -> int:
    """``value`` as a Python int of 1 or more.

    Raises:
        TypeError: It is no integer; a bool is none either.
        ValueError: It is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give an int of 1 or more")
    if value < 1:
        raise ValueError(f"{name}={value} must be 1 or more")
    return int(value)


def as_lengths(lengths: Sequence[int] | NDArray[np.integer]) -> tuple[int, ...]:
    """The lengths as Python ints.

    Raises:
        TypeError: ``lengths`` is no sequence or one-dimensional array of integers.
    """
    if isinstance(lengths, np.ndarray):
        if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
            raise TypeError(
                f"lengths is an array of shape {lengths.shape} and type {lengths.dtype}; give one "
                "dimension of integers, the tokens of each sample"
            )
        return tuple(lengths.tolist())
    if isinstance(lengths, str | bytes) or not isinstance(lengths, Sequence):
        raise TypeError(
            f"lengths is a {type(lengths).__name__}; give a list, tuple or NumPy array of ints"
        )
    for kind in set(map(type, lengths)):
        if issubclass(kind, bool) or not issubclass(kind, int | np.integer):
            sample = next(i for i, length in enumerate(lengths) if type(length) is kind)
            raise TypeError(
                f"sample {sample} has length {lengths[sample]!r} of type {kind.__name__}; lengths "
                "are ints, the tokens of each sample"
            )
    return tuple(map(int, lengths))


def total_time(problem: Problem, sample_ids: Sequence[int], size: int) -> float:
    """The time of a micro-batch of these samples on a CP group of ``size`` ranks."""
    times = problem.times[size]
    # fsum: the same on every machine and in any order, so that ranks cannot disagree on a tie.
    return problem.fixed[size] + math.fsum([times[i] for i in sample_ids])


def total_rows(problem: Problem, sample_ids: Sequence[int], size: int) -> int:
    """The rows a rank of a CP group of ``size`` ranks holds of these samples."""
    rows = problem.rows[size]
    return sum(rows[i] for i in sample_ids)
