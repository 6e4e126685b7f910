"""What planners make of global batches: their figures, as a table and as JSON values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.padding import TIGHT, PackPadding
from lightning_dcp.planning import CostModel, Execution, Plan, PlanError, plan_global_batch
from lightning_dcp.tools.plan.costs import GIB


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a planner is asked, but for the lengths.

    Attributes:
        planner: Its name.
        num_ranks: Ranks of the DPxCP pool.
        cap: The most rows of a rank.
        tp_size: Tensor-parallel size.
        context_parallel_size: Of the planner ``static``, else None.
        cost_model: Predicts times.
        execution: Who waits for whom.
        padding: How packs are padded.
    """

    planner: str
    num_ranks: int
    cap: int
    tp_size: int
    context_parallel_size: int | None
    cost_model: CostModel
    execution: Execution
    padding: PackPadding = TIGHT

    def plan(self, lengths: NDArray[np.int64]) -> Plan:
        """Plans a global batch; lengths in tokens, ``[num_samples]``."""
        return plan_global_batch(
            lengths,
            num_ranks=self.num_ranks,
            max_seqlen_per_dp_cp_rank=self.cap,
            planner=self.planner,
            tp_size=self.tp_size,
            context_parallel_size=self.context_parallel_size,
            cost_model=self.cost_model,
            execution=self.execution,
            pad_to_length=self.padding.pad_to_length,
            pad_to_length_bucket=self.padding.pad_to_length_bucket,
        )

    @property
    def label(self) -> str:
        """Name of the planner, with its CP size if it has one only."""
        size = self.context_parallel_size
        return self.planner if size is None else f"{self.planner} (CP {size})"


@dataclass(kw_only=True)
class Figures:
    """The figures of one planner over global batches.

    Attributes:
        setting: What it was asked.
        first_plan: Of the first global batch.
        num_batches: Global batches so far.
        tokens: Without padding, like all of the following over all batches.
        predicted_seconds: Forward and backward passes.
        bound_seconds: Lower bound on that.
        idle_seconds: Of all ranks, like the next two.
        padding_seconds: Linear work of padded rows.
        communication_seconds: Communication that nothing hides.
        num_micro_batches: Micro-batches of a rank, i.e. steps of the plans.
        cp_sizes: Micro-batches of groups, by CP size.
        peak_activation_bytes: The most of any rank.
        planning_seconds: What planning took, by batch.
        failure: Why it gave no plan of a batch; the figures are then void.
    """

    setting: Setting
    first_plan: Plan | None = None
    num_batches: int = 0
    tokens: int = 0
    predicted_seconds: float = 0.0
    bound_seconds: float = 0.0
    idle_seconds: float = 0.0
    padding_seconds: float = 0.0
    communication_seconds: float = 0.0
    num_micro_batches: int = 0
    cp_sizes: Counter[int] = field(default_factory=Counter)
    peak_activation_bytes: float = 0.0
    planning_seconds: list[float] = field(default_factory=list)
    failure: str | None = None

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Plans one more global batch; lengths in tokens, ``[num_samples]``."""
        if self.failure is not None:
            return
        start = time.perf_counter()
        try:
            plan = self.setting.plan(lengths)
        except (PlanError, ImportError) as error:
            # Megatron-Core's scheduler fails on some workloads: the others' figures are of use.
            self.failure = str(error)
            return
        self.planning_seconds.append(time.perf_counter() - start)
        report = plan.report
        assert report is not None
        rank_seconds = report.predicted_seconds * plan.num_ranks
        self.first_plan = self.first_plan or plan
        self.num_batches += 1
        self.tokens += plan.num_tokens
        self.predicted_seconds += report.predicted_seconds
        self.bound_seconds += report.bound_seconds
        self.idle_seconds += report.idle_share * rank_seconds
        self.padding_seconds += report.padding_share * rank_seconds
        self.communication_seconds += report.communication_share * rank_seconds
        self.num_micro_batches += len(plan.steps)
        self.cp_sizes.update(plan.cp_sizes())
        self.peak_activation_bytes = max(self.peak_activation_bytes, report.peak_activation_bytes)

    @property
    def tokens_per_second(self) -> float:
        """Tokens without padding over predicted time."""
        return self.tokens / self.predicted_seconds

    def share(self, rank_seconds: float) -> float:
        """Seconds of all ranks as a share of the time of all ranks."""
        return rank_seconds / (self.predicted_seconds * self.setting.num_ranks)

    def values(self, static: Figures) -> dict[str, Any]:
        """JSON values of the figures.

        Args:
            static: The figures to compare with.
        """
        if self.failure is not None:
            return {"planner": self.setting.planner, "failure": self.failure}
        return {
            "planner": self.setting.planner,
            "context_parallel_size": self.setting.context_parallel_size,
            "tokens_per_second": self.tokens_per_second,
            "ratio_to_static": self.tokens_per_second / static.tokens_per_second,
            "quality": self.bound_seconds / self.predicted_seconds,
            "predicted_seconds": self.predicted_seconds,
            "bound_seconds": self.bound_seconds,
            "idle_share": self.share(self.idle_seconds),
            "padding_share": self.share(self.padding_seconds),
            "communication_share": self.share(self.communication_seconds),
            "micro_batches_per_rank": self.num_micro_batches,
            "micro_batches_by_cp_size": {str(s): n for s, n in sorted(self.cp_sizes.items())},
            "peak_activation_bytes": self.peak_activation_bytes,
            "planning_seconds_mean": float(np.mean(self.planning_seconds)),
            "planning_seconds_max": max(self.planning_seconds),
        }

    def cells(self, static: Figures) -> list[str]:
        """A row of the table; see ``HEADER``."""
        ratio = self.tokens_per_second / static.tokens_per_second
        return [
            self.setting.label,
            f"{self.tokens_per_second:,.0f}",
            f"{ratio:.3f}",
            f"{self.bound_seconds / self.predicted_seconds:.3f}",
            f"{self.share(self.idle_seconds):.1%}",
            f"{self.share(self.padding_seconds):.1%}",
            f"{self.share(self.communication_seconds):.1%}",
            f"{self.num_micro_batches / self.num_batches:.1f}",
            f"{self.peak_activation_bytes / GIB:.2f}",
            f"{1e3 * float(np.mean(self.planning_seconds)):.1f}",
            ", ".join(f"{size} x{count:,}" for size, count in sorted(self.cp_sizes.items())),
        ]


HEADER = (
    "planner", "tokens/s", "to static", "quality", "idle", "padding", "comm.", "steps",
    "peak GiB", "plan ms", "CP sizes",
)  # fmt: skip
LEGEND = (
    "tokens/s: predicted, without padding; quality: lower bound / predicted time; idle, padding, "
    "comm.: shares\nof the time of all ranks; steps: micro-batches of a rank in a global batch; "
    "peak: activations of a rank;\nCP sizes: micro-batches of each size"
)


def table(figures: Sequence[Figures]) -> str:
    """A plain table of the planners, the first one taken as static."""
    rows = [one.cells(figures[0]) for one in figures if one.failure is None]
    failed = [f"{one.setting.label}: {one.failure}" for one in figures if one.failure is not None]
    return "\n".join([aligned([HEADER, *rows]), *failed])


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as lines; the first and the last column to the left, the others right."""
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    last = len(widths) - 1
    lines = (
        "  ".join(
            cell.ljust(width) if k in (0, last) else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in listed
    )
    return "\n".join(lines)
