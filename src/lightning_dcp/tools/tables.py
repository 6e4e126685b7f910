"""Plain tables of the commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
