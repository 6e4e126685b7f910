"""Routes from a first pass or from the data follow their tokens into training, in any layout.

What each fault would do here: rows shifted by the zigzag, a sequence-parallel slice or padding make
parity fail with random routes; a replay that does nothing makes the perturbed model choose anew.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from layouts import (
    BIASED,
    CLIP,
    GATHERED,
    MOE,
    SETTINGS,
    Layout,
    batches,
    check,
    jagged,
    numpy,
    start_of,
)

from distributed import run_distributed
from lightning_dcp.engine import (
    DynamicCPEngine,
    OptimizerSettings,
    PlanSettings,
    build_optimizer,
    wrap_chunks,
)
from lightning_dcp.engine.checkpoint import gather_whole, load_full_model_state
from lightning_dcp.engine.collect import collect_outputs
from lightning_dcp.engine.micro_batches import RecordedRoutes
from lightning_dcp.loss import linear_cross_entropy
from lightning_dcp.model import (
    ModelConfig,
    Recompute,
    build_model,
    check_routers,
    gather_recorded,
    hidden_states,
    model_chunks,
)
from lightning_dcp.packing import RouteShape
from lightning_dcp.parallel import install_cp_hooks, setup_parallel

FULL = Recompute(granularity="full")
DEEP = replace(MOE, num_layers=4)
NAMES = {MOE: "moe", DEEP: "deep", GATHERED: "allgather", BIASED: "biased"}


def named(value: Layout | ModelConfig) -> str:
    return str(value) if isinstance(value, Layout) else NAMES[value]


def replaying(config: ModelConfig) -> ModelConfig:
    return replace(config, moe=replace(config.moe, router_replay=True))


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


GIVEN = [
    (Layout(1, 96), MOE),
    (Layout(2, 48, ep=2), MOE),
    (Layout(4, 24, ep=2), GATHERED),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2), MOE),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2), GATHERED),
    (Layout(4, 48, ep=4, planner="static", cp=2), BIASED),
    (Layout(4, 24, ep=2, recompute=FULL), MOE),
    (Layout(4, 24, ep=2, recompute=Recompute(granularity="selective", modules=("moe",))), BIASED),
    (Layout(4, 48, pp=2, ep=2, recompute=FULL), MOE),
    (Layout(8, 48, pp=2, tp=2, sequence_parallel=True), MOE),
    (Layout(4, 48, pp=2, vpp=2, ep=2), DEEP),
]


@pytest.mark.parametrize(("layout", "config"), GIVEN, ids=named)
def test_training_on_given_routes_equals_the_plain_reference(layout, config):
    check(layout, replaying(config), routes=random_routes(config))


class Recording(DynamicCPEngine):
    """Lets routers record in training too."""

    seen: RecordedRoutes

    def micro_batches(self, planned, recorded=None):
        return super().micro_batches(planned, self.seen if recorded is None else recorded)


class Run:
    """A model with weights that the test gives, in one layout, on this rank."""

    def __init__(self, layout: Layout, config: ModelConfig) -> None:
        self.layout, self.config = layout, config
        self.shape = RouteShape.of(config)
        self.context = setup_parallel(layout.sizes)
        self.model = build_model(config, self.context, seed=1, recompute=layout.recompute)
        self.chunks = model_chunks(self.model)
        for chunk in self.chunks:
            install_cp_hooks(chunk)
        check_routers(self.chunks, self.shape, self.context.sizes)
        self.ddp = wrap_chunks(self.chunks, self.context)
        settings = OptimizerSettings(**SETTINGS)
        build_optimizer(self.ddp, self.context, settings, clip_grad=CLIP)
        self.engine = Recording(
            self.context,
            PlanSettings.of_run(
                self.context.sizes,
                max_seqlen_per_dp_cp_rank=layout.cap,
                planner=layout.planner,
                context_parallel_size=layout.cp,
            ),
        )

    def load(self, weights: dict[str, np.ndarray]) -> None:
        state = {name: torch.tensor(value) for name, value in weights.items()}
        load_full_model_state(self.model, state, self.context)

    def prepare(self, routes: list[np.ndarray] | None = None) -> Any:
        return self.engine.prepare(jagged(batches()[0], routes), routes=self.shape)

    def record(self, routes: list[np.ndarray] | None = None) -> list[np.ndarray]:
        """Experts that a pass without gradients uses, by sample."""

        def rows(micro_batch):
            hidden_states(self.chunks[-1], micro_batch)
            return {"ids": micro_batch.labels}

        outputs = self.engine.predict_step(
            self.prepare(routes), rows, everywhere=True, record_routes=True, model=self.model
        )
        assert outputs["routed_experts"].dtype == torch.uint8
        return [one.numpy() for one in outputs["routed_experts"].unbind()]

    def train(self, routes: list[np.ndarray] | None = None) -> dict[str, Any]:
        """Loss, gradients and the experts that the last forward pass of every layer used.

        Under full recomputation that is the one in the backward pass.
        """
        seen = self.engine.seen = []

        def step(micro_batch):
            hidden, weight = hidden_states(self.chunks[-1], micro_batch)
            loss = linear_cross_entropy(
                hidden,
                weight,
                micro_batch.labels,
                tp_group=self.context.pg_collection.tp if self.layout.tp > 1 else None,
                vocab_size=self.config.vocab_size,
            )
            if self.layout.recompute.granularity == "full":
                # Only what the recomputed layers use is left to be seen.
                micro_batch.packed_seq_params.routes.recorded.clear()
            return loss, micro_batch.num_tokens

        planned = self.prepare(routes)
        result = self.engine.train_step(self.ddp, planned, step, force_all_reduce=True)
        rows = [
            {"experts": gather_recorded(bound, num_rows, self.shape, self.context)}
            for bound, num_rows in seen
        ]
        collected = collect_outputs(
            rows, planned.plan, self.context, everywhere=True, of_own_token=["experts"]
        )
        experts = self.shape.from_bytes(collected["experts"])
        grads = {name: p.main_grad for name, p in self.model.named_parameters()}
        return {
            "loss": float(result.loss),
            "grads": numpy(gather_whole(grads, self.model, self.context)),
            "experts": [one.numpy() for one in experts.unbind()],
        }


def record_and_replay(layout, config, weights, perturbed, routes):
    run = Run(layout, config)
    try:
        run.load(weights)
        recorded = run.record()
        found = {"recorded": recorded, "live": run.train()}
        # The step before has moved the experts' biases.
        run.load(weights)
        found["same"] = run.train(recorded)
        run.load(perturbed)
        found["again"] = run.record()
        found["replayed"] = run.record(routes or recorded)
        found["trained"] = run.train(routes or recorded)
        found["drifted"] = run.train()
    finally:
        run.context.destroy()
    return found


@functools.cache
def weights_of(config: ModelConfig) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Initial weights, and others that choose other experts."""
    (start,) = run_distributed(start_of, 1, config)
    generator = np.random.default_rng(3)
    other = {
        name: (value + 0.1 * generator.standard_normal(value.shape)).astype(value.dtype)
        for name, value in start.items()
    }
    return start, other


