"""The parity matrix of docs/parity.md: every layout gives the numbers of one plain process."""

from __future__ import annotations

from dataclasses import replace

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
EXPERTS_AGAIN = Recompute(granularity="selective", modules=("moe",))
RECOMPUTED = [
    (Layout(2, 48, recompute=FULL), DENSE),
    (Layout(4, 48, tp=2, sequence_parallel=True, recompute=FULL), DENSE),
    (Layout(2, 48, recompute=Recompute(granularity="full", method="block", num_layers=2)), DENSE),
    (Layout(2, 48, recompute=Recompute(granularity="selective")), DENSE),
    (Layout(2, 48, recompute=Recompute(granularity="selective", modules=("mlp",))), DENSE),
    (Layout(4, 24, ep=2, recompute=FULL), MOE),
    (Layout(4, 24, ep=2, recompute=EXPERTS_AGAIN), MOE),
    (Layout(4, 24, ep=2, recompute=FULL), BIASED),
]


@pytest.mark.parametrize(("layout", "config"), RECOMPUTED, ids=str)
def test_recomputation(layout, config):
    check(layout, config)


TIED = replace(DENSE, tie_word_embeddings=True, qk_layernorm=False)
PIPELINES = [
    (Layout(2, 96, pp=2), DENSE),
    (Layout(4, 48, pp=2), DENSE),
    (Layout(4, 96, pp=4), DENSE),
    (Layout(4, 96, pp=2, tp=2), DENSE),
    (Layout(8, 48, pp=2, tp=2, sequence_parallel=True), DENSE),
    (Layout(4, 48, pp=2), TIED),
    (Layout(4, 48, pp=2, planner="static", cp=2), DENSE),
    (Layout(4, 48, pp=2, ep=2), MOE),
    (Layout(8, 24, pp=2, ep=4), BIASED),
    (Layout(2, 96, pp=2, vpp=2), DENSE),
    (Layout(4, 48, pp=2, vpp=2), DENSE),
    (Layout(4, 48, pp=2, vpp=2), TIED),
    (Layout(4, 48, pp=2, recompute=FULL), DENSE),
    (Layout(4, 48, pp=2, ep=2, recompute=EXPERTS_AGAIN), MOE),
]


@pytest.mark.parametrize(("layout", "config"), PIPELINES, ids=str)
def test_pipelines(layout, config):
    check(layout, config)


@pytest.mark.parametrize("config", [MOE, BIASED], ids=["losses", "bias"])
def test_steps_that_fill_up_virtual_stages_add_nothing(config):
    layout = Layout(4, 48, pp=2, vpp=2, ep=2)
    found = check(layout, replace(config, num_layers=4))
    # Groups of two: an odd number of steps is filled up.
    assert any(num_steps % 2 for num_steps in found["num_steps"])
