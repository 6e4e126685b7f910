"""What planners make of global batches: as a table and as JSON values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.planning import Plan, PlanError, PlanReport, PlanSettings, make_plan
from lightning_dcp.tools.plan.run import GIB
from lightning_dcp.tools.tables import aligned


@dataclass(kw_only=True)
class PlannerResult:
    """What one planner made of some global batches.

    Attributes:
        settings: The planner, the pool, the cap and the cost model.
        first_plan: Of the first global batch.
        reports: What is predicted of each plan.
        planning_seconds: What planning took, by batch.
        tokens: Without padding, over all batches, like the next two.
        num_micro_batches: Micro-batches of a rank, i.e. steps of the plans.
        cp_sizes: Micro-batches of groups, by CP size.
        failure: Why it gave no plan of a batch; all else is then void.
    """

    settings: PlanSettings
    first_plan: Plan | None = None
    reports: list[PlanReport] = field(default_factory=list)
    planning_seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    num_micro_batches: int = 0
    cp_sizes: Counter[int] = field(default_factory=Counter)
    failure: str | None = None

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Plans one more global batch; lengths in tokens, ``[num_samples]``."""
        if self.failure is not None:
            return
        start = time.perf_counter()
        try:
            plan = make_plan(lengths, self.settings)
        except (PlanError, ImportError) as error:
            # Megatron-Core's scheduler fails on some workloads: the other planners are of use.
            self.failure = str(error)
            return
        self.planning_seconds.append(time.perf_counter() - start)
        assert plan.report is not None
        self.reports.append(plan.report)
        self.first_plan = self.first_plan or plan
        self.tokens += plan.num_tokens
        self.num_micro_batches += len(plan.steps)
        self.cp_sizes.update(plan.cp_sizes())

    @property
    def planner(self) -> str:
        """Its name."""
        return str(self.settings.planner)

    @property
    def label(self) -> str:
        """Name of the planner, with its CP size if it has one only."""
        size = self.settings.context_parallel_size
        return self.planner if size is None else f"{self.planner} (CP {size})"

    @property
    def predicted_seconds(self) -> float:
        """Forward and backward passes of all batches."""
        return sum(report.predicted_seconds for report in self.reports)

    @property
    def tokens_per_second(self) -> float:
        """Tokens without padding over predicted time."""
        return self.tokens / self.predicted_seconds

    @property
    def peak_activation_bytes(self) -> float:
        """The most of any rank."""
        return max(report.peak_activation_bytes for report in self.reports)

    def values(self, static: PlannerResult) -> dict[str, Any]:
        """JSON values; ``static`` is what to compare with."""
        if self.failure is not None:
            return {"planner": self.planner, "failure": self.failure}
        predicted = self.predicted_seconds
        bound = sum(report.bound_seconds for report in self.reports)

        # A report has shares; those of all batches are weighted by time.
        def share(name: str) -> float:
            """Of the time of all batches, from that of each."""
            parts = (getattr(one, name) * one.predicted_seconds for one in self.reports)
            return float(sum(parts) / predicted)

        return {
            "planner": self.planner,
            "context_parallel_size": self.settings.context_parallel_size,
            "tokens_per_second": self.tokens_per_second,
            "ratio_to_static": self.tokens_per_second / static.tokens_per_second,
            "quality": bound / predicted,
            "predicted_seconds": predicted,
            "bound_seconds": bound,
            "idle_share": share("idle_share"),
            "padding_share": share("padding_share"),
            "communication_share": share("communication_share"),
            "micro_batches_per_rank": self.num_micro_batches,
            "micro_batches_by_cp_size": {str(s): n for s, n in sorted(self.cp_sizes.items())},
            "peak_activation_bytes": self.peak_activation_bytes,
            "planning_seconds_mean": float(np.mean(self.planning_seconds)),
            "planning_seconds_max": max(self.planning_seconds),
        }

    def row(self, static: PlannerResult) -> list[str]:
        """A row of the table; see ``HEADER``."""
        values = self.values(static)
        return [
            self.label,
            f"{values['tokens_per_second']:,.0f}",
            f"{values['ratio_to_static']:.3f}",
            f"{values['quality']:.3f}",
            f"{values['idle_share']:.1%}",
            f"{values['padding_share']:.1%}",
            f"{values['communication_share']:.1%}",
            f"{self.num_micro_batches / len(self.reports):.1f}",
            f"{self.peak_activation_bytes / GIB:.2f}",
            f"{1e3 * values['planning_seconds_mean']:.1f}",
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


def table(results: Sequence[PlannerResult]) -> str:
    """A plain table of the planners, the first one taken as static."""
    rows = [one.row(results[0]) for one in results if one.failure is None]
    failed = [f"{one.label}: {one.failure}" for one in results if one.failure is not None]
    return "\n".join([aligned([HEADER, *rows]), *failed])
