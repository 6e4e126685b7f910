"""The table in docs/features.md of what of Lightning works, from the marks of tests.

``python tests/docs/lightning_table.py`` writes it; ``--print`` prints it.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "features.md"
BEGIN, END = "<!-- lightning -->\n", "<!-- end of lightning -->"
KINDS = {"Trainer argument": 0, "callback": 1, "hook": 2}

Row = tuple[str, str, str]


class Marks:
    """A pytest plugin that keeps what the marks of collected tests say: the first test of each."""

    def __init__(self) -> None:
        self.tests: dict[Row, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("lightning"):
                kind, name, outcome = mark.args
                if kind not in KINDS or outcome not in ("works", "refused"):
                    raise ValueError(f"{item.nodeid}: {mark.args}")
                path, function = Path(item.path).relative_to(ROOT), item.originalname
                self.tests.setdefault((kind, name, outcome), f"`{path}`: `{function}`")


def table() -> str:
    """The rows, sorted; nothing is run."""
    marks = Marks()
    marked = [
        path for path in ROOT.glob("tests/**/test_*.py") if "mark.lightning(" in path.read_text()
    ]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", *map(str, sorted(marked))],
            plugins=[marks],
        )
    if code != 0:
        raise RuntimeError(said.getvalue())
    rows = sorted(marks.tests, key=lambda row: (KINDS[row[0]], row[1].lower(), row[2]))
    lines = [
        f"| {kind} | `{name}` | {outcome} | {marks.tests[kind, name, outcome]} |"
        for kind, name, outcome in rows
    ]
    return "\n".join(["| kind | name | | test |", "|---|---|---|---|", *lines, ""])


def main() -> None:
    made = table()
    if "--print" in sys.argv:
        print(made, end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
