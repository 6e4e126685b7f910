"""Routes that a model cannot replay are refused by name; replay leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from distributed import run_distributed
from lightning_dcp.model import (
    ModelConfig,
    MoEConfig,
    build_gpt_model,
    check_routers,
    hidden_states,
)
from lightning_dcp.model.router_replay import PackedRouterReplay, moe_layer_index
from lightning_dcp.packing import (
    ROUTES,
    MicroBatchRoutes,
    RouteShape,
    check_routes,
    pack_micro_batch,
    read_global_batch,
)
from lightning_dcp.parallel import (
    ParallelSizes,
    bind_micro_batch,
    install_cp_hooks,
    setup_parallel,
)

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    moe=MoEConfig(num_experts=4, topk=2, ffn_hidden_size=8, router_replay=True),
)
SHAPE = RouteShape(num_layers=2, topk=2, num_experts=4)
LENGTHS = (3, 5, 1)


def batch(change=None, dtype=torch.uint8, lengths=LENGTHS):
    """Three samples whose tokens all go to experts 1 and 3, after ``change``."""
    ids = [torch.arange(length) for length in LENGTHS]
    routes = [torch.tensor([1, 3]).repeat(length, 2, 1).to(dtype) for length in lengths]
    if change is not None:
        routes = change(routes)
    offsets = torch.tensor([0, *np.cumsum([len(one) for one in routes])])
    made = {
        "input_ids": torch.nested.nested_tensor(ids, layout=torch.jagged),
        ROUTES: torch.nested.nested_tensor_from_jagged(torch.cat(routes), offsets),
    }
    return read_global_batch(made, may_lack_last=[ROUTES])


def put(sample, token, layer, experts):
    def change(routes):
        routes[sample][token, layer] = torch.tensor(experts)
        return routes

    return change


def test_routes_of_the_right_form_pass():
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        check_routes(batch(dtype=dtype), SHAPE)
    check_routes(batch(lengths=(3, 4, 0)), SHAPE)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda routes: [one[:, :1] for one in routes], r"has \[1, 2\] values a token"),
        (lambda routes: [one[..., :1] for one in routes], r"has \[2, 1\] values a token"),
        (lambda routes: [one.flatten(1) for one in routes], r"has \[4\] values a token"),
        (put(1, 4, 1, [0, 4]), r"sample 1 names an expert that there is not at token 4, MoE layer"),
        (put(2, 0, 0, [2, 2]), r"sample 2 names one expert twice at token 0, MoE layer 0: \[2, 2]"),
    ],
    ids=["layers", "topk", "flat", "unknown", "repeated"],
)
def test_routes_that_the_model_cannot_replay_name_the_sample(change, found):
    with pytest.raises(ValueError, match=f"'routed_experts' of .*{found}"):
        check_routes(batch(change), SHAPE)


def test_negative_experts_are_found_in_small_types_too():
    with pytest.raises(ValueError, match=r"sample 0 .* token 2, MoE layer 1: \[-1, 3\]"):
        check_routes(
            batch(put(0, 2, 1, [-1, 3]), dtype=torch.int8), replace(SHAPE, num_experts=200)
        )


@pytest.mark.parametrize("lengths", [(3, 3, 1), (4, 5, 1), (1, 5, 1)])
def test_a_sample_may_lack_the_routes_of_its_last_token_and_no_others(lengths):
    with pytest.raises(ValueError, match=r"'routed_experts' of sample \d has"):
        batch(lengths=lengths)


def test_repeated_experts_are_found_by_the_part_that_holds_them():
    bad = batch(put(1, 1, 0, [3, 3]))
    refused = []
    for part in range(4):
        try:
            check_routes(bad, SHAPE, part=(part, 4))
        except ValueError as error:
            refused.append((part, "sample 1 names one expert twice at token 1" in str(error)))
    assert refused == [(1, True)]


def test_routes_of_another_kind():
    made = batch()
    with pytest.raises(TypeError, match=r"found torch.float32.*torch.uint8 is the smallest"):
        check_routes(batch(dtype=torch.float32), SHAPE)
    dense = replace(made, extras={ROUTES: torch.zeros(3, 2, 2)})
    with pytest.raises(TypeError, match="found a dense one"):
        check_routes(dense, SHAPE)


def test_routes_for_a_model_that_replays_none():
    for moe in (None, replace(CONFIG.moe, router_replay=False)):
        shape = RouteShape.of(replace(CONFIG, moe=moe))
        assert shape is None
        with pytest.raises(ValueError, match=r"replays no routes.*router_replay=True.*moe=None"):
            check_routes(batch(), shape)


def test_experts_are_stored_in_the_smallest_type():
    assert RouteShape.of(CONFIG) == SHAPE
    assert RouteShape(1, 1, 256).dtype == torch.uint8
    assert RouteShape(1, 1, 257).dtype == torch.int16


def test_only_layers_with_experts_are_counted():
    every = torch.nn.Module()
    every.num_layers = 6
    for frequency, wanted in ((1, [0, 1, 2, 3, 4, 5]), (2, [0, None, 1, None, 2, None])):
        every.moe_layer_freq = frequency
        found = [moe_layer_index(every, number) for number in range(1, 7)]
        assert [one for one, is_moe in zip(found, wanted, strict=True) if is_moe is not None] == [
            one for one in wanted if one is not None
        ]
    every.moe_layer_freq = [0, 1, 1, 0, 0, 1]
    assert [moe_layer_index(every, number) for number in (2, 3, 6)] == [0, 1, 2]


def build_twice():
    """Routes that a second model used, and what is left of the first and in Megatron's list."""
    context = setup_parallel(ParallelSizes(world_size=1))
    try:
        first = build_gpt_model(CONFIG, context, seed=1)
        kept = weakref.ref(first)
        install_cp_hooks(first)
        model = build_gpt_model(CONFIG, context, seed=2)
        install_cp_hooks(model)
        del first
        gc.collect()
        listed = len(RouterReplay.global_router_replay_instances)
        check_routers([model], SHAPE, context.sizes)
        micro_batch = pack_micro_batch(batch(), range(3))
        routes = MicroBatchRoutes(
            replayed=micro_batch.extras[ROUTES],
            has_route=torch.ones(9, dtype=torch.bool),
            recorded={},
        )
        hidden_states(model, bind_micro_batch(micro_batch, context.cp_groups, routes=routes))
        used = {
            layer: experts.sort(-1).values.tolist() for layer, experts in routes.recorded.items()
        }
        model.decoder.layers[1].mlp.router.router_replay = None
        try:
            check_routers([model], SHAPE, context.sizes)
            counted = "no error"
        except ValueError as error:
            counted = str(error)
    finally:
        context.destroy()
    return listed, kept() is None, used, counted


