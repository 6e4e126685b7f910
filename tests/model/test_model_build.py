"""The built model: one set of weights for every layout, and rope and documents under CP."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from distributed import run_distributed
from lightning_dcp.model import ModelConfig, build_gpt_model, hidden_states
from lightning_dcp.packing import pack_micro_batch, read_global_batch
from lightning_dcp.parallel import (
    ParallelContext,
    ParallelSizes,
    bind_micro_batch,
    install_cp_hooks,
    setup_parallel,
)

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=12,
    vocab_size=13,
    make_vocab_size_divisible_by=4,
    qk_layernorm=True,
)
# Heads of width 2 have one frequency, which is 1: rope turns a head by its position, in radians.
TURNS = ModelConfig(
    num_layers=1,
    hidden_size=4,
    num_attention_heads=2,
    ffn_hidden_size=8,
    vocab_size=8,
    make_vocab_size_divisible_by=8,
    init_method_std=1.0,
)

Weights = dict[str, np.ndarray]


def state(context: ParallelContext, seed: int, config: ModelConfig = CONFIG) -> Weights:
    model = build_gpt_model(config, context, seed=seed)
    return {name: weight.detach().numpy() for name, weight in model.named_parameters()}


def build_models() -> dict[str, object]:
    """Weights of this rank under TP 2, 2 DPxCP ranks and 1, and what was left of random states."""
    found: dict[str, object] = {}
    context = setup_parallel(ParallelSizes(world_size=2, tensor_model_parallel_size=2))
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    found["tp2"] = state(context, seed=1)
    after = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    found["random_states_kept"] = before == after
    torch.manual_seed(6)
    found["tp2_again"] = state(context, seed=1)
    with pytest.raises(ValueError, match="size=2 does not divide num_attention_heads=1"):
        build_gpt_model(ModelConfig(num_attention_heads=1), context)
    with pytest.raises(ValueError, match="size=2 does not divide the padded vocabulary"):
        build_gpt_model(ModelConfig(vocab_size=7, make_vocab_size_divisible_by=7), context)
    context = setup_parallel(ParallelSizes(world_size=2), current=context)
    found["tp1"] = state(context, seed=1)
    found["other_seed"] = state(context, seed=2)
    model = build_gpt_model(CONFIG, context, dtype=torch.bfloat16)
    found["dtypes"] = {str(weight.dtype) for weight in model.parameters() if weight.dim() > 1}
    context.destroy()
    return found


@pytest.fixture(scope="module")
def built() -> list[dict]:
    return run_distributed(build_models, 2)


def shard(name: str, whole: np.ndarray, rank: int) -> np.ndarray:
    """The part of a weight that a rank holds under TP 2."""
    half = slice(rank * len(whole) // 2, (rank + 1) * len(whole) // 2)
    if name.endswith("linear_fc1.weight"):
        # Gate over up: a rank holds a half of each.
        return np.concatenate([np.split(part, 2)[rank] for part in np.split(whole, 2)])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return np.split(whole, 2, axis=1)[rank]
    if name.endswith("norm.weight"):
        return whole
    # Embedding and output layer by vocabulary; queries, keys and values by query group.
    return whole[half]


def test_tensor_parallel_ranks_hold_slices_of_one_weight(built):
    whole = built[0]["tp1"]
    assert whole["decoder.layers.0.mlp.linear_fc1.weight"].shape == (24, 16)
    assert whole["embedding.word_embeddings.weight"].shape == (16, 16)
    for rank, found in enumerate(built):
        assert set(found["tp2"]) == set(whole)
        for name, weight in whole.items():
            np.testing.assert_array_equal(
                found["tp2"][name], shard(name, weight, rank), err_msg=f"{name} on rank {rank}"
            )


def test_data_parallel_ranks_hold_the_same_weights(built):
    for name, weight in built[0]["tp1"].items():
        np.testing.assert_array_equal(weight, built[1]["tp1"][name], err_msg=name)


def test_the_seed_alone_decides(built):
    for found in built:
        for name, weight in found["tp2"].items():
            np.testing.assert_array_equal(weight, found["tp2_again"][name], err_msg=name)
        same = {
            name
            for name, weight in found["tp1"].items()
            if np.array_equal(weight, found["other_seed"][name])
        }
        assert same == {name for name in found["tp1"] if name.endswith("norm.weight")}


def test_the_callers_random_states_are_kept(built):
    assert all(found["random_states_kept"] for found in built)


def test_matrices_have_the_dtype_asked_for(built):
    assert [found["dtypes"] for found in built] == [{"torch.bfloat16"}] * 2


def run_packs() -> dict[str, object]:
    """Rope angles and hidden states of packs of two documents under CP 1 and 2."""
    context = setup_parallel(ParallelSizes(world_size=2))
    model = build_gpt_model(TURNS, context, seed=3)
    install_cp_hooks(model)
    rotated: dict[str, torch.Tensor] = {}

    def keep(module, args):
        rotated.update(query=args[0].detach(), key=args[1].detach())

    model.decoder.layers[0].self_attention.core_attention.register_forward_pre_hook(keep)

    def run(documents: list[list[int]], cp_size: int) -> np.ndarray:
        ids = torch.nested.nested_tensor(
            [torch.tensor(document) for document in documents], layout=torch.jagged
        )
        micro_batch = pack_micro_batch(
            read_global_batch({"input_ids": ids}, vocab_size=TURNS.vocab_size),
            range(len(documents)),
            cp_size=cp_size,
            cp_rank=context.pool_rank if cp_size == 2 else 0,
        )
        bound = bind_micro_batch(micro_batch, context.cp_groups)
        return hidden_states(model, bound).hidden.detach().numpy()

    found: dict[str, object] = {}
    run([[1]], 1)
    start = {name: vectors[:1] for name, vectors in rotated.items()}
    # The same token everywhere: what rope is given is the same vector on every row.
    for cp_size in (2, 1, 2):
        run([[1] * 4, [1] * 4], cp_size)
        for name, vectors in rotated.items():
            found[f"{name}_positions_{cp_size}"] = positions(vectors, start[name])
    found["hidden"] = run([[1, 2, 3, 4], [5, 6, 7]], 2)
    found["other_first"] = run([[4, 4, 2, 0], [5, 6, 7]], 2)
    found["whole"] = run([[1, 2, 3, 4], [5, 6, 7]], 1)
    context.destroy()
    return found


def positions(vectors: torch.Tensor, start: torch.Tensor) -> list[int]:
    """By how many radians each row is turned from the vector at position 0, in its first head."""
    turned, origin = (torch.view_as_complex(part[:, 0].contiguous()) for part in (vectors, start))
    # Shifted, so that rounding cannot turn 0 into a whole turn.
    angles = ((turned / origin).angle() + 0.5) % (2 * torch.pi) - 0.5
    rounded = angles.round()
    torch.testing.assert_close(angles, rounded, rtol=0, atol=1e-4)
    return [int(angle) for angle in rounded]


@pytest.fixture(scope="module")
def packs() -> list[dict]:
    return run_distributed(run_packs, 2)


@pytest.mark.parametrize("name", ["query", "key"])
def test_each_sequence_starts_at_position_zero(packs, name):
    assert [found[f"{name}_positions_2"] for found in packs] == [[0, 3, 0, 3], [1, 2, 1, 2]]
    assert [found[f"{name}_positions_1"] for found in packs] == [[0, 1, 2, 3, 0, 1, 2, 3]] * 2


def test_no_document_sees_another_through_the_model(packs):
    for found in packs:
        # Two rows a document and rank.
        np.testing.assert_array_equal(found["hidden"][2:], found["other_first"][2:])
        assert not np.allclose(found["hidden"][:2], found["other_first"][:2])


def test_hidden_states_are_those_of_one_rank(packs):
    first, second = (found["hidden"] for found in packs)
    # Document one is tokens 0 and 3 on rank 0, 1 and 2 on rank 1; document two has three tokens.
    in_order = [first[0], second[0], second[1], first[1], first[2], second[2], second[3]]
    np.testing.assert_allclose(in_order, packs[0]["whole"], rtol=1e-5, atol=1e-6)
