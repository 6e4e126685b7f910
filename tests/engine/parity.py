"""The parity harness: a training in any layout of ranks, and what its numbers must be.

A :class:`Run` trains on one rank; :func:`check` runs a layout on all of its ranks and compares with
the plain reference, from the weights that one process starts with. Start weights and references are
made once for all layouts that share them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
from lightning_dcp.engine.checkpoint.whole import gather_whole
from lightning_dcp.loss import linear_cross_entropy
from lightning_dcp.model import (
    ModelConfig,
    MoEConfig,
    Recompute,
    build_model,
    hidden_states,
    model_chunks,
)
from lightning_dcp.packing import RouteShape
from lightning_dcp.parallel import (
    ParallelContext,
    ParallelSizes,
    install_cp_hooks,
    setup_parallel,
)

DENSE = ModelConfig(
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
TIED = replace(DENSE, tie_word_embeddings=True, qk_layernorm=False)
MOE = replace(
    DENSE,
    moe=MoEConfig(
        num_experts=8,
        topk=2,
        ffn_hidden_size=16,
        shared_expert_ffn_hidden_size=24,
        aux_loss_coeff=0.05,
        seq_aux_loss_coeff=0.1,
        z_loss_coeff=0.01,
    ),
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


def deep(config: ModelConfig) -> ModelConfig:
    """With a layer for each of four stages."""
    return replace(config, num_layers=4)


def replaying(config: ModelConfig) -> ModelConfig:
    """With routers that take the routes that they are given."""
    return replace(config, moe=replace(config.moe, router_replay=True))


Lengths = tuple[tuple[int, ...], ...]
# Long enough for several CP sizes at a cap of 24, and odd enough for padding everywhere.
LENGTHS: Lengths = (
    (70, 5, 9, 33, 2, 17, 12, 24, 1, 8),
    (3, 48, 7, 7, 21, 95, 13, 2),
    (11, 6, 30, 30, 4, 60, 19, 5, 10),
)
# Adam divides by the root of the second moment: without an epsilon well above it, the rounding of a
# gradient that is nearly zero would become a difference of a whole step.
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "adam_eps": 1e-5}
CLIP = 0.5


@dataclass(frozen=True)
class Layout:
    """A way to run one training on some ranks; ``cp`` is the static planner's."""

    world: int
    cap: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    planner: str | Callable[..., Any] = "balanced"
    cp: int | None = None
    sharded: bool = True
    overlap: bool = False
    bucket: int | None = None
    length: int | None = None
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
        parts = [str(self.world)]
        parts += [
            f"{name}{getattr(self, name)}"
            for name in ("tp", "pp", "vpp", "ep")
            if getattr(self, name) > 1
        ]
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"{self.planner}{self.cp or ''}"] if self.planner != "balanced" else []
        parts += [] if self.sharded else ["unsharded"]
        parts += ["overlap"] if self.overlap else []
        parts += [f"bucket{self.bucket}"] if self.bucket else []
        parts += [f"length{self.length}"] if self.length else []
        parts += [self.recompute.granularity] if self.recompute.granularity else []
        parts += self.recompute.modules if self.recompute.granularity == "selective" else ()
        return "-".join(parts)


def name_of(value: Any) -> str | None:
    """A test's name for a layout or a config."""
    if isinstance(value, Layout):
        return str(value)
    if not isinstance(value, ModelConfig):
        return None
    kinds = {None: "dense", MOE.moe: "moe", BIASED.moe: "biased", GATHERED.moe: "allgather"}
    parts = [kinds[value.moe]]
    parts += ["tied"] if value.tie_word_embeddings else []
    parts += [f"mtp{value.mtp_num_layers}"] if value.mtp_num_layers else []
    return "-".join(parts)


def batches(lengths: Lengths = LENGTHS) -> list[list[list[int]]]:
    generator = np.random.default_rng(0)
    return [[generator.integers(0, 61, n).tolist() for n in batch] for batch in lengths]


