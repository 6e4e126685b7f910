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


UNTIED = [replace(DENSE, mtp_num_layers=depths) for depths in (1, 2)]
TIED = [replace(config, tie_word_embeddings=True) for config in UNTIED]
MTP = [
    (Layout(1, 96), UNTIED[1]),
    (Layout(4, 24), UNTIED[0]),
    (Layout(4, 24), TIED[1]),
    (Layout(4, 48, planner="static", cp=2), TIED[0]),
    (Layout(4, 24, planner="static", cp=4), UNTIED[1]),
    (Layout(2, 96, tp=2), TIED[0]),
    (Layout(4, 48, tp=2, sequence_parallel=True), UNTIED[1]),
    (Layout(8, 48, tp=2, sequence_parallel=True), TIED[1]),
    (Layout(4, 24, recompute=FULL), UNTIED[1]),
    (Layout(2, 48, recompute=Recompute(granularity="selective", modules=("mlp",))), TIED[0]),
    (Layout(4, 24, ep=2), replace(MOE, mtp_num_layers=1)),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2), replace(MOE, mtp_num_layers=2)),
    (Layout(4, 24, ep=2, recompute=FULL), replace(BIASED, mtp_num_layers=1)),
    (Layout(4, 24, ep=4), replace(GATHERED, mtp_num_layers=1)),
]


def name_of(value):
    if isinstance(value, Layout):
        return str(value)
    parts = ["tied" if value.tie_word_embeddings else "untied", f"mtp{value.mtp_num_layers}"]
    return "-".join(["moe", *parts] if value.moe else parts)


@pytest.mark.parametrize(("layout", "config"), MTP, ids=name_of)
def test_multi_token_prediction(layout, config):
    check(layout, config)


# Most ranks have no target at the second depth; the third step has none further on, the last none.
SHORT = [[1, 9, 2, 3, 1], [2, 3, 7, 1], [1, 2, 2, 1], [1, 1]]
# Attention to a single token gives queries and keys a gradient of nothing but rounding.
ALONE = {"mtp_num_layers": 2, "qk_layernorm": False}


@pytest.mark.parametrize("layout", [Layout(4, 12), Layout(4, 12, planner="static", cp=4)], ids=str)
def test_multi_token_prediction_without_targets(layout):
    found = check(layout, replace(DENSE, **ALONE), lengths=SHORT)
    assert all(found["ahead"][0])
    assert found["ahead"][2:] == [[0.0, 0.0]] * 2


def test_multi_token_prediction_without_targets_with_experts():
    found = check(Layout(4, 12, ep=2), replace(MOE, **ALONE), lengths=SHORT[:3])
    assert all(found["ahead"][0])
    assert found["ahead"][2] == [0.0, 0.0]
