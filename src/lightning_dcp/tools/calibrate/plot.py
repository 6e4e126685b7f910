"""The picture of a calibration: predicted against measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_dcp.planning import CostModel, MeasuredMicroBatch, predict
from lightning_dcp.planning.draw import size_color
from lightning_dcp.tools.plots import new_figure, save_figure


def plot_calibration(
    path: str,
    cost_model: CostModel,
    *,
    fitted: Sequence[MeasuredMicroBatch],
    held_out: Sequence[MeasuredMicroBatch],
    title: str,
) -> None:
    """Draws predicted against measured times of micro-batches into a PNG file."""
    parts = (*fitted, *held_out)
    measured, predicted = np.array([one.seconds for one in parts]), predict(cost_model, parts)
    sizes, is_out = np.array([one.size for one in parts]), np.arange(len(parts)) >= len(fitted)
    figure = new_figure(6.4, 6.0)
    ax = figure.subplots()
    low = 0.8 * float(min(measured.min(), predicted.min())) * 1e3
    high = 1.25 * float(max(measured.max(), predicted.max())) * 1e3
    ax.plot([low, high], [low, high], color="black", linewidth=1, label="predicted = measured")
    for size in np.unique(sizes).tolist():
        color = size_color(size, int(sizes.max()))
        for out in (False, True):
            chosen = (sizes == size) & (is_out == out)
            if chosen.any():
                # Hollow if held out: those are the ones that say how good the fit is.
                ax.scatter(
                    measured[chosen] * 1e3, predicted[chosen] * 1e3, s=38, linewidths=1.4,
                    edgecolors=[color], facecolors="none" if out else [color],
                    label=f"CP {size}, {'held out' if out else 'fitted'}",
                )  # fmt: skip
    # Times span orders of magnitude: on equal logarithmic axes an error of so many percent looks
    # the same everywhere.
    ax.set(
        xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal",
        xlabel="measured time of a micro-batch (ms)", ylabel="predicted time (ms)",
    )  # fmt: skip
    ax.set_title(title, loc="left", fontsize=11)
    _plain_ticks(ax)
    ax.set_axisbelow(True)
    ax.grid(which="major", color="#dddddd", linewidth=0.6)
    ax.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def _plain_ticks(ax: Any) -> None:
    """Numbers at 1, 2 and 5 of each decade of both axes, without powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axis.set_minor_formatter(NullFormatter())
