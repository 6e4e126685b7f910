"""What a notebook has after a fit whose ranks were forked: the weights, whole, in every layout."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from test_experts_and_stages import CONFIG as EXPERTS

import reference
import trainers
from distributed import run_distributed

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
IDS = [[1, 2, 3, 4, 5], [7, 8]]


@contextmanager
def a_notebook() -> Iterator[None]:
    """A worker of the tests as a process that starts its ranks itself."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name)
    del os.environ["MASTER_ADDR"]
    with ExitStack() as stack:
        # A worker is a fork itself, which a notebook's process is not.
        stack.enter_context(patch.object(torch.cuda, "_is_in_bad_fork", lambda: False))
        # And the thread of the device that a worker's groups share would not be in its forks.
        gloo = torch._C._distributed_c10d.ProcessGroupGloo
        stack.enter_context(patch.object(dist.distributed_c10d, "ProcessGroupGloo", gloo))
        yield


def new_trainer(method: str, layout: dict[str, Any], **options: Any):
    # A port of each run's own: Lightning keeps one that is set.
    os.environ.pop("MASTER_PORT", None)
    strategy = {"start_method": method, **layout}
    return trainers.trainer(96, strategy, devices=2, max_epochs=3, **options)


@a_notebook()
def in_a_notebook(folder: str, layout: dict[str, Any], other: dict[str, Any], model):
    data = trainers.batches(2, 1)
    module = trainers.module(model=model)
    found: dict[str, Any] = {}

    def val_loss(layout: dict[str, Any]) -> float:
        trainer = new_trainer("fork", layout)
        return trainer.validate(module, data, verbose=False)[0]["val_loss"]

    checkpoint = ModelCheckpoint(dirpath=folder, filename="fit")
    options = {"enable_checkpointing": True, "callbacks": [checkpoint]}
    trainer = new_trainer("fork", layout, **options)
    trainer.fit(module, data)
    found["end"] = float(trainer.callback_metrics["val_loss"])
    found["after"] = val_loss(layout)
    found["elsewhere"] = val_loss(other)
    trainer.save_checkpoint(f"{folder}/saved")
    for name in ("fit.ckpt", "saved"):
        saved = torch.load(f"{folder}/{name}", weights_only=True)
        found[name] = {key: value.numpy() for key, value in saved["state_dict"].items()}
        found[f"step of {name}"] = saved["global_step"]
    found["state"] = {key: value.numpy() for key, value in module.state_dict().items()}
    ids = trainers.jagged(IDS)
    found["logits"] = [row.numpy() for row in module(ids["input_ids"]).unbind()]
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        np.testing.assert_equal(
            [value.numpy() for value in again.state_dict().values()], list(found["state"].values())
        )
    (predicted,) = new_trainer("fork", layout).predict(module, trainers.Batches([], [ids]))
    found["log_probs"] = [row.numpy() for row in predicted["log_probs"].unbind()]
    new_trainer("fork", other).fit(module, data)
    found["after a second fit"] = val_loss(layout)
    return found


@pytest.mark.parametrize(
    ("layout", "other", "model"),
    [
        ({}, TP2, trainers.CONFIG),
        (TP2, PP2, trainers.CONFIG),
        (PP2, {}, trainers.CONFIG),
        (EP2, PP2, EXPERTS),
    ],
    ids=["fork-2", "fork-tp2", "fork-pp2", "fork-ep2"],
)
def test_the_trained_weights_come_back_whole(tmp_path, layout, other, model):
    (found,) = run_distributed(
        in_a_notebook, 1, str(tmp_path), layout, other, model, init_process_group=False
    )
    for name in ("after", "elsewhere"):
        assert found[name] == pytest.approx(found["end"], rel=1e-5), name
    assert found["after a second fit"] < found["end"] - 0.01
    assert found["step of saved"] == found["step of fit.ckpt"] == 6
    assert set(found["state"]) == set(found["saved"]) == set(found["fit.ckpt"])
    for name, weight in found["fit.ckpt"].items():
        np.testing.assert_equal(found["saved"][name], weight, err_msg=name)
        np.testing.assert_equal(found["state"][name], weight, err_msg=name)
    if model.moe is not None:
        # The reference is of dense models.
        return
    state = {name.removeprefix("model."): torch.from_numpy(w) for name, w in found["state"].items()}
    for ids, logits, log_probs in zip(IDS, found["logits"], found["log_probs"], strict=True):
        wanted = reference.forward(state, model, torch.tensor(ids))
        np.testing.assert_allclose(logits, wanted.numpy(), rtol=1e-4, atol=1e-5)
        of_next = wanted.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        np.testing.assert_allclose(log_probs[1:], of_next.numpy(), rtol=1e-4, atol=1e-5)


@a_notebook()
def fit_by_spawning(folder: str):
    module = trainers.module()
    checkpoint = ModelCheckpoint(dirpath=folder, filename="fit")
    options = {"enable_checkpointing": True, "callbacks": [checkpoint]}
    trainer = new_trainer("spawn", PP2, **options)
    trainer.fit(module, trainers.batches(2))
    return {name: value.numpy() for name, value in module.state_dict().items()}


def test_spawned_ranks_bring_them_back_as_well(tmp_path):
    (found,) = run_distributed(fit_by_spawning, 1, str(tmp_path), init_process_group=False)
    wanted = torch.load(tmp_path / "fit.ckpt", weights_only=True)["state_dict"]
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        np.testing.assert_equal(found[name], weight.numpy(), err_msg=name)
