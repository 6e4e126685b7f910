"""Routes that a first pass recorded are used again in training, in any layout.

A replay that does nothing makes the perturbed model choose anew, and fails here.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from parity import (
    BIASED,
    GATHERED,
    MOE,
    Layout,
    Run,
    batches,
    deep,
    jagged,
    name_of,
    replaying,
    start_of,
)

from distributed import run_distributed
from lightning_dcp.engine import DynamicCPEngine
from lightning_dcp.engine.checkpoint.whole import load_full_model_state
from lightning_dcp.engine.collect import collect_outputs
from lightning_dcp.engine.micro_batches import RecordedRoutes
from lightning_dcp.model import (
    ModelConfig,
    Recompute,
    check_routers,
    gather_recorded,
    hidden_states,
)
from lightning_dcp.packing import RouteShape

FULL = Recompute(granularity="full")


class Recording(DynamicCPEngine):
    """Lets routers record in training too."""

    seen: RecordedRoutes

    def micro_batches(self, planned, recorded=None):
        return super().micro_batches(planned, self.seen if recorded is None else recorded)


class Replay(Run):
    """A model with weights that the test gives, and the experts that it used."""

    def __init__(self, layout: Layout, config: ModelConfig) -> None:
        super().__init__(layout, config, engine=Recording)
        self.shape = RouteShape.of(config)
        check_routers(self.chunks, self.shape, self.context.sizes)

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

    def step(self, routes: list[np.ndarray] | None = None) -> dict[str, Any]:
        """Loss, gradients and the experts that the last forward pass of every layer used.

        Under full recomputation that is the one in the backward pass.
        """
        seen = self.engine.seen = []

        def step(micro_batch):
            loss = self.loss(micro_batch)
            if self.layout.recompute.granularity == "full":
                # Only what the recomputed layers use is left to be seen.
                micro_batch.packed_seq_params.routes.recorded.clear()
            return loss

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
        return {
            "loss": float(result.loss),
            "grads": self.grads(),
            "experts": [one.numpy() for one in experts.unbind()],
        }


def record_and_replay(layout, config, weights, perturbed, routes):
    run = Replay(layout, config)
    try:
        run.load(weights)
        recorded = run.record()
        found = {"recorded": recorded, "live": run.step()}
        # The step before has moved the experts' biases.
        run.load(weights)
        found["same"] = run.step(recorded)
        run.load(perturbed)
        found["again"] = run.record()
        found["replayed"] = run.record(routes or recorded)
        found["trained"] = run.step(routes or recorded)
        found["drifted"] = run.step()
    finally:
        run.close()
    return found


@functools.cache
def perturbed(config: ModelConfig) -> dict[str, np.ndarray]:
    """Weights that choose other experts than the initial ones."""
    generator = np.random.default_rng(3)
    return {
        name: (value + 0.1 * generator.standard_normal(value.shape)).astype(value.dtype)
        for name, value in start_of(config).items()
    }


def replay(layout: Layout, config: ModelConfig, routes: list[np.ndarray] | None = None):
    config = replaying(config)
    weights = start_of(config), perturbed(config)
    return run_distributed(record_and_replay, layout.world, layout, config, *weights, routes)


@functools.cache
def on_one_process(config: ModelConfig) -> dict[str, Any]:
    return replay(Layout(1, 96), config)[0]


def as_sets(routes: list[np.ndarray]) -> np.ndarray:
    """Of each token and layer the experts, ascending: their order means nothing."""
    return np.sort(np.concatenate(routes), -1)


LAYOUTS = [
    (Layout(1, 96), MOE),
    (Layout(2, 48, ep=2), MOE),
    (Layout(4, 24, ep=2), GATHERED),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2), MOE),
    (Layout(4, 48, ep=4, planner="static", cp=2), MOE),
    (Layout(4, 24, ep=2, recompute=FULL), BIASED),
    (Layout(4, 48, tp=2, sequence_parallel=True, ep=2, recompute=FULL), GATHERED),
    (Layout(4, 48, pp=2, ep=2, recompute=FULL), MOE),
    (Layout(4, 48, pp=2, vpp=2, ep=2), deep(MOE)),
]


@pytest.mark.parametrize(("layout", "config"), LAYOUTS, ids=name_of)
def test_recorded_routes_are_replayed_exactly_under_other_weights(layout, config):
    for rank in replay(layout, config):
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


@pytest.mark.parametrize(("layout", "config"), [*LAYOUTS[2:4], LAYOUTS[-2]], ids=name_of)
def test_routes_of_one_layout_are_replayed_on_another(layout, config):
    single = on_one_process(MOE)
    found = replay(layout, config, single["recorded"])[0]
    np.testing.assert_array_equal(as_sets(found["replayed"]), as_sets(single["recorded"]))
    np.testing.assert_array_equal(as_sets(found["trained"]["experts"]), as_sets(single["recorded"]))
    assert found["trained"]["loss"] == pytest.approx(single["trained"]["loss"], rel=1e-5)
    assert found["drifted"]["loss"] == pytest.approx(single["drifted"]["loss"], rel=1e-5)
    # Any layout chooses the same to begin with.
    np.testing.assert_array_equal(as_sets(found["recorded"]), as_sets(single["recorded"]))
