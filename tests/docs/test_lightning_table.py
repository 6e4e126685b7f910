"""The table of what of Lightning works is that of the tests' marks, and leaves nothing out."""

from __future__ import annotations

import inspect
import subprocess
import sys

import lightning.pytorch.callbacks
import lightning_table
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

TEXT = lightning_table.PAGE.read_text()
SHOWN = TEXT.split(lightning_table.BEGIN)[1].split(lightning_table.END)[0]
NAMES = {tuple(line.split(" | ")[:2]) for line in SHOWN.splitlines()[2:]}
# Lightning itself raises where a module has it.
GONE = {"configure_sharded_model"}


def test_the_table_is_that_of_the_marks():
    # In a process of its own: pytest does not run twice in one.
    found = subprocess.run(
        [sys.executable, lightning_table.__file__, "--print"],
        capture_output=True,
        text=True,
        cwd=lightning_table.ROOT,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == SHOWN, "run: python tests/docs/lightning_table.py"


EVERYTHING = {
    "Trainer argument": {
        f"Trainer({name}=)" for name in list(inspect.signature(Trainer.__init__).parameters)[1:]
    },
    "callback": set(lightning.pytorch.callbacks.__all__) - {"Callback"},
    "hook": {
        name
        for cls in (ModelHooks, DataHooks, CheckpointHooks, Callback)
        for name, function in vars(cls).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }
    - GONE,
}


@pytest.mark.parametrize("kind", EVERYTHING)
def test_nothing_of_lightning_is_left_out(kind):
    listed = {name.strip("`") for found, name in NAMES if found.strip("| ") == kind}
    assert EVERYTHING[kind] <= listed, sorted(EVERYTHING[kind] - listed)
