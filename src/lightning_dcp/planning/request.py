"""A checked planning request, and the tables that planners look costs up in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.padding import TIGHT, PackPadding, longest_that_fits, row_alignment
from lightning_dcp.config.parallel import Execution, ParallelSizes, cp_sizes_of_pool
from lightning_dcp.planning.bound import lower_bound
from lightning_dcp.planning.cost.model import CostModel, CostParts
from lightning_dcp.planning.plan import Group, Step


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How global batches become plans: the pool, the cap and the planner; all but the lengths.

    Attributes:
        num_ranks: Size of the DPxCP pool.
        max_seqlen_per_dp_cp_rank: The most rows that a rank may hold of one micro-batch, padding
            included (the cap).
        planner: Name of a planner, or a function from a planning request to steps.
        tp_size: Tensor-parallel size; padded lengths are multiples of it.
        context_parallel_size: The CP size of ``planner="static"``; None for the smallest that holds
            every sample. The other planners choose sizes themselves.
        cost_model: Predicts the time of micro-batches.
        execution: Who waits for whom: ``"lockstep"`` or ``"free_running"``.
        padding: How packs are padded beyond their sequences.

    Raises:
        TypeError: A size or the cap is no integer.
        ValueError: One is below 1, or an option has a value that cannot work.
    """

    num_ranks: int
    max_seqlen_per_dp_cp_rank: int
    planner: str | Callable[[Problem], Sequence[Step]] = "balanced"
    tp_size: int = 1
    context_parallel_size: int | None = None
    cost_model: CostModel = field(default_factory=CostModel)
    execution: Execution = "lockstep"
    padding: PackPadding = TIGHT

    def __post_init__(self) -> None:
        for name in ("num_ranks", "max_seqlen_per_dp_cp_rank", "tp_size"):
            object.__setattr__(self, name, check_at_least(name, getattr(self, name)))
        if self.context_parallel_size is not None:
            size = check_at_least("context_parallel_size", self.context_parallel_size)
            object.__setattr__(self, "context_parallel_size", size)

    @classmethod
    def of_run(
        cls,
        sizes: ParallelSizes,
        *,
        max_seqlen_per_dp_cp_rank: int,
        planner: str | Callable[[Problem], Sequence[Step]] = "balanced",
        context_parallel_size: int | None = None,
        cost_model: CostModel | None = None,
        execution: Execution | None = None,
        padding: PackPadding = TIGHT,
    ) -> PlanSettings:
        """The settings of a run with these parallel sizes.

        Args:
            sizes: Give the pool, the tensor-parallel size, who waits for whom, and the CP size of
                the ``static`` planner.
            max_seqlen_per_dp_cp_rank: The cap.
            planner: Name of a planner, or a function.
            context_parallel_size: Another size of the ``static`` planner than that of ``sizes``;
                of no effect with other planners.
            cost_model: Predicts the time of micro-batches; by default :class:`CostModel`.
            execution: Another one than the sizes imply.
            padding: How packs are padded.
        """
        static_size = context_parallel_size or sizes.context_parallel_size
        return cls(
            num_ranks=sizes.dp_cp_size,
            max_seqlen_per_dp_cp_rank=max_seqlen_per_dp_cp_rank,
            planner=planner,
            tp_size=sizes.tensor_model_parallel_size,
            context_parallel_size=static_size if planner == "static" else None,
            cost_model=cost_model or CostModel(),
            execution=execution or sizes.execution,
            padding=padding,
        )


