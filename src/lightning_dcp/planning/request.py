"""What planners are asked: the settings of a run, and a global batch with its rows and times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.padding import TIGHT, PackPadding, longest_that_fits, row_alignment
from lightning_dcp.config.parallel import Execution, ParallelSizes, cp_sizes_of_pool
from lightning_dcp.planning.cost.model import CostModel, CostParts
from lightning_dcp.planning.plan import Group, Step


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How global batches become plans: the pool, the cap and the planner; all but the lengths.

    Attributes:
        num_ranks: Size of the DPxCP pool.
        max_seqlen_per_dp_cp_rank: The most rows that a rank may hold of one micro-batch, padding
            included (the cap).
        planner: Name of a planner, or a function from a :class:`PlanRequest` to steps.
        tp_size: Tensor-parallel size; padded lengths are multiples of it.
        context_parallel_size: The CP size of ``planner="static"``; None for the smallest that holds
            every sample. The other planners choose sizes themselves.
        cost_model: Predicts the time of micro-batches.
        execution: Who waits for whom: in ``"lockstep"`` a step for its slowest rank, in
            ``"free_running"`` only the members of a group for each other.
        padding: How packs are padded beyond their sequences.

    Raises:
        TypeError: A size or the cap is no integer.
        ValueError: One is below 1, no sequence fits the cap, or an option has a value that cannot
            work.
    """

    num_ranks: int
    max_seqlen_per_dp_cp_rank: int
    planner: str | Callable[[PlanRequest], Sequence[Step]] = "balanced"
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
        if self.execution not in get_args(Execution):
            raise ValueError(
                f"execution={self.execution!r} is unknown; choose 'lockstep' or 'free_running'"
            )
        cap, cp_size = self.max_seqlen_per_dp_cp_rank, min(self.num_ranks, 2)
        self.padding.check_cap(cap, self.num_ranks, self.tp_size)
        # All CP sizes above 1 need as many rows for the shortest sequence: 2 stands for them.
        least = row_alignment(cp_size, self.tp_size) // cp_size
        if cap < least:
            raise ValueError(
                f"max_seqlen_per_dp_cp_rank={cap} holds no sequence: with {self.num_ranks} DPxCP "
                f"ranks and tp_size={self.tp_size} each sequence takes {least} rows or more on a "
                f"rank after padding; set max_seqlen_per_dp_cp_rank to at least {least}"
            )

    @classmethod
    def of_run(
        cls,
        sizes: ParallelSizes,
        *,
        max_seqlen_per_dp_cp_rank: int,
        planner: str | Callable[[PlanRequest], Sequence[Step]] = "balanced",
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

    @property
    def row_option(self) -> tuple[str, int]:
        """The option that limits the rows of a micro-batch, and its value; for errors."""
        if self.padding.pad_to_length is not None:
            return "pad_to_length", self.padding.pad_to_length
        return "max_seqlen_per_dp_cp_rank", self.max_seqlen_per_dp_cp_rank

    def limits(self) -> str:
        """What else than :attr:`row_option` limits sequences, for errors."""
        padding = "".join(
            f" and {f.name}={getattr(self.padding, f.name)}"
            for f in fields(self.padding)
            if getattr(self.padding, f.name) and f.name != self.row_option[0]
        )
        return f"tp_size={self.tp_size}{padding}"


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """What a planner gets: a global batch and how to plan it, with rows and times by CP size.

    Samples that must stay together are one here, with the rows and the time of all of them: what a
    planner calls a sample is then a unit, and :meth:`samples_of` turns its steps into those of the
    samples.

    Attributes:
        lengths: Tokens of each sample, without padding; given by sample, kept by unit.
        settings: Everything else that was asked for.
        units: The sample ids of each unit, ascending, by first sample; ``None`` if every sample is
            for itself.
        cp_sizes: The CP sizes that a group may have, ascending: the powers of two below the pool's
            size, and the pool itself.
        rows: By CP size: rows a rank holds of each sample.
        times: By CP size: seconds that each sample adds to its micro-batch.
        fixed: By CP size: seconds of a micro-batch whatever its samples.
        capacity: By CP size: the rows that samples may take so that the padded pack keeps the cap.
        fills_packs: Whether rows that fill packs up take time of their own, beside the samples'.
        cost_parts: Where the times of the samples go.
        row_table: The same as ``rows``; int64, ``[num_sizes, num_samples]``.
        time_table: The same as ``times``; float64, ``[num_sizes, num_samples]``.
        fixed_table: The same as ``fixed``; float64, ``[num_sizes, 1]``.
        capacity_table: The same as ``capacity``, but at most all rows; int64, ``[num_sizes, 1]``.
        fits: Whether a size and all larger ones hold a sample; ``[num_sizes, num_samples]``.
        min_cp_sizes: The smallest CP size that holds each sample, as do all larger ones.
        longest_first: Sample ids, longest first; equal lengths by id.

    Raises:
        ValueError: The batch is empty, or a sample or unit is empty or longer than the pool holds.
    """

    lengths: tuple[int, ...]
    settings: PlanSettings
    units: tuple[tuple[int, ...], ...] | None = None
    cp_sizes: tuple[int, ...] = field(init=False)
    rows: dict[int, list[int]] = field(init=False, repr=False)
    times: dict[int, list[float]] = field(init=False, repr=False)
    fixed: dict[int, float] = field(init=False, repr=False)
    capacity: dict[int, int] = field(init=False, repr=False)
    fills_packs: bool = field(init=False, repr=False)
    cost_parts: CostParts = field(init=False, repr=False)
    row_table: NDArray[np.int64] = field(init=False, repr=False)
    time_table: NDArray[np.float64] = field(init=False, repr=False)
    fixed_table: NDArray[np.float64] = field(init=False, repr=False)
    capacity_table: NDArray[np.int64] = field(init=False, repr=False)
    fits: NDArray[np.bool_] = field(init=False, repr=False)
    min_cp_sizes: list[int] = field(init=False, repr=False)
    longest_first: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_lengths()
        settings, padding = self.settings, self.settings.padding
        sizes = cp_sizes_of_pool(settings.num_ranks)
        parts = self._parts(sizes)
        rows, times = parts.rows, parts.total
        cap = settings.max_seqlen_per_dp_cp_rank
        capacity = [padding.usable_rows(cap, size, settings.tp_size) for size in sizes]
        # All rows together are as good as any number above, which may be too large for NumPy.
        most = int(rows.max(axis=0).sum())
        capacity_table = np.array([min(c, most) for c in capacity], dtype=np.int64)[:, None]
        # Short samples of one unit may take more rows at a larger size.
        fits = np.logical_and.accumulate((rows <= capacity_table)[::-1])[::-1]
        # With one length for all packs, their linear work is a fixed time.
        filled = settings.cost_model.seconds_per_row * (padding.pad_to_length or 0)
        fixed = [settings.cost_model.fixed_time(size) + filled for size in sizes]
        derived = {
            "cp_sizes": sizes,
            # Lists: planners look numbers up one by one, which is slow in arrays.
            "rows": dict(zip(sizes, rows.tolist(), strict=True)),
            "times": dict(zip(sizes, times.tolist(), strict=True)),
            "fixed": dict(zip(sizes, fixed, strict=True)),
            "capacity": dict(zip(sizes, capacity, strict=True)),
            "fills_packs": not padding.is_tight and padding.pad_to_length is None,
            "cost_parts": parts,
            "row_table": rows,
            "time_table": times,
            "fixed_table": np.array(fixed)[:, None],
            "capacity_table": capacity_table,
            "fits": fits,
            "min_cp_sizes": np.array(sizes)[fits.argmax(axis=0)].tolist(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if self.units is not None:
            self._check_units(self.units)
            lengths = tuple(sum(self.lengths[i] for i in unit) for unit in self.units)
            object.__setattr__(self, "lengths", lengths)
        # Negated and stable, so that ranks agree on equal lengths: reversing would turn ties round.
        order = np.argsort(-np.asarray(self.lengths, dtype=np.int64), kind="stable")
        object.__setattr__(self, "longest_first", order.tolist())

    @property
    def num_ranks(self) -> int:
        """Size of the DPxCP pool, the largest CP size."""
        return self.cp_sizes[-1]

    def seconds(self, sample_ids: Sequence[int], size: int) -> float:
        """The time of a micro-batch of these samples on a CP group of ``size`` ranks."""
        times = self.times[size]
        # fsum: the same on every machine and in any order, so that ranks cannot disagree on a tie.
        seconds = self.fixed[size] + math.fsum([times[i] for i in sample_ids])
        if self.fills_packs:
            rows = sum(self.rows[size][i] for i in sample_ids)
            added = self.pack_rows(rows, size) - rows
            seconds += self.settings.cost_model.seconds_per_row * added
        return seconds

    def pack_rows(self, rows: int, size: int) -> int:
        """Rows of a rank once the pack whose samples take ``rows`` of them is filled up."""
        return self.settings.padding.pack_rows(rows, size, self.settings.tp_size)

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

    def _parts(self, sizes: tuple[int, ...]) -> CostParts:
        """Where the time of each sample goes, or of each unit."""
        settings = self.settings
        lengths = np.asarray(self.lengths, dtype=np.int64)
        parts = settings.cost_model.parts(lengths, sizes, settings.tp_size, settings.padding)
        if settings.padding.pad_to_length is not None:
            # Every micro-batch does the linear work of as many rows.
            parts = replace(parts, linear=np.zeros_like(parts.linear))
        return parts if self.units is None else parts.of_units(self.units)

    def _check_lengths(self) -> None:
        if not self.lengths:
            raise ValueError("lengths is empty: a global batch needs at least one sample")
        s = self.settings
        most = longest_that_fits(s.max_seqlen_per_dp_cp_rank, s.num_ranks, s.tp_size, s.padding)
        if min(self.lengths) > 0 and max(self.lengths) <= most:
            return
        name, rows = s.row_option
        # Only to find which sample is wrong.
        for sample, length in enumerate(self.lengths):
            if length <= 0:
                raise ValueError(
                    f"sample {sample} has length {length}; every sequence needs 1 to {most} "
                    "tokens: drop empty samples before the batch is made"
                )
            if length > most:
                raise ValueError(
                    f"sample {sample} has length {length}, but at most {most} tokens fit "
                    f"{s.num_ranks} DPxCP ranks of {name}={rows} rows with {s.limits()}; raise "
                    f"{name}, use more ranks, or shorten the sequence, e.g. by max_length of the "
                    "DataModule"
                )

    def _check_units(self, units: tuple[tuple[int, ...], ...]) -> None:
        if self.fits[-1].all():
            return
        # Each sample fits the pool (_check_lengths), but not all of a unit together.
        where = int(self.fits[-1].argmin())
        unit = units[where]
        name, rows = self.settings.row_option
        shown = ", ".join(f"{i} ({self.lengths[i]} tokens)" for i in unit[:8])
        raise ValueError(
            f"keep_together puts {len(unit)} samples in one micro-batch: "
            f"{shown}{' and others' if len(unit) > 8 else ''}; they take "
            f"{int(self.row_table[-1, where])} rows a rank on the whole pool of {self.num_ranks} "
            f"DPxCP ranks after padding, but at most {self.capacity[self.num_ranks]} fit "
            f"{name}={rows} with {self.settings.limits()}; raise {name}, use more ranks, or "
            "shorten these samples"
        )
