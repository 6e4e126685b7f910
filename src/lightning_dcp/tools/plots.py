"""What the pictures of the commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_dcp.config.files import whole_file
from lightning_dcp.config.requirements import MATPLOTLIB_AVAILABLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches."""
    # Not pyplot: no window system, no state that outlives the call.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str) -> None:
    """Writes a PNG."""
    with whole_file(path) as file:
        figure.savefig(file, dpi=_DPI, format="png")
