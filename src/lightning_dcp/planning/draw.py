"""Draws a plan: ranks over time, one box a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_dcp.config.parallel import Execution
from lightning_dcp.planning.cost.model import CostModel
from lightning_dcp.planning.plan import Plan
from lightning_dcp.planning.report import group_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IDLE_COLOR = "#f2a68c"


def draw_plan(
    plan: Plan,
    *,
    cost_model: CostModel | None = None,
    execution: Execution | None = None,
    title: str | None = None,
    rank_labels: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draws the ranks of a plan over its predicted time: a box a micro-batch, coloured by CP size.

    Needs matplotlib (extra ``plot``).

    Args:
        plan: The plan, such as ``plan_global_batch`` makes or ``module.last_step.plan`` is.
        cost_model: Predicts the time of each group; by default :class:`CostModel`.
        execution: Who waits for whom; by default as the plan's report says, else ``"lockstep"``.
        title: Above the picture; the planner's name by default. Time and rate follow it.
        rank_labels: A label for each rank of the pool; by default some of their numbers.
        axes: Where to draw; by default a new figure of pyplot, with a legend.

    Returns:
        The axes; the x axis is in seconds, and labelled in milliseconds where the plan is short.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: Not one label a rank.
    """
    from lightning_dcp.config.requirements import MATPLOTLIB_AVAILABLE

    if not MATPLOTLIB_AVAILABLE:
        raise ModuleNotFoundError(f"draw_plan: {MATPLOTLIB_AVAILABLE}")
    if rank_labels is not None and len(rank_labels) != plan.num_ranks:
        raise ValueError(f"rank_labels has {len(rank_labels)} labels for {plan.num_ranks} ranks")
    alone = axes is None
    if axes is None:
        import matplotlib.pyplot as plt

        axes = plt.figure(figsize=(10.0, plan_height(plan) + 0.5), layout="constrained").subplots()
    execution = execution or (plan.report.execution if plan.report is not None else "lockstep")
    end = _draw_boxes(axes, plan, cost_model or CostModel(), execution)
    _label_ranks(axes, plan.num_ranks, rank_labels)
    factor, unit = label_time(axes, end)
    rate = plan.num_tokens / end
    axes.set_title(
        f"{title or plan.planner}: {end * factor:,.3g} {unit}, {rate:,.0f} tokens/s",
        loc="left", fontsize=11,
    )  # fmt: skip
    axes.axvline(end, color="black", linewidth=1.2, linestyle=(0, (4, 2)))
    if alone:
        handles = legend_handles(plan.cp_sizes(), plan.num_ranks)
        axes.figure.legend(
            handles=handles, loc="outside upper right", ncols=len(handles), frameon=False
        )
    return axes


def label_time(axes: Axes, end: float) -> tuple[float, str]:
    """Labels the time axis up to ``end`` seconds; the factor from seconds to its unit, and that."""
    factor, unit = (1.0, "s") if end >= 1.0 else (1e3, "ms")
    axes.set_xlim(0.0, end * 1.01)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x * factor:,.4g}")
    axes.set_xlabel(f"predicted time of one global batch ({unit})")
    return factor, unit


def plan_height(plan: Plan) -> float:
    """Inches of a plan's axes: a lane for each rank, within what a page can show."""
    return min(max(0.32 * plan.num_ranks, 1.2), 5.0) + 0.6


def size_color(cp_size: int, num_ranks: int) -> Any:
    """Light for one rank, dark for the whole pool; a size looks the same in all plans of a pool."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 - 0.8 * math.log2(cp_size) / math.log2(max(num_ranks, 2)))


def legend_handles(cp_sizes: Iterable[int], num_ranks: int) -> list[Any]:
    """A patch for each CP size, and one for waiting ranks."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=size_color(size, num_ranks), label=f"CP {size}")
        for size in sorted(cp_sizes)
    ]
    return [*handles, Patch(facecolor=IDLE_COLOR, label="idle")]


def _draw_boxes(axes: Axes, plan: Plan, cost_model: CostModel, execution: Execution) -> float:
    """Draws each micro-batch over the ranks of its group; returns when the last one ends."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    ready = [0.0] * plan.num_ranks
    patches, colors = [], []
    for step, times in zip(plan.steps, group_times(plan, cost_model), strict=True):
        if execution == "lockstep":
            ready = [max(ready)] * plan.num_ranks
        for group, seconds in zip(step.groups, times, strict=True):
            ranks = slice(group.first_rank, group.first_rank + group.size)
            start = max(ready[ranks])
            patches.append(Rectangle((start, group.first_rank), seconds, group.size))
            colors.append(size_color(group.size, plan.num_ranks))
            ready[ranks] = [start + seconds] * group.size
    end = max(ready)
    # What no box covers is time that ranks wait.
    axes.add_patch(Rectangle((0.0, 0.0), end, plan.num_ranks, facecolor=IDLE_COLOR, zorder=0))
    # The edges of many thin boxes would hide their colours.
    line = 0.7 if len(plan.steps) <= 100 else 0.0
    # One collection, since matplotlib draws thousands of single patches slowly.
    boxes = PatchCollection(patches, facecolors=colors, edgecolors="white", linewidths=line)
    axes.add_collection(boxes)
    return end


def _label_ranks(axes: Axes, num_ranks: int, labels: Sequence[str] | None) -> None:
    # Rank 0 on top; at most 16 numbers, but all labels that were given.
    every = 1 if labels is not None else -(-num_ranks // 16)
    shown = range(0, num_ranks, every)
    axes.set_ylim(num_ranks, 0)
    axes.set_yticks(
        [rank + 0.5 for rank in shown],
        [labels[rank] if labels is not None else str(rank) for rank in shown],
    )
    axes.set_ylabel("DPxCP rank")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
