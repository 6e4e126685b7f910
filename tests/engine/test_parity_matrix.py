"""The parity matrix of docs/parity.md: every layout gives the numbers of one plain process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layouts import BIASED, DENSE, GATHERED, MOE, Layout, check, train

from distributed import run_distributed
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


@pytest.mark.parametrize(
    "layout",
    [Layout(4, 24, ep=2), Layout(4, 48, tp=2, sequence_parallel=True), Layout(4, 48, pp=2)],
    ids=str,
)
def test_logged_router_losses_do_not_depend_on_the_layout(layout):
    # Without the one loss that depends on what is packed together.
    config = replace(MOE, moe=replace(MOE.moe, aux_loss_coeff=0.0))
    (alone,) = run_distributed(train, 1, Layout(1, 256), config)
    results = run_distributed(train, 4, layout, config)
    for result in results:
        for found, wanted in zip(result["router_losses"], alone["router_losses"], strict=True):
            assert set(found) == {"moe_seq_aux_loss", "moe_z_loss"}
            assert found == pytest.approx(wanted, rel=1e-5)
    # 1 where the load is even.
    assert 1 < alone["router_losses"][0]["moe_seq_aux_loss"] < 3


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
    (Layout(4, 48, pp=2, vpp=2, recompute=FULL), DENSE),
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


MTP_UNTIED = [replace(DENSE, mtp_num_layers=depths) for depths in (1, 2)]
MTP_TIED = [replace(config, tie_word_embeddings=True) for config in MTP_UNTIED]
MTP = [
    (Layout(1, 96), MTP_UNTIED[1]),
    (Layout(4, 24), MTP_UNTIED[0]),
    (Layout(4, 24), MTP_TIED[1]),
    (Layout(4, 48, planner="static", cp=2), MTP_TIED[0]),
    (Layout(4, 24, planner="static", cp=4), MTP_UNTIED[1]),
    (Layout(2, 96, tp=2), MTP_TIED[0]),
    (Layout(4, 48, tp=2, sequence_parallel=True), MTP_UNTIED[1]),
    (Layout(8, 48, tp=2, sequence_parallel=True), MTP_TIED[1]),
    (Layout(4, 24, recompute=FULL), MTP_UNTIED[1]),
    (Layout(2, 48, recompute=Recompute(granularity="selective", modules=("mlp",))), MTP_TIED[0]),
    (Layout(4, 24, ep=2), replace(MOE, mtp_num_layers=1)),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2), replace(MOE, mtp_num_layers=2)),
    (Layout(4, 24, ep=2, recompute=FULL), replace(BIASED, mtp_num_layers=1)),
    (Layout(4, 24, ep=4), replace(GATHERED, mtp_num_layers=1)),
    (Layout(4, 48, pp=2), MTP_UNTIED[1]),
    (Layout(4, 48, pp=2), MTP_TIED[1]),
    (Layout(8, 48, pp=2, tp=2, sequence_parallel=True), MTP_TIED[0]),
    (Layout(4, 48, pp=2, ep=2), replace(MOE, mtp_num_layers=1)),
    (Layout(4, 48, pp=2, vpp=2), MTP_UNTIED[0]),
    (Layout(4, 48, pp=2, vpp=2, recompute=FULL), MTP_TIED[1]),
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
    assert all(found["mtp_losses"][0])
    assert found["mtp_losses"][2:] == [[0.0, 0.0]] * 2


def test_multi_token_prediction_without_targets_with_experts():
    found = check(Layout(4, 12, ep=2), replace(MOE, **ALONE), lengths=SHORT[:3])
    assert all(found["mtp_losses"][0])
    assert found["mtp_losses"][2] == [0.0, 0.0]


BUCKETS = [
    (Layout(4, 24, bucket=8), DENSE),
    (Layout(4, 24, ep=2, bucket=8), MOE),
    (Layout(4, 24, ep=2, bucket=8), GATHERED),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2, bucket=16), BIASED),
    (Layout(4, 48, pp=2, bucket=16), DENSE),
    (Layout(4, 48, pp=2, vpp=2, bucket=16), DENSE),
]


@pytest.mark.parametrize(("layout", "config"), BUCKETS, ids=str)
def test_bucketed_lengths(layout, config):
    check(layout, config)
