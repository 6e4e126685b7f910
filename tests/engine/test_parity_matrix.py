"""The parity matrix of docs/parity.md: every layout gives the numbers of one plain process."""

from __future__ import annotations

import pytest
from layouts import BIASED, DENSE, GATHERED, MOE, Layout, check

from lightning_dcp.model import Recompute

SEQUENCE_PARALLEL = [
    Layout(2, 96, tp=2, sequence_parallel=True),
    Layout(4, 48, tp=2, sequence_parallel=True),
    Layout(8, 48, tp=2, sequence_parallel=True, planner="static", cp=4),
]


@pytest.mark.parametrize("layout", SEQUENCE_PARALLEL, ids=str)
def test_sequence_parallel(layout):
    check(layout, DENSE)


EXPERTS = [
    Layout(1, 96),
    Layout(2, 48),
    Layout(2, 48, ep=2),
    Layout(4, 24, ep=2),
    Layout(4, 24, ep=4),
    Layout(4, 48, tp=2, sequence_parallel=True, ep=2),
    Layout(4, 48, ep=4, planner="static", cp=2),
]


@pytest.mark.parametrize("layout", EXPERTS, ids=str)
def test_experts(layout):
    check(layout, MOE)


@pytest.mark.parametrize("layout", [EXPERTS[0], EXPERTS[3], EXPERTS[5]], ids=str)
def test_experts_balanced_by_a_bias(layout):
    check(layout, BIASED)


@pytest.mark.parametrize("layout", EXPERTS[3:6], ids=str)
def test_experts_that_gather_all_tokens(layout):
    check(layout, GATHERED)


FULL = Recompute(granularity="full")
RECOMPUTED = [
    (Layout(2, 48, recompute=FULL), DENSE),
    (Layout(4, 48, tp=2, sequence_parallel=True, recompute=FULL), DENSE),
    (Layout(2, 48, recompute=Recompute(granularity="full", method="block", num_layers=2)), DENSE),
    (Layout(2, 48, recompute=Recompute(granularity="selective")), DENSE),
    (Layout(2, 48, recompute=Recompute(granularity="selective", modules=("mlp",))), DENSE),
    (Layout(4, 24, ep=2, recompute=FULL), MOE),
    (Layout(4, 24, ep=2, recompute=Recompute(granularity="selective", modules=("moe",))), MOE),
    (Layout(4, 24, ep=2, recompute=FULL), BIASED),
]


@pytest.mark.parametrize(("layout", "config"), RECOMPUTED, ids=str)
def test_recomputation(layout, config):
    check(layout, config)
