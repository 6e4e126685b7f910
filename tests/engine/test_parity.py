"""The matrix of docs/parity.md: every layout gives the numbers of one plain process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parity import (
    BIASED,
    DENSE,
    GATHERED,
    MOE,
    TIED,
    Layout,
    check,
    deep,
    name_of,
    replaying,
    train,
)

from distributed import run_distributed
from lightning_dcp.model import Recompute

POOLS = [
    Layout(1, 96),
    Layout(2, 48),
    Layout(2, 96, tp=2),
    Layout(3, 40),
    Layout(4, 24),
    Layout(4, 24, planner="longest_sequence"),
    Layout(4, 48, planner="static", cp=2),
    Layout(4, 24, planner="static", cp=4),
    Layout(4, 48, tp=2),
    Layout(6, 40, tp=2, planner="longest_sequence"),
    Layout(8, 12),
    Layout(8, 24, tp=2),
    Layout(8, 24, planner="static", cp=8),
    Layout(1, 96, sharded=False),
    Layout(4, 24, sharded=False),
    Layout(4, 48, tp=2, sharded=False),
    Layout(2, 48, overlap=True),
]


@pytest.mark.parametrize("layout", POOLS, ids=name_of)
def test_pools(layout):
    found = check(layout, DENSE)
    # Without this the layouts could all be data parallelism.
    assert len(found["cp_sizes"]) > 1 or layout.world == layout.tp or layout.cp


def test_tied_embeddings():
    check(Layout(4, 48, tp=2), TIED)


SEQUENCE_PARALLEL = [
    Layout(2, 96, tp=2, sequence_parallel=True),
    Layout(4, 48, tp=2, sequence_parallel=True),
    Layout(8, 48, tp=2, sequence_parallel=True, planner="static", cp=4),
]


@pytest.mark.parametrize("layout", SEQUENCE_PARALLEL, ids=name_of)
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


@pytest.mark.parametrize("layout", EXPERTS, ids=name_of)
def test_experts(layout):
    check(layout, MOE)


@pytest.mark.parametrize(
    "layout",
    [Layout(4, 24, ep=2), Layout(4, 48, tp=2, sequence_parallel=True), Layout(4, 48, pp=2)],
    ids=name_of,
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


@pytest.mark.parametrize("layout", [EXPERTS[0], EXPERTS[3], EXPERTS[5]], ids=name_of)
def test_experts_balanced_by_a_bias(layout):
    check(layout, BIASED)


@pytest.mark.parametrize("layout", EXPERTS[3:6], ids=name_of)
def test_experts_that_gather_all_tokens(layout):
    check(layout, GATHERED)


FULL = Recompute(granularity="full")
EXPERTS_AGAIN = Recompute(granularity="selective", modules=("moe",))
MLP_AGAIN = Recompute(granularity="selective", modules=("mlp",))
RECOMPUTED = [
    (Layout(2, 48, recompute=FULL), DENSE),
    (Layout(4, 48, tp=2, sequence_parallel=True, recompute=FULL), DENSE),
    (
        Layout(2, 48, recompute=Recompute(granularity="full", method="block", num_layers=2)),
        deep(DENSE),
    ),
    (Layout(2, 48, recompute=Recompute(granularity="selective")), DENSE),
    (Layout(2, 48, recompute=MLP_AGAIN), DENSE),
    (Layout(4, 24, ep=2, recompute=FULL), MOE),
    (Layout(4, 24, ep=2, recompute=EXPERTS_AGAIN), MOE),
    (Layout(4, 24, ep=2, recompute=FULL), BIASED),
]


@pytest.mark.parametrize(("layout", "config"), RECOMPUTED, ids=name_of)
def test_recomputation(layout, config):
    check(layout, config)


PIPELINES = [
    (Layout(2, 96, pp=2), DENSE),
    (Layout(4, 48, pp=2), DENSE),
    (Layout(4, 96, pp=4), deep(DENSE)),
    (Layout(4, 96, pp=2, tp=2), DENSE),
    (Layout(8, 48, pp=2, tp=2, sequence_parallel=True), DENSE),
    (Layout(4, 48, pp=2), TIED),
    (Layout(4, 48, pp=2, planner="static", cp=2), DENSE),
    (Layout(4, 48, pp=2, ep=2), MOE),
    (Layout(8, 24, pp=2, ep=4), BIASED),
    (Layout(2, 96, pp=2, vpp=2), deep(DENSE)),
    (Layout(4, 48, pp=2, vpp=2), deep(DENSE)),
    (Layout(4, 48, pp=2, vpp=2), deep(TIED)),
    # Two layers a stage, so that one of them is recomputed from the other.
    (Layout(4, 48, pp=2, recompute=FULL), deep(DENSE)),
    (Layout(4, 48, pp=2, vpp=2, recompute=FULL), deep(DENSE)),
    (Layout(4, 48, pp=2, ep=2, recompute=EXPERTS_AGAIN), MOE),
]


@pytest.mark.parametrize(("layout", "config"), PIPELINES, ids=name_of)
def test_pipelines(layout, config):
    check(layout, config)


@pytest.mark.parametrize("config", [MOE, BIASED], ids=name_of)
def test_steps_that_fill_up_virtual_stages_add_nothing(config):
    found = check(Layout(4, 48, pp=2, vpp=2, ep=2), deep(config))
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
    (Layout(2, 48, recompute=MLP_AGAIN), MTP_TIED[0]),
    (Layout(4, 24, ep=2), replace(MOE, mtp_num_layers=1)),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2), replace(MOE, mtp_num_layers=2)),
    (Layout(4, 24, ep=2, recompute=FULL), replace(BIASED, mtp_num_layers=1)),
    (Layout(4, 24, ep=4), replace(GATHERED, mtp_num_layers=1)),
    (Layout(4, 48, pp=2), MTP_UNTIED[1]),
    (Layout(4, 48, pp=2), MTP_TIED[1]),
    (Layout(8, 48, pp=2, tp=2, sequence_parallel=True), MTP_TIED[0]),
    (Layout(4, 48, pp=2, ep=2), replace(MOE, mtp_num_layers=1)),
    (Layout(4, 48, pp=2, vpp=2), deep(MTP_UNTIED[0])),
    (Layout(4, 48, pp=2, vpp=2, recompute=FULL), deep(MTP_TIED[1])),
]


@pytest.mark.parametrize(("layout", "config"), MTP, ids=name_of)
def test_multi_token_prediction(layout, config):
    check(layout, config)


# Most ranks have no target at the second depth; the third step has none further on, the last none.
SHORT = ((1, 9, 2, 3, 1), (2, 3, 7, 1), (1, 2, 2, 1), (1, 1))
# Attention to a single token gives queries and keys a gradient of nothing but rounding.
ALONE = {"mtp_num_layers": 2, "qk_layernorm": False}


@pytest.mark.parametrize(
    ("layout", "config", "lengths"),
    [
        (Layout(4, 12), replace(DENSE, **ALONE), SHORT),
        (Layout(4, 12, planner="static", cp=4), replace(DENSE, **ALONE), SHORT),
        (Layout(4, 12, ep=2), replace(MOE, **ALONE), SHORT[:3]),
    ],
    ids=name_of,
)
def test_multi_token_prediction_without_targets(layout, config, lengths):
    depths = [list(losses.values()) for losses in check(layout, config, lengths)["mtp_losses"]]
    assert all(depths[0])
    assert depths[2:] == [[0.0, 0.0]] * (len(lengths) - 2)


PADDED = [
    (Layout(1, 96, bucket=32), DENSE),
    (Layout(1, 128, length=128), DENSE),
    (Layout(2, 60, bucket=20), DENSE),
    (Layout(2, 96, tp=2, bucket=16), DENSE),
    (Layout(4, 24, bucket=8), DENSE),
    (Layout(4, 64, length=48), DENSE),
    (Layout(4, 48, tp=2, bucket=6), DENSE),
    (Layout(4, 24, ep=2, bucket=8), MOE),
    (Layout(4, 24, ep=2, bucket=8), GATHERED),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2, bucket=16), BIASED),
    (Layout(4, 48, pp=2, bucket=16), DENSE),
    (Layout(4, 48, pp=2, vpp=2, bucket=16), deep(DENSE)),
]


@pytest.mark.parametrize(("layout", "config"), PADDED, ids=name_of)
def test_packs_that_are_padded_to_buckets_or_one_length(layout, config):
    check(layout, config)


# Rows of routes that the zigzag, a sequence-parallel slice or padding shifts fail here.
REPLAYED = [
    (Layout(1, 96), MOE),
    (Layout(2, 48, ep=2), MOE),
    (Layout(4, 24, ep=2), GATHERED),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2), MOE),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2), GATHERED),
    (Layout(4, 48, ep=4, planner="static", cp=2), BIASED),
    (Layout(4, 24, ep=2, recompute=FULL), MOE),
    (Layout(4, 24, ep=2, recompute=EXPERTS_AGAIN), BIASED),
    (Layout(4, 48, pp=2, ep=2, recompute=FULL), MOE),
    (Layout(8, 48, pp=2, tp=2, sequence_parallel=True), MOE),
    (Layout(4, 48, pp=2, vpp=2, ep=2), deep(MOE)),
]


@pytest.mark.parametrize(("layout", "config"), REPLAYED, ids=name_of)
def test_given_routes(layout, config):
    check(layout, replaying(config))
