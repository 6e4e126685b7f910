"""Training three steps in any layout of ranks, for the parity tests: plain functions and data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

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
    wrap_chunks,
)
from lightning_dcp.engine.checkpoint import gather_whole
from lightning_dcp.loss import linear_cross_entropy
from lightning_dcp.model import (
    ModelConfig,
    MoEConfig,
    Recompute,
    RouteShape,
    build_model,
    hidden_states,
    model_chunks,
)
from lightning_dcp.parallel import ParallelSizes, install_cp_hooks, setup_parallel

DENSE = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    vocab_size=61,
    make_vocab_size_divisible_by=8,
    qk_layernorm=True,
    init_method_std=0.2,
)
MOE = ModelConfig(
    **vars(DENSE)
    | {
        "num_layers": 2,
        "moe": MoEConfig(
            num_experts=8,
            topk=2,
            ffn_hidden_size=16,
            shared_expert_ffn_hidden_size=24,
            aux_loss_coeff=0.05,
            seq_aux_loss_coeff=0.1,
            z_loss_coeff=0.01,
        ),
    }
)
BIASED = replace(
    MOE,
    moe=MoEConfig(
        num_experts=8,
        topk=3,
        ffn_hidden_size=16,
        score_function="sigmoid",
        expert_bias=True,
        expert_bias_update_rate=0.02,
        seq_aux_loss_coeff=0.1,
    ),
)
GATHERED = replace(MOE, moe=replace(MOE.moe, token_dispatcher="allgather"))
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


@dataclass(frozen=True)
class Layout:
    """A way to run one training on some ranks."""

    world: int
    cap: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    planner: str = "balanced"
    cp: int | None = None
    bucket: int | None = None
    recompute: Recompute = field(default_factory=Recompute)

    @property
    def sizes(self) -> ParallelSizes:
        return ParallelSizes(
            world_size=self.world,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp,
            expert_model_parallel_size=self.ep,
            context_parallel_size=self.cp or 1,
            sequence_parallel=self.sequence_parallel,
        )

    def __str__(self) -> str:
        names = {"tp": "tp", "pp": "pp", "vpp": "vpp", "ep": "ep"}
        parts = [str(self.world)]
        parts += [
            f"{name}{getattr(self, key)}" for key, name in names.items() if getattr(self, key) > 1
        ]
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"{self.planner}{self.cp or ''}"] if self.planner != "balanced" else []
        parts += [f"bucket{self.bucket}"] if self.bucket else []
        parts += [self.recompute.granularity] if self.recompute.granularity else []
        return "-".join(parts)


def batches(lengths: list[list[int]] = LENGTHS) -> list[list[list[int]]]:
    generator = np.random.default_rng(0)
    return [[generator.integers(0, 61, n).tolist() for n in batch] for batch in lengths]


def jagged(
    batch: list[list[int]], routes: list[np.ndarray] | None = None
) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(ids) for ids in batch]
    made = {"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}
    if routes is not None:
        experts = [torch.from_numpy(one) for one in routes]
        offsets = torch.tensor([0, *np.cumsum([len(one) for one in experts])])
        made["routed_experts"] = torch.nested.nested_tensor_from_jagged(torch.cat(experts), offsets)
    return made


Routes = list[list[np.ndarray]]


def train(
    layout: Layout,
    config: ModelConfig,
    lengths: list[list[int]] = LENGTHS,
    routes: Routes | None = None,
) -> dict[str, Any]:
    """Trains three steps on this rank's layout; numbers are whole, as on one process.

    ``routes`` are experts to replay, by batch and sample.
    """
    context = setup_parallel(layout.sizes)
    try:
        model = build_model(config, context, seed=1, recompute=layout.recompute)
        chunks = model_chunks(model)
        for chunk in chunks:
            install_cp_hooks(chunk)
        start = full_model_state(model, context)
        ddp = wrap_chunks(chunks, context)
        settings = OptimizerSettings(**SETTINGS)
        optimizer = build_optimizer(ddp, context, settings, clip_grad=CLIP)
        engine = DynamicCPEngine(
            context,
            PlanSettings.of_run(
                context.sizes,
                max_seqlen_per_dp_cp_rank=layout.cap,
                planner=layout.planner,
                context_parallel_size=layout.cp,
                padding=PackPadding(pad_to_length_bucket=layout.bucket),
            ),
        )

        def step(micro_batch):
            hidden, weight = hidden_states(chunks[-1], micro_batch)
            loss = linear_cross_entropy(
                hidden,
                weight,
                micro_batch.labels,
                tp_group=context.pg_collection.tp if layout.tp > 1 else None,
                vocab_size=config.vocab_size,
            )
            return loss, micro_batch.num_tokens

        found: dict[str, Any] = {
            "losses": [],
            "mtp_losses": [],
            "norms": [],
            "grads": [],
            "evals": [],
            "packs": [],
            "num_steps": [],
            "router_losses": [],
        }
        cp_sizes = set()
        for index, batch in enumerate(batches(lengths)):
            planned = engine.prepare(
                jagged(batch, None if routes is None else routes[index]),
                vocab_size=config.vocab_size,
                mtp_depths=config.mtp_num_layers,
                routes=RouteShape.of(config),
            )
            cp_sizes |= set(planned.plan.cp_sizes())
            found["num_steps"].append(len(planned.plan.steps))
            found["packs"].append(
                [group.sample_ids for one in planned.plan.steps for group in one.groups]
            )
            found["evals"].append(float(engine.eval_step(planned, step, model=model).loss))
            result = engine.train_step(ddp, planned, step, force_all_reduce=True)
            found["losses"].append(float(result.loss))
            found["mtp_losses"].append([float(loss) for loss in result.mtp_losses.values()])
            found["router_losses"].append(
                {name: float(loss) for name, loss in result.router_losses.items()}
            )
            mine = {name: p.main_grad for name, p in model.named_parameters()}
            found["grads"].append(numpy(gather_whole(mine, model, context)))
            optimizer.step()
            found["norms"].append(optimizer.grad_norm)
        end = full_model_state(model, context)
    finally:
        context.destroy()
    found |= {"cp_sizes": sorted(cp_sizes), "start": numpy(start), "weights": numpy(end)}
    return found


def numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def close(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    """Equal to 1e-5, relative to the largest value of the tensor."""
    scale = max(float(np.abs(wanted).max()), 1e-6)
    difference = float(np.abs(found - wanted).max()) / scale
    assert difference < 1e-5, f"{name}: off by {difference:.2e} of {scale:.2e}"


def check(
    layout: Layout,
    config: ModelConfig,
    *,
    lengths: list[list[int]] = LENGTHS,
    routes: Routes | None = None,
    timeout: float = 120,
) -> dict[str, Any]:
    """The layout's numbers are those of the plain reference, from the same initial weights."""
    (single,) = run_distributed(start_of, 1, config)
    results = run_distributed(train, layout.world, layout, config, lengths, routes, timeout=timeout)
    found = results[0]
    assert set(found["start"]) == set(single)
    for name, value in single.items():
        np.testing.assert_array_equal(found["start"][name], value, err_msg=name)
    wanted = reference.train(
        single,
        config,
        batches(lengths),
        clip=CLIP,
        packs=found["packs"],
        routes=routes,
        **SETTINGS,
    )
    for key in ("losses", "mtp_losses"):
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-5)
    np.testing.assert_allclose(found["evals"], wanted["losses"], rtol=1e-5)
    for step, (mine, theirs) in enumerate(zip(found["grads"], wanted["grads"], strict=True)):
        assert set(mine) == set(theirs)
        for name in theirs:
            close(mine[name], theirs[name], f"gradient of {name} at step {step}")
    np.testing.assert_allclose(found["norms"], wanted["norms"], rtol=1e-5)
    for name, value in wanted["weights"].items():
        close(found["weights"][name], value, f"{name} after three steps")
    for other in results[1:]:
        assert other["mtp_losses"] == found["mtp_losses"]
        assert other["losses"] == pytest.approx(found["losses"], rel=1e-6)
        assert other["norms"] == pytest.approx(found["norms"], rel=1e-6)
    return found


def start_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """The initial weights of one process."""
    context = setup_parallel(ParallelSizes(world_size=dist.get_world_size()))
    try:
        return numpy(full_model_state(build_model(config, context, seed=1), context))
    finally:
        context.destroy()
