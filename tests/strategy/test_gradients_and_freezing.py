"""What a user hangs into a training step: own losses, parameters, gradients, frozen weights."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch
from user_steps import Edits, Freezes, Scaled, Watch, build, plain

import trainers
from distributed import run_distributed
from lightning_dcp import DynamicCPModule

# -- a loss of one's own in training_step ---------------------------------------------------------


class Doubled(DynamicCPModule):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)


class OwnGraph(DynamicCPModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss + next(self.model.parameters()).square().sum()}


class WithoutEngine(DynamicCPModule):
    def training_step(self, batch, batch_idx):
        return torch.zeros(())


class Nothing(DynamicCPModule):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


class OwnBackward(DynamicCPModule):
    def backward(self, loss):
        loss.backward()


class AsDict(DynamicCPModule):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "more": 1}


class AddsLate(DynamicCPModule):
    def on_train_start(self):
        self.late = torch.nn.Parameter(torch.ones(2))


def message_of(cls):
    try:
        trainers.trainer(48).fit(build(cls), trainers.batches(1))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return str(error)
    return "trained"


STEPS = {
    Doubled: r"training_step returned [\d.]+, and the gradients are those of",
    OwnGraph: "returned a loss with a graph",
    WithoutEngine: r"did not call super\(\)\.training_step",
    Nothing: "returned no loss",
    OwnBackward: "OwnBackward.backward would never be called",
    AddsLate: r"late \(1 in all\) would not be trained",
    AsDict: "trained",
}


def messages():
    return [message_of(cls) for cls in STEPS]


@functools.cache
def messages_on_two():
    return run_distributed(messages, 2)


@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(
            cls,
            marks=pytest.mark.lightning(
                "hook",
                "LightningModule.backward" if cls is OwnBackward else "training_step",
                "works" if cls is AsDict else "refused",
            ),
        )
        for cls in STEPS
    ],
)
def test_a_loss_whose_gradients_are_not_made_is_refused(cls):
    for found in messages_on_two():
        message = found[list(STEPS).index(cls)]
        assert re.search(STEPS[cls], message), message


# -- parameters, gradients and frozen weights, against plain torch --------------------------------

LAYOUTS = {
    "2": (2, {}),
    "2-unsharded-overlap": (2, {"use_distributed_optimizer": False, "overlap_grad_reduce": True}),
    "2-overlap": (2, {"overlap_grad_reduce": True}),
    "4-tp2-pp2-sp": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
}


def fit(cls, callbacks, strategy):
    watch = Watch()
    trainer = trainers.trainer(96, strategy, callbacks=[watch, *callbacks])
    trainer.fit(build(cls), trainers.batches(3))
    return {"start": watch.start, "end": watch.end, "losses": watch.losses}


def fits(strategy):
    edits = Edits()
    return {
        "scaled": fit(Scaled, [], strategy),
        "edits": fit(DynamicCPModule, [edits], strategy),
        "freezes": fit(DynamicCPModule, [Freezes()], strategy),
        "seen": edits.seen,
    }


@functools.cache
def fits_of(layout):
    world, strategy = LAYOUTS[layout]
    return run_distributed(fits, world, strategy)


def assert_equal_weights(found, wanted):
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        scale = np.abs(weight).max()
        np.testing.assert_allclose(found[name], weight, atol=1e-5 * scale, rtol=0, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "kind",
    [
        "scaled",
        pytest.param(
            "edits", marks=pytest.mark.lightning("hook", "on_before_optimizer_step", "works")
        ),
        pytest.param(
            "freezes", marks=pytest.mark.lightning("hook", "on_train_batch_start", "works")
        ),
    ],
)
def test_what_hangs_in_a_step_gives_the_numbers_of_plain_torch(kind, layout):
    first = fits_of(layout)[0]
    found = first[kind]
    wanted = plain(found["start"], **{kind: True})
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-5)
    assert_equal_weights(found["end"], wanted["end"])
    if kind == "scaled":
        assert abs(found["end"]["scale"][0] - 1.3) > 1e-4


@pytest.mark.parametrize("layout", ["2", "2-overlap", "2-unsharded-overlap"])
def test_gradients_are_whole_where_hooks_look(layout):
    results = fits_of(layout)
    wanted = plain(results[0]["edits"]["start"], edits=True)["norms"]
    for result in results:
        for seen, norms in zip(result["seen"], wanted, strict=True):
            for name, norm in norms.items():
                assert seen[f"grad_2.0_norm/{name}"] == pytest.approx(norm, rel=1e-4, abs=1e-5)
