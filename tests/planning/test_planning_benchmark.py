"""The benchmark command runs, and a small slice of its random workloads passes."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "planning.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("planning_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_random_workloads(benchmark: ModuleType, capsys: pytest.CaptureFixture) -> None:
    benchmark.fuzz(60, seed=3)
    assert "60 random workloads" in capsys.readouterr().out


def test_a_failure_names_the_workload(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def broken(**options: object) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr(benchmark, "plan_global_batch", broken)
    with pytest.raises(AssertionError, match="broken"):
        benchmark.fuzz(5, seed=0)
    assert "failed after 0 workloads: planner='balanced'" in capsys.readouterr().out


def test_a_small_grid(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(benchmark, "QUICK_POOLS", (3, 8))
    monkeypatch.setattr(benchmark, "QUICK_CAPS", (4096,))
    monkeypatch.setattr(benchmark, "QUICK_BATCHES", (16,))
    sources = dict(benchmark.length_sources(tmp_path))
    assert list(sources) == list(benchmark.DISTRIBUTIONS)
    cells = list(benchmark.grid(sources, quick=True, seed=0))
    assert len(cells) == 2 * len(sources) * len(benchmark.MODELS)
    assert not any(cell.worse for cell in cells)
    benchmark.report_quality(cells, tmp_path / "cells.csv")
    out = capsys.readouterr().out
    assert "(goal: mean 0.97)" in out
    assert "predicted to be faster (goal: 0): 0" in out
    with (tmp_path / "cells.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["quality"]) for row in rows] == [cell.plan.quality for cell in cells]
