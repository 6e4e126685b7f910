"""Runs ``lightning-dcp`` in tests: in a process of its own, or in workers that have its imports."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

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
    return _in_workers("lightning_dcp.cli", arguments, cwd, world)


def script(path: Path, cwd: Path, world: int) -> Done:
    """A Python script, likewise."""
    return _in_workers(str(path), (), cwd, world)


def compare_in_workers(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """Lets the runs that ``compare`` starts be made in workers."""

    def run(command: list[str], **_: Any) -> Done:
        assert command[:2] == [sys.executable, "-m"]
        return _in_workers(command[2], tuple(command[3:]), Path.cwd(), world)

    monkeypatch.setattr("lightning_dcp.tools.compare.command.subprocess.run", run)


def _in_workers(target: str, arguments: tuple[str, ...], cwd: Path, world: int) -> Done:
    ranks = run_distributed(_main, world, target, arguments, str(cwd), init_process_group=False)
    return Done(
        max(code for code, _, _ in ranks),
        "".join(out for _, out, _ in ranks),
        "".join(err for _, _, err in ranks),
    )


def _settings(cwd: Path | str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": f"{cwd}/cache", "COLUMNS": "200"}


def _main(target: str, arguments: tuple[str, ...], cwd: str) -> tuple[int, str, str]:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, _settings(cwd)),
        mock.patch.object(sys, "argv", [target, *arguments]),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            if target.endswith(".py"):
                runpy.run_path(target, run_name="__main__")
            else:
                import_module(target).main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                err.write(end.code)
        except Exception:
            code = 1
            traceback.print_exc()
    return code, out.getvalue(), err.getvalue()
