"""The benchmark of bucketed lengths counts what it says."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_dcp.config.padding import TIGHT, PackPadding
from lightning_dcp.data import LengthDistribution

PATH = Path(__file__).parents[2] / "benchmarks" / "bucketing.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("bucketing_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_bucket_leaves_few_shapes_for_few_rows(benchmark):
    source = LengthDistribution(kind="long_tail", low=64, high=16_384)
    rng = np.random.default_rng(0)
    batches = [source.sample(64, rng) for _ in range(20)]
    args = argparse.Namespace(ranks=4, cap=8192)
    tight = benchmark.count(benchmark.plans(batches, args, TIGHT))
    padding = PackPadding(pad_to_length_bucket=1024)
    bucketed = benchmark.count(benchmark.plans(batches, args, padding))
    assert bucketed.shapes <= 8
    assert tight.shapes > 5 * bucketed.shapes
    assert tight.rows < bucketed.rows < 1.5 * tight.rows
    assert all(rows % 1024 == 0 for rows in bucketed.of_rank_0)


def test_every_new_shape_is_compiled_once(benchmark):
    assert benchmark.compilations([4, 8, 4, 12, 8]) == 3
