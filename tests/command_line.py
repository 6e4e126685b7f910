"""Runs ``lightning-dcp`` in tests: in a process of its own, or in workers that have its imports."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from distributed import run_distributed
from hygiene import load


@dataclass(frozen=True)
class Done:
    """How a command ended, and what all of its processes wrote, those of rank 0 first."""

    returncode: int
    stdout: str
    stderr: str


def run(*command: str, cwd: Path) -> Done:
    """A command as a user gives it; the limit is against hangs only."""
    environment = {**os.environ, **_settings(cwd)}
    done = subprocess.run(
        command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=600 * load()
    )
    return Done(done.returncode, done.stdout, done.stderr)


def cli(*arguments: str, cwd: Path, world: int = 1) -> Done:
    """``lightning-dcp`` on ``world`` processes that are started from outside, as by torchrun."""
    ranks = run_distributed(_main, world, arguments, str(cwd))
    return Done(
        max(code for code, _, _ in ranks),
        "".join(out for _, out, _ in ranks),
        "".join(err for _, _, err in ranks),
    )


def _settings(cwd: Path | str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": f"{cwd}/cache", "COLUMNS": "200"}


def _main(arguments: tuple[str, ...], cwd: str) -> tuple[int, str, str]:
    from lightning_dcp.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, _settings(cwd)),
        mock.patch.object(sys, "argv", ["lightning-dcp"]),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                err.write(end.code)
        except Exception:
            code = 1
            traceback.print_exc()
    return code, out.getvalue(), err.getvalue()
