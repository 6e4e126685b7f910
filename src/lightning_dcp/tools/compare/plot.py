"""The picture of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from lightning_dcp.tools.compare.comparison import Comparison, Runs
from lightning_dcp.tools.plots import new_figure, save_figure


def draw_comparison(comparison: Comparison, static: Runs, dynamic: Runs, path: str) -> None:
    """Draws step times of both kinds of run above the dynamic ones' CP sizes, as a PNG."""
    figure = new_figure(9.0, 6.0)
    times, sizes = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    _draw_times(times, static, dynamic)
    ratio = "different tokens, no ratio" if comparison.ratio is None else f"{comparison.ratio:.3f}x"
    times.set_title(f"Static against dynamic context parallelism: {ratio}")
    _draw_sizes(sizes, dynamic)
    save_figure(figure, path)


def _draw_times(axes: Any, static: Runs, dynamic: Runs) -> None:
    for runs, name, colour in ((static, "static", "tab:orange"), (dynamic, "dynamic", "tab:blue")):
        steps = [step.step for step in runs[0]]
        for run in runs:
            axes.plot(steps, [step.seconds for step in run], color=colour, alpha=0.3, linewidth=1)
        means = [mean(step.seconds for step in column) for column in zip(*runs, strict=True)]
        axes.plot(steps, means, color=colour, marker="o", markersize=3, label=name)
    axes.set_ylabel("step time (s)")
    # From 0: noise then does not look like a gain.
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_sizes(axes: Any, dynamic: Runs) -> None:
    """Shares of the micro-batches of a step by CP size, stacked."""
    # All rounds make the same plans.
    run: Sequence[Any] = dynamic[0]
    steps = [step.step for step in run]
    below = [0.0] * len(run)
    for size in sorted({size for step in run for size in step.cp_sizes}):
        shares = [step.cp_sizes.get(size, 0) / sum(step.cp_sizes.values()) for step in run]
        axes.bar(steps, shares, bottom=below, label=f"CP {size}")
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set_ylabel("share of micro-batches")
    axes.set_xlabel("step")
    axes.legend(ncols=4, loc="lower right")
