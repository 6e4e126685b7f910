"""Settings of the session, and the watch that a test leaves everything as it found it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: the workers of a multi-process test share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hygiene

ROOT = Path(__file__).parents[1]

# Hypothesis would have an example take 200 ms at most: nothing here is timed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Fails where a test leaves variables, threads, process groups, CPU mode or files behind."""
    state, files = hygiene.State.now(), _files()
    yield
    left = state.restore()
    left += [f"file {name}" for name in sorted(_files() - files)]
    assert not left, f"left behind: {'; '.join(left)}"


def _files() -> set[str]:
    """Names in the repository's folder, without that of Hypothesis, which is made at any time."""
    return set(os.listdir(ROOT)) - {".hypothesis"}


@pytest.fixture(autouse=True, scope="session")
def leaves_the_tree_clean() -> Iterator[None]:
    """Fails the last test where a file is new in the repository after the session."""
    before = _new_files()
    yield
    left = _new_files() - before
    assert not left, f"files that the tests made: {sorted(left)}"


def _new_files() -> set[str]:
    """What git does not know and does not ignore; nothing outside a clone."""
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return set()
    return set(done.stdout.splitlines())


def pytest_sessionfinish() -> None:
    if "distributed" in sys.modules:
        sys.modules["distributed"].close()