@dataclass(frozen=True, eq=False)
class Problem:
    """What a planner gets: the lengths, the pool, and rows and time of each sample at each size.

    Samples that must stay together are one here, with the rows and the time of all of them: what a
    planner calls a sample is then a unit, and :meth:`samples_of` turns its steps into those of
    the samples.

    Attributes:
        lengths: Tokens of each sample, without padding; given by sample, kept by unit.
        num_ranks: Size of the DPxCP pool.
        cap: The most rows a rank may hold in a step, padding included
            (``max_seqlen_per_dp_cp_rank``).
        tp_size: Tensor-parallel size.
        context_parallel_size: The size asked for, for the ``static`` planner.
        cost_model: Predicts times.
        execution: Whether a step waits for its slowest rank (``"lockstep"``), or only the members
            of a group for each other (``"free_running"``).
        padding: How packs are padded beyond their sequences.
        units: The sample ids of each unit, ascending, by first sample; ``None`` if every sample
            is for itself.
        sizes: The CP sizes that a group may have, ascending: the powers of two below the pool's
            size, and the pool itself.
        rows: By CP size: rows a rank holds of each sample.
        times: By CP size: seconds that each sample adds to its micro-batch.
        fixed: By CP size: seconds of a micro-batch whatever its samples.
        rooms: By CP size: the rows that samples may take so that the padded pack keeps the cap.
        has_tails: Whether packs are filled up by different numbers of rows, whose time is no
            sample's: :meth:`tail_time`.
        parts: Where the times of the samples go.
        row_table: The same as ``rows``; int64, ``[num_sizes, num_samples]``.
        time_table: The same as ``times``; float64, ``[num_sizes, num_samples]``.
        room_table: The same as ``rooms``, but at most all rows; int64, ``[num_sizes, 1]``.
        fits: Whether a size and all larger ones hold a sample; ``[num_sizes, num_samples]``.
        min_sizes: The smallest CP size that holds each sample, as do all larger ones.
        order: Sample ids, longest first; equal lengths by id.
    """

    lengths: tuple[int, ...]
    num_ranks: int
    cap: int
    tp_size: int = 1
    context_parallel_size: int | None = None
    cost_model: CostModel = field(default_factory=CostModel)
    execution: Execution = "lockstep"
    padding: PackPadding = TIGHT
    units: tuple[tuple[int, ...], ...] | None = None
    sizes: tuple[int, ...] = field(init=False)
    rows: dict[int, list[int]] = field(init=False, repr=False)
    times: dict[int, list[float]] = field(init=False, repr=False)
    fixed: dict[int, float] = field(init=False, repr=False)
    rooms: dict[int, int] = field(init=False, repr=False)
    has_tails: bool = field(init=False, repr=False)
    parts: CostParts = field(init=False, repr=False)
    row_table: NDArray[np.int64] = field(init=False, repr=False)
    time_table: NDArray[np.float64] = field(init=False, repr=False)
    room_table: NDArray[np.int64] = field(init=False, repr=False)
    fits: NDArray[np.bool_] = field(init=False, repr=False)
    min_sizes: list[int] = field(init=False, repr=False)
    order: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_ranks", "cap", "tp_size"):
            label = "max_seqlen_per_dp_cp_rank" if name == "cap" else name
            check_at_least(label, getattr(self, name))
        if self.execution not in get_args(Execution):
            raise ValueError(
                f"execution={self.execution!r} is unknown; choose 'lockstep' or 'free_running'"
            )
        self._check_cap()
        self._check_lengths()
        sizes = cp_sizes_of_pool(self.num_ranks)
        padding, tp_size = self.padding, self.tp_size
        parts = self._parts(sizes)
        rows, times = parts.rows, parts.total
        rooms = [padding.usable_rows(self.cap, size, tp_size) for size in sizes]
        # All rows together are as good as any number above, which may be too large for NumPy.
        most = int(rows.max(axis=0).sum())
        room_table = np.array([min(room, most) for room in rooms], dtype=np.int64)[:, None]
        # Short samples of one unit may take more rows at a larger size.
        fits = np.logical_and.accumulate((rows <= room_table)[::-1])[::-1]
        filled = self.cost_model.seconds_per_row * (padding.pad_to_length or 0)
        derived = {
            "sizes": sizes,
            "rows": dict(zip(sizes, rows.tolist(), strict=True)),
            "times": dict(zip(sizes, times.tolist(), strict=True)),
            "fixed": {size: self.cost_model.fixed_time(size) + filled for size in sizes},
            "rooms": dict(zip(sizes, rooms, strict=True)),
            "has_tails": not padding.is_tight and padding.pad_to_length is None,
            "parts": parts,
            "row_table": rows,
            "time_table": times,
            "room_table": room_table,
            "fits": fits,
            "min_sizes": np.array(sizes)[fits.argmax(axis=0)].tolist(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if self.units is not None:
            self._check_units(fits[-1])
            lengths = tuple(sum(self.lengths[i] for i in unit) for unit in self.units)
            object.__setattr__(self, "lengths", lengths)
        order = np.argsort(-np.asarray(self.lengths, dtype=np.int64), kind="stable")
        object.__setattr__(self, "order", order.tolist())

    def _parts(self, sizes: tuple[int, ...]) -> CostParts:
        """Where the time of each sample goes, or of each unit."""
        lengths = np.asarray(self.lengths, dtype=np.int64)
        parts = self.cost_model.parts(lengths, sizes, self.tp_size, self.padding)
        if self.padding.pad_to_length is not None:
            # Every micro-batch does the linear work of as many rows.
            parts = replace(parts, linear=np.zeros_like(parts.linear))
        return parts if self.units is None else parts.of_units(self.units)

    def samples_of(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """A planner's steps with sample ids, where there are units in place of samples."""
        units = self.units
        if units is None:
            return tuple(steps)

        def expand(group: Group) -> Group:
            samples = [sample for unit in group.sample_ids for sample in units[unit]]
            return replace(group, sample_ids=tuple(sorted(samples)))

        return tuple(replace(step, groups=tuple(map(expand, step.groups))) for step in steps)

    def units_of(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The reverse of :meth:`samples_of`, of steps that keep the units together."""
        if self.units is None:
            return tuple(steps)
        unit_of = {sample: k for k, unit in enumerate(self.units) for sample in unit}

        def join(group: Group) -> Group:
            return replace(group, sample_ids=tuple(sorted({unit_of[i] for i in group.sample_ids})))

        return tuple(replace(step, groups=tuple(map(join, step.groups))) for step in steps)

    def tail_time(self, size: int, rows: int) -> float:
        """Seconds of the rows that fill up a pack whose samples take ``rows`` on ``size`` ranks."""
        if not self.has_tails:
            return 0.0
        more = self.padding.pack_rows(rows, size, self.tp_size) - rows
        return self.cost_model.seconds_per_row * more

    @cached_property
    def bound(self) -> float:
        """:func:`lightning_dcp.planning.bound.lower_bound` of this problem, seconds."""
        return lower_bound(self)

    def _check_cap(self) -> None:
        cp_size = min(self.num_ranks, 2)
        self.padding.check_cap(self.cap, self.num_ranks, self.tp_size)
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
        most = longest_that_fits(self.cap, self.num_ranks, self.tp_size, self.padding)
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
                    f"with tp_size={self.tp_size}{self._limits()}; raise "
                    "max_seqlen_per_dp_cp_rank, use more ranks, or shorten the sequence, e.g. by "
                    "max_length of the DataModule"
                )

    def _limits(self) -> str:
        """The padding that keeps samples from the whole cap, for errors."""
        given = [
            f"{f.name}={getattr(self.padding, f.name)}"
            for f in fields(self.padding)
            if getattr(self.padding, f.name)
        ]
        return f" and {', '.join(given)}" if given else ""

    def _check_units(self, fits: NDArray[np.bool_]) -> None:
        assert self.units is not None
        if fits.all():
            return
        where = int(fits.argmin())
        unit = self.units[where]
        shown = ", ".join(f"{i} ({self.lengths[i]} tokens)" for i in unit[:8])
        room = self.rooms[self.num_ranks]
        raise ValueError(
            f"keep_together puts {len(unit)} samples in one micro-batch: "
            f"{shown}{' and others' if len(unit) > 8 else ''}; they take "
            f"{int(self.row_table[-1, where])} rows a rank on the whole pool of {self.num_ranks} "
            f"DPxCP ranks after padding, but at most {room} fit max_seqlen_per_dp_cp_rank="
            f"{self.cap} with tp_size={self.tp_size}{self._limits()}; raise "
            "max_seqlen_per_dp_cp_rank, use more ranks, or shorten these samples"
        )


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


def as_units(
    keep_together: Sequence[int] | NDArray[np.integer] | None, num_samples: int
) -> tuple[tuple[int, ...], ...] | None:
    """The sample ids of each unit, by first sample.

    Args:
        keep_together: A unit id for each sample; ``None`` for none.
        num_samples: Samples of the global batch.

    Raises:
        TypeError: The ids are no ints.
        ValueError: Not one id a sample.
    """
    if keep_together is None:
        return None
    ids = np.asarray(keep_together)
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(
            f"keep_together holds {ids.dtype}; give an int for each sample, equal for samples that "
            "must stay together"
        )
    if ids.shape != (num_samples,):
        raise ValueError(
            f"keep_together has shape {ids.shape} for {num_samples} samples; give one id a sample"
        )
    units: dict[int, list[int]] = {}
    for sample, unit in enumerate(ids.tolist()):
        units.setdefault(unit, []).append(sample)
    return tuple(map(tuple, units.values()))


def total_time(problem: Problem, sample_ids: Sequence[int], size: int) -> float:
    """The time of a micro-batch of these samples on a CP group of ``size`` ranks."""
    times = problem.times[size]
    # fsum: the same on every machine and in any order, so that ranks cannot disagree on a tie.
    seconds = problem.fixed[size] + math.fsum([times[i] for i in sample_ids])
    if problem.has_tails:
        seconds += problem.tail_time(size, total_rows(problem, sample_ids, size))
    return seconds


def total_rows(problem: Problem, sample_ids: Sequence[int], size: int) -> int:
    """The rows a rank of a CP group of ``size`` ranks holds of these samples."""
    rows = problem.rows[size]
    return sum(rows[i] for i in sample_ids)
