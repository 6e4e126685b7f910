"""The picture of a calibration: predicted against measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.planning.draw import size_color
from lightning_dcp.tools.plots import new_figure, save_figure


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
    figure = new_figure(6.4, 6.0)
    ax = figure.subplots()
    low = 0.8 * float(min(measured.min(), predicted.min())) * 1e3
    high = 1.25 * float(max(measured.max(), predicted.max())) * 1e3
    ax.plot([low, high], [low, high], color="black", linewidth=1, label="predicted = measured")
    for size in sorted(set(sizes)):
        color = size_color(size, max(sizes))
        for out in (False, True):
            chosen = (np.array(sizes) == size) & (np.array(held_out) == out)
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