def run(layout: Layout, config: ModelConfig, routes: list[np.ndarray] | None = None):
    config = replaying(config)
    start, other = weights_of(config)
    return run_distributed(record_and_replay, layout.world, layout, config, start, other, routes)


@functools.cache
def on_one_process(config: ModelConfig) -> dict[str, Any]:
    return run(Layout(1, 96), config)[0]


def as_sets(routes: list[np.ndarray]) -> np.ndarray:
    """Of each token and layer the experts, ascending: their order means nothing."""
    return np.sort(np.concatenate(routes), -1)


REPLAYED = [
    (Layout(1, 96), MOE),
    (Layout(2, 48, ep=2), MOE),
    (Layout(4, 24, ep=2), GATHERED),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2), MOE),
    (Layout(4, 48, ep=4, planner="static", cp=2), MOE),
    (Layout(4, 24, ep=2, recompute=FULL), BIASED),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2, recompute=FULL), GATHERED),
    (Layout(4, 48, pp=2, ep=2, recompute=FULL), MOE),
    (Layout(4, 48, pp=2, vpp=2, ep=2), DEEP),
]


@pytest.mark.parametrize(("layout", "config"), REPLAYED, ids=named)
def test_recorded_routes_are_replayed_exactly_under_other_weights(layout, config):
    for rank in run(layout, config):
        recorded = as_sets(rank["recorded"])
        assert [len(one) for one in rank["recorded"]] == [len(ids) for ids in batches()[0]]
        np.testing.assert_array_equal(as_sets(rank["replayed"]), recorded)
        for name in ("live", "same", "trained"):
            np.testing.assert_array_equal(as_sets(rank[name]["experts"]), recorded)
        # Without replay the perturbed model chooses anew, so that the above can fail.
        for drifted in (rank["again"], rank["drifted"]["experts"]):
            assert (as_sets(drifted) != recorded).any(-1).mean() > 0.1
        assert rank["trained"]["loss"] != rank["drifted"]["loss"]
        # What the router would choose anyway changes nothing, to the last bit.
        assert rank["same"]["loss"] == rank["live"]["loss"]
        for name, gradient in rank["live"]["grads"].items():
            np.testing.assert_array_equal(rank["same"]["grads"][name], gradient, err_msg=name)


@pytest.mark.parametrize(("layout", "config"), [*REPLAYED[2:4], REPLAYED[-2]], ids=named)
def test_routes_of_one_layout_are_replayed_on_another(layout, config):
    single = on_one_process(MOE)
    found = run(layout, config, single["recorded"])[0]
    np.testing.assert_array_equal(as_sets(found["replayed"]), as_sets(single["recorded"]))
    np.testing.assert_array_equal(as_sets(found["trained"]["experts"]), as_sets(single["recorded"]))
    assert found["trained"]["loss"] == pytest.approx(single["trained"]["loss"], rel=1e-5)
    assert found["drifted"]["loss"] == pytest.approx(single["drifted"]["loss"], rel=1e-5)
    # Any layout chooses the same to begin with.
    np.testing.assert_array_equal(as_sets(found["recorded"]), as_sets(single["recorded"]))