def test_a_second_model_replays_and_nothing_stays_of_the_first():
    ((listed, is_gone, used, counted),) = run_distributed(build_twice, 1)
    assert listed == 0
    assert is_gone
    assert used == {0: [[1, 3]] * 9, 1: [[1, 3]] * 9}
    assert "1 routers that replay on this rank, and 2 of its 2 MoE layers" in counted


def shifted():
    """What becomes of routes with a row less than the micro-batch, or one more."""
    context = setup_parallel(ParallelSizes(world_size=1))
    messages = []
    try:
        model = build_gpt_model(CONFIG, context)
        install_cp_hooks(model)
        for rows in (8, 10):
            micro_batch = pack_micro_batch(batch(), range(3))
            routes = MicroBatchRoutes(
                replayed=torch.tensor([1, 3]).repeat(rows, 2, 1),
                has_route=torch.ones(rows, dtype=torch.bool),
            )
            bound = bind_micro_batch(micro_batch, context.cp_groups, routes=routes)
            try:
                hidden_states(model, bound)
                messages.append("no error")
            except RuntimeError as error:
                messages.append(str(error))
    finally:
        context.destroy()
    return messages


def test_routes_that_are_not_those_of_the_rows_are_never_shifted():
    ((less, more),) = run_distributed(shifted, 1)
    assert "got 9 rows, and values of 8; the micro-batch has 9 rows" in less
    assert "got 9 rows, and values of 10" in more


def test_rows_without_a_route_choose_by_score_and_others_come_ordered_by_it():
    replay = PackedRouterReplay.in_place_of(RouterReplay())
    assert not RouterReplay.global_router_replay_instances
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]], requires_grad=True)

    def live(scores, topk, *_):
        return scores.topk(topk, dim=1)

    replay.replay(torch.tensor([[3, 2], [3, 2]]), torch.tensor([True, False]))
    values, experts = replay.get_replay_topk(scores, 2, None, None, live)
    assert experts.tolist() == [[2, 3], [0, 1]]
    assert values.tolist() == [pytest.approx([0.2, 0.1]), pytest.approx([0.4, 0.3])]
    values.sum().backward()
    assert scores.grad.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert replay.get_recorded_indices() is experts
    replay.clear_indices()
    assert replay.get_replay_topk(scores, 2, None, None, live)[1].tolist() == [[0, 1]] * 2
