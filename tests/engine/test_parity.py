"""Every layout gives the numbers of one process: loss, gradients and weights after three steps."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist

import reference
from distributed import run_distributed
from lightning_dcp.config.padding import PackPadding
from lightning_dcp.engine import (
    DynamicCPEngine,
    OptimizerSettings,
    PlanSettings,
    build_optimizer,
    full_model_state,
    wrap_ddp,
)
from lightning_dcp.loss import linear_cross_entropy
from lightning_dcp.model import ModelConfig, build_gpt_model, hidden_states
from lightning_dcp.model.global_names import merge_over_tp
from lightning_dcp.parallel import ParallelSizes, install_cp_hooks, setup_parallel

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    vocab_size=61,
    make_vocab_size_divisible_by=8,
    qk_layernorm=True,
    init_method_std=0.2,
)
TIED = ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": True, "qk_layernorm": False})
# Long enough for several CP sizes at a cap of 24, and odd enough for padding everywhere.
LENGTHS = [
    [70, 5, 9, 33, 2, 17, 12, 24, 1, 8],
    [3, 48, 7, 7, 21, 95, 13, 2],
    [11, 6, 30, 30, 4, 60, 19, 5, 10],
]
# Adam divides by the root of the second moment: without an epsilon well above it, the rounding of a
# gradient that is nearly zero would become a difference of a whole step.
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "adam_eps": 1e-5}
CLIP = 0.5


def batches() -> list[list[list[int]]]:
    generator = np.random.default_rng(0)
    return [[generator.integers(0, 61, n).tolist() for n in lengths] for lengths in LENGTHS]


def jagged(batch: list[list[int]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(ids) for ids in batch]
    return {"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}


def train(
    tp: int,
    cap: int,
    planner: str,
    cp: int | None,
    sharded: bool,
    config: ModelConfig = CONFIG,
    overlap: bool = False,
    padding: dict[str, int] | None = None,
) -> dict[str, object]:
    """Trains three steps on this rank's layout; numbers are whole, as on one process."""
    world = dist.get_world_size()
    sizes = ParallelSizes(
        world_size=world, tensor_model_parallel_size=tp, context_parallel_size=cp or 1
    )
    context = setup_parallel(sizes)
    try:
        model = build_gpt_model(config, context, seed=1)
        install_cp_hooks(model)
        start = full_model_state(model, context)
        ddp = wrap_ddp(
            model, context, use_distributed_optimizer=sharded, overlap_grad_reduce=overlap
        )
        optimizer = build_optimizer(ddp, context, OptimizerSettings(**SETTINGS), clip_grad=CLIP)
        engine = DynamicCPEngine(
            context,
            PlanSettings.of_run(
                context.sizes,
                max_seqlen_per_dp_cp_rank=cap,
                planner=planner,
                context_parallel_size=cp,
                padding=PackPadding(**(padding or {})),
            ),
        )

        def step(micro_batch):
            hidden, weight = hidden_states(model, micro_batch)
            loss = linear_cross_entropy(
                hidden,
                weight,
                micro_batch.labels,
                tp_group=context.pg_collection.tp if tp > 1 else None,
                vocab_size=config.vocab_size,
            )
            return loss, micro_batch.num_tokens

        losses, norms, grads, cp_sizes, evals = [], [], [], set(), []
        for batch in batches():
            planned = engine.prepare(jagged(batch), vocab_size=config.vocab_size)
            cp_sizes |= set(planned.plan.cp_sizes())
            evals.append(float(engine.eval_step(planned, step).loss))
            result = engine.train_step(ddp, planned, step, force_all_reduce=True)
            losses.append(float(result.loss))
            grads.append(
                {
                    name: merge_over_tp(p.main_grad, p, context).detach().numpy().copy()
                    for name, p in model.named_parameters()
                }
            )
            optimizer.step()
            norms.append(optimizer.grad_norm)
        end = full_model_state(model, context)
    finally:
        context.destroy()
    if dist.get_rank() != 0:
        return {"losses": losses, "norms": norms}
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "evals": evals,
        "cp_sizes": sorted(cp_sizes),
        "start": {k: v.numpy() for k, v in start.items()},
        "weights": {k: v.numpy() for k, v in end.items()},
    }