def random_routes(config: ModelConfig) -> list[list[np.ndarray]]:
    """Experts at random, in no order; every other sample lacks those of its last token."""
    generator = np.random.default_rng(7)
    moe = config.moe
    return [
        [
            generator.random((len(ids) - sample % 2, config.num_layers, moe.num_experts))
            .argsort(-1)[..., : moe.topk]
            .astype(np.uint8)
            for sample, ids in enumerate(batch)
        ]
        for batch in batches()
    ]


def routes_of(config: ModelConfig) -> list[list[np.ndarray]] | None:
    """By batch and sample, the routes that training replays; None where routers choose."""
    return random_routes(config) if config.moe and config.moe.router_replay else None


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


def numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


class Run:
    """A model, its optimizer and its engine in one layout, on this rank."""

    def __init__(
        self,
        layout: Layout,
        config: ModelConfig,
        *,
        context: ParallelContext | None = None,
        engine: type[DynamicCPEngine] = DynamicCPEngine,
    ) -> None:
        """Sets up everything; ``context`` is an earlier run's, to be used again."""
        self.layout, self.config = layout, config
        self.context = setup_parallel(layout.sizes, current=context)
        self.model = build_model(config, self.context, seed=1, recompute=layout.recompute)
        self.chunks = model_chunks(self.model)
        for chunk in self.chunks:
            install_cp_hooks(chunk)
        self.start = self.weights()
        self.ddp = wrap_chunks(
            self.chunks,
            self.context,
            use_distributed_optimizer=layout.sharded,
            overlap_grad_reduce=layout.overlap,
        )
        settings = OptimizerSettings(**SETTINGS)
        self.optimizer = build_optimizer(self.ddp, self.context, settings, clip_grad=CLIP)
        padding = PackPadding(pad_to_length_bucket=layout.bucket, pad_to_length=layout.length)
        self.engine = engine(
            self.context,
            PlanSettings.of_run(
                self.context.sizes,
                max_seqlen_per_dp_cp_rank=layout.cap,
                planner=layout.planner,
                context_parallel_size=layout.cp,
                padding=padding,
            ),
        )

    def close(self) -> None:
        self.engine.close()
        self.context.destroy()

    def weights(self) -> dict[str, np.ndarray]:
        """Whole weights, as on one process."""
        return numpy(full_model_state(self.model, self.context))

    def grads(self) -> dict[str, np.ndarray]:
        """Whole gradients, as on one process."""
        mine = {name: p.main_grad for name, p in self.model.named_parameters()}
        return numpy(gather_whole(mine, self.model, self.context))

    def loss(self, micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy of the next token: its sum, and the number of targets."""
        hidden, weight = hidden_states(self.chunks[-1], micro_batch)
        loss = linear_cross_entropy(
            hidden,
            weight,
            micro_batch.labels,
            tp_group=self.context.pg_collection.tp if self.layout.tp > 1 else None,
            vocab_size=self.config.vocab_size,
        )
        return loss, micro_batch.num_tokens

    def train(
        self,
        batches: Sequence[dict[str, torch.Tensor]],
        step: Callable[..., Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """One evaluation and one optimizer step a batch; ``options`` go to the engine's prepare.

        Returns:
            What every rank must agree on; on rank 0 all of the numbers, whole.
        """
        step = step or self.loss
        found: dict[str, Any] = {
            key: [] for key in ("losses", "mtp_losses", "router_losses", "counts", "norms")
        }
        whole: dict[str, Any] = {key: [] for key in ("evals", "grads", "packs", "num_steps")}
        cp_sizes: set[int] = set()
        for batch in batches:
            planned = self.engine.prepare(
                batch,
                vocab_size=self.config.vocab_size,
                mtp_depths=self.config.mtp_num_layers,
                routes=RouteShape.of(self.config),
                **options,
            )
            cp_sizes |= set(planned.plan.cp_sizes())
            whole["num_steps"].append(len(planned.plan.steps))
            groups = [group for one in planned.plan.steps for group in one.groups]
            whole["packs"].append(tuple(group.sample_ids for group in groups))
            evaluated = self.engine.eval_step(planned, step, model=self.model)
            whole["evals"].append(float(evaluated.loss))
            result = self.engine.train_step(self.ddp, planned, step, force_all_reduce=True)
            found["losses"].append(float(result.loss))
            found["counts"].append(int(result.num_tokens))
            for key in ("mtp_losses", "router_losses"):
                losses = getattr(result, key)
                found[key].append({name: float(loss) for name, loss in losses.items()})
            whole["grads"].append(self.grads())
            self.optimizer.step()
            found["norms"].append(self.optimizer.grad_norm)
        whole |= {"cp_sizes": sorted(cp_sizes), "start": self.start, "weights": self.weights()}
        return found | (whole if dist.get_rank() == 0 else {})


def train(layout: Layout, config: ModelConfig, lengths: Lengths = LENGTHS) -> dict[str, Any]:
    """Trains a step a batch on this rank's part of the layout."""
    routes = routes_of(config) or [None] * len(lengths)
    run = Run(layout, config)
    try:
        made = zip(batches(lengths), routes, strict=True)
        return run.train([jagged(batch, experts) for batch, experts in made])
    finally:
        run.close()


def _start(config: ModelConfig) -> dict[str, np.ndarray]:
    context = setup_parallel(ParallelSizes(world_size=dist.get_world_size()))
    try:
        return numpy(full_model_state(build_model(config, context, seed=1), context))
    finally:
        context.destroy()


@functools.cache
def start_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """The initial weights of one process."""
    return run_distributed(_start, 1, config)[0]


@functools.cache
def expected(
    config: ModelConfig, lengths: Lengths = LENGTHS, packs: tuple[Any, ...] | None = None
) -> dict[str, Any]:
    """The plain reference's numbers; ``packs`` are what is packed together, by batch."""
    return reference.train(
        start_of(config),
        config,
        batches(lengths),
        clip=CLIP,
        packs=packs,
        routes=routes_of(config),
        **SETTINGS,
    )


def check(layout: Layout, config: ModelConfig, lengths: Lengths = LENGTHS) -> dict[str, Any]:
    """The layout's numbers are those of the plain reference; returns rank 0's."""
    ranks = run_distributed(train, layout.world, layout, config, lengths)
    # Of all losses only this one depends on what is packed together.
    of_packs = config.moe is not None and config.moe.aux_loss_coeff
    packs = tuple(ranks[0]["packs"]) if of_packs else None
    compare(ranks, start_of(config), expected(config, lengths, packs))
    return ranks[0]


def compare(ranks: list[dict[str, Any]], start: dict[str, Any], wanted: dict[str, Any]) -> None:
    """What :meth:`Run.train` found on every rank, against the reference."""
    found = ranks[0]
    assert set(found["start"]) == set(start)
    for name, value in start.items():
        np.testing.assert_array_equal(found["start"][name], value, err_msg=name)
    for key in ("losses", "norms"):
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-5, err_msg=key)
    np.testing.assert_allclose(found["evals"], wanted["losses"], rtol=1e-5)
    of_depths = [list(losses.values()) for losses in found["mtp_losses"]]
    np.testing.assert_allclose(of_depths, wanted["mtp_losses"], rtol=1e-5)
    for step, (mine, theirs) in enumerate(zip(found["grads"], wanted["grads"], strict=True)):
        assert set(mine) == set(theirs)
        for name in theirs:
            close(mine[name], theirs[name], f"gradient of {name} at step {step}")
    for name, value in wanted["weights"].items():
        close(found["weights"][name], value, f"{name} after {len(found['losses'])} steps")
    for other in ranks[1:]:
        assert other["mtp_losses"] == found["mtp_losses"]
        assert other["counts"] == found["counts"]
        assert other["losses"] == found["losses"]
        assert other["norms"] == pytest.approx(found["norms"], rel=1e-6)


def close(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    """Equal to 1e-5, relative to the largest value of the tensor."""
    scale = max(float(np.abs(wanted).max()), 1e-6)
    difference = float(np.abs(found - wanted).max()) / scale
    assert difference < 1e-5, f"{name}: off by {difference:.2e} of {scale:.2e}"
