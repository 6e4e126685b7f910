"""Pictures of plans and of calibrations, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.requirements import MATPLOTLIB_AVAILABLE
from lightning_dcp.planning import Execution, Plan, group_times
from lightning_dcp.tools.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_dcp.planning import CostModel

_IDLE = "#f2a68c"
_DPI = 150


def check_plot(option: str, path: str | None) -> None:
    """Refuses a plot that cannot be drawn, before the work that it would show.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: The file's name does not end in ``.png``.
    """
    if path is None:
        return
    if not path.endswith(".png"):
        raise ValueError(f"{option}={path!r}: the name of the picture must end in .png")
    if not MATPLOTLIB_AVAILABLE:
        raise ModuleNotFoundError(f"{option}={path!r}: {MATPLOTLIB_AVAILABLE}")


def plot_plans(
    path: str, plans: Sequence[tuple[str, Plan]], cost_model: CostModel, execution: Execution
) -> None:
    """Draws ranks over time, one plan above the other, on one time axis.

    Args:
        path: The PNG file.
        plans: Titles and plans of one global batch.
        cost_model: Predicts the time of each group.
        execution: Who waits for whom.
    """
    figure = _new_figure(10.0, 0.9 + sum(_height(plan) for _, plan in plans))
    axes = figure.subplots(
        len(plans), 1, sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": [_height(plan) for _, plan in plans]},
    )[:, 0]  # fmt: skip
    sizes = sorted({size for _, plan in plans for size in plan.cp_sizes()})
    colors = _colors(sizes, plans[0][1].num_ranks)
    ends = [_draw_plan(ax, plan, cost_model, execution, colors) for ax, (_, plan) in
            zip(axes, plans, strict=True)]  # fmt: skip
    longest = max(ends)
    factor, unit = (1.0, "s") if longest >= 1.0 else (1e3, "ms")
    for ax, (title, plan), end in zip(axes, plans, ends, strict=True):
        rate = plan.num_tokens / end
        ax.set_title(
            f"{title}: {end * factor:,.3g} {unit}, {rate:,.0f} tokens/s", loc="left", fontsize=11
        )
        ax.axvline(end, color="black", linewidth=1.2, linestyle=(0, (4, 2)))
        ax.set_xlim(0.0, longest * 1.01)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x * factor:,.4g}")
    axes[-1].set_xlabel(f"predicted time of one global batch ({unit})")
    _legend(figure, sizes, colors)
    _save(figure, path)


def plot_calibration(
    path: str,
    measured: NDArray[np.float64],
    predicted: NDArray[np.float64],
    sizes: Sequence[int],
    held_out: Sequence[bool],
    title: str,
) -> None:
    """Draws predicted against measured times of micro-batches.

    Args:
        path: The PNG file.
        measured: Seconds, ``[num_micro_batches]``.
        predicted: The same by the cost model.
        sizes: CP size of each.
        held_out: Whether the cost model was not fitted to it.
        title: Of the picture.
    """
    figure = _new_figure(6.4, 6.0)
    ax = figure.subplots()
    colors = _colors(sorted(set(sizes)), max(sizes))
    low = 0.8 * float(min(measured.min(), predicted.min())) * 1e3
    high = 1.25 * float(max(measured.max(), predicted.max())) * 1e3
    ax.plot([low, high], [low, high], color="black", linewidth=1, label="predicted = measured")
    for size, color in colors.items():
        for out in (False, True):
            chosen = (np.array(sizes) == size) & (np.array(held_out) == out)
            if chosen.any():
                ax.scatter(
                    measured[chosen] * 1e3, predicted[chosen] * 1e3, s=38, linewidths=1.4,
                    edgecolors=[color], facecolors="none" if out else [color],
                    label=f"CP {size}, {'held out' if out else 'fitted'}",
                )  # fmt: skip
    ax.set(
        xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal",
        xlabel="measured time of a micro-batch (ms)", ylabel="predicted time (ms)",
    )  # fmt: skip
    ax.set_title(title, loc="left", fontsize=11)
    _plain_ticks(ax)
    ax.set_axisbelow(True)
    ax.grid(which="major", color="#dddddd", linewidth=0.6)
    ax.legend(frameon=False, fontsize=9)
    _save(figure, path)


def _plain_ticks(ax: Any) -> None:
    """Numbers at 1, 2 and 5 of each decade of both axes, without powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axis.set_minor_formatter(NullFormatter())


def _height(plan: Plan) -> float:
    """Inches of a plan's axes: a lane for each rank, within what a page can show."""
    return min(max(0.32 * plan.num_ranks, 1.2), 5.0) + 0.6


def _new_figure(width: float, height: float) -> Figure:
    # Not pyplot: no window system, no state that outlives the call.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _colors(sizes: Sequence[int], largest: int) -> dict[int, Any]:
    """Light for one rank, dark for the whole pool; a size looks the same in all plans of a pool."""
    from matplotlib import colormaps

    scale = np.log2(max(largest, 2))
    return {size: colormaps["viridis"](float(0.9 - 0.8 * np.log2(size) / scale)) for size in sizes}


def _draw_plan(
    ax: Any, plan: Plan, cost_model: CostModel, execution: Execution, colors: dict[int, Any]
) -> float:
    """Draws each micro-batch over the ranks of its group; returns when the last one ends."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    ready = np.zeros(plan.num_ranks)
    patches, faces = [], []
    for step, times in zip(plan.steps, group_times(plan, cost_model), strict=True):
        if execution == "lockstep":
            ready[:] = ready.max()
        for group, seconds in zip(step.groups, times, strict=True):
            ranks = slice(group.first_rank, group.first_rank + group.size)
            start = float(ready[ranks].max())
            patches.append(Rectangle((start, group.first_rank), seconds, group.size))
            faces.append(colors[group.size])
            ready[ranks] = start + seconds
    end = float(ready.max())
    ax.add_patch(Rectangle((0.0, 0.0), end, plan.num_ranks, facecolor=_IDLE, zorder=0))
    line = 0.7 if len(plan.steps) <= 100 else 0.0
    ax.add_collection(
        PatchCollection(patches, facecolors=faces, edgecolors="white", linewidths=line)
    )
    ax.set_ylim(plan.num_ranks, 0)
    every = -(-plan.num_ranks // 16)
    shown = range(0, plan.num_ranks, every)
    ax.set_yticks([rank + 0.5 for rank in shown], [str(rank) for rank in shown])
    ax.set_ylabel("DPxCP rank")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return end


def _legend(figure: Figure, sizes: Sequence[int], colors: dict[int, Any]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colors[size], label=f"CP {size}") for size in sizes]
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)


def _save(figure: Figure, path: str) -> None:
    write_whole(path, lambda file: figure.savefig(file, dpi=_DPI, format="png"))