@functools.cache
def expected(config: ModelConfig = CONFIG) -> tuple[dict, dict]:
    """The reference's numbers, from the initial weights that one process of ours has."""
    (single,) = run_distributed(train, 1, 1, 256, "balanced", None, True, config)
    return single["start"], reference.train(
        single["start"], config, batches(), clip=CLIP, **SETTINGS
    )


def close(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    """Equal to 1e-5, relative to the largest value of the tensor."""
    scale = max(float(np.abs(wanted).max()), 1e-6)
    difference = float(np.abs(found - wanted).max()) / scale
    assert difference < 1e-5, f"{name}: off by {difference:.2e} of {scale:.2e}"


def check(results: list[dict], config: ModelConfig = CONFIG) -> None:
    start, wanted = expected(config)
    found = results[0]
    for name, value in start.items():
        np.testing.assert_array_equal(found["start"][name], value, err_msg=name)
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["evals"], wanted["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["norms"], wanted["norms"], rtol=1e-5)
    for step, (mine, theirs) in enumerate(zip(found["grads"], wanted["grads"], strict=True)):
        assert set(mine) == set(theirs)
        for name in theirs:
            close(mine[name], theirs[name], f"gradient of {name} at step {step}")
    for name, value in wanted["weights"].items():
        close(found["weights"][name], value, f"{name} after three steps")
    for other in results[1:]:
        assert other["losses"] == found["losses"]
        assert other["norms"] == pytest.approx(found["norms"], rel=1e-6)


LAYOUTS = [
    # processes, TP, cap, planner, static CP size
    pytest.param(1, 1, 96, "balanced", None, id="1"),
    pytest.param(2, 1, 48, "balanced", None, id="2"),
    pytest.param(2, 2, 96, "balanced", None, id="2-tp2"),
    pytest.param(3, 1, 40, "balanced", None, id="3"),
    pytest.param(4, 1, 24, "balanced", None, id="4"),
    pytest.param(4, 1, 24, "longest_sequence", None, id="4-longest"),
    pytest.param(4, 1, 48, "static", 2, id="4-static2"),
    pytest.param(4, 1, 24, "static", 4, id="4-static4"),
    pytest.param(4, 2, 48, "balanced", None, id="4-tp2"),
    pytest.param(6, 2, 40, "longest_sequence", None, id="6-tp2-pool3"),
    pytest.param(8, 1, 12, "balanced", None, id="8"),
    pytest.param(8, 2, 24, "balanced", None, id="8-tp2"),
    pytest.param(8, 1, 24, "static", 8, id="8-static8"),
]


@pytest.mark.parametrize(("world", "tp", "cap", "planner", "cp"), LAYOUTS)
def test_layout_equals_one_process(world, tp, cap, planner, cp):
    check(run_distributed(train, world, tp, cap, planner, cp, True))


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (4, 1), (4, 2)])
def test_unsharded_optimizer_equals_one_process(world, tp):
    check(run_distributed(train, world, tp, 96 // (world // tp), "balanced", None, False))


def test_tied_embeddings_equal_one_process():
    check(run_distributed(train, 4, 2, 48, "balanced", None, True, TIED), TIED)


def test_overlapped_reduction_equals_one_process():
    check(run_distributed(train, 2, 1, 48, "balanced", None, True, CONFIG, True))


@pytest.mark.parametrize(
    ("world", "tp", "cap", "padding"),
    [
        pytest.param(1, 1, 96, {"pad_to_length_bucket": 32}, id="1"),
        pytest.param(1, 1, 128, {"pad_to_length": 128}, id="1-one-length"),
        pytest.param(2, 1, 60, {"pad_to_length_bucket": 20}, id="2"),
        pytest.param(2, 2, 96, {"pad_to_length_bucket": 16}, id="2-tp2"),
        pytest.param(4, 1, 24, {"pad_to_length_bucket": 8}, id="4"),
        pytest.param(4, 1, 64, {"pad_to_length": 48}, id="4-one-length"),
        pytest.param(4, 2, 48, {"pad_to_length_bucket": 6}, id="4-tp2"),
    ],
)
def test_bucketed_lengths_equal_one_process(world, tp, cap, padding):
    check(run_distributed(train, world, tp, cap, "balanced", None, True, CONFIG, False, padding))


def test_a_small_cap_uses_several_cp_sizes():
    # Without this the layouts above could all be data parallelism.
    results = run_distributed(train, 4, 1, 24, "balanced", None, True)
    assert len(results[0]["cp_sizes"]) >= 2
