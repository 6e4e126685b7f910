"""Experts and pipelines through the Trainer: a run goes on in another layout of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import trainers
from distributed import run_distributed
from lightning_dcp import MoEConfig
from lightning_dcp.engine import full_model_state

CONFIG = replace(
    trainers.CONFIG,
    num_layers=4,
    tie_word_embeddings=True,
    moe=MoEConfig(
        num_experts=4,
        topk=2,
        ffn_hidden_size=16,
        score_function="sigmoid",
        expert_bias=True,
        seq_aux_loss_coeff=0.1,
        z_loss_coeff=0.01,
    ),
)
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def train(folder: str, resume: str | None, cap: int, strategy: dict[str, Any]):
    module = trainers.module(model=CONFIG)
    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_epochs=1, save_top_k=-1)
    trainer = trainers.trainer(
        cap, strategy, enable_checkpointing=True, callbacks=[checkpoint], max_epochs=2
    )
    losses, state = [], {}

    def keep(*args: Any) -> None:
        losses.append(float(module.last_step.loss))

    def keep_weights() -> None:
        whole = full_model_state(module, trainer.strategy.context)
        state.update({name: value.numpy() for name, value in whole.items()})

    module.on_train_batch_end, module.on_train_end = keep, keep_weights
    trainer.fit(module, trainers.batches(2), ckpt_path=resume)
    return {"losses": losses, "weights": state, "steps": trainer.global_step}


@pytest.mark.parametrize(
    ("world", "cap", "strategy"),
    [(1, 256, {}), (2, 96, PP2), (4, 48, VPP2 | EP2), (4, 48, TP2 | EP2)],
    ids=["1", "2-pp2", "4-pp2-vpp2-ep2", "4-tp2-sp-ep2"],
)
def test_a_run_resumes_with_other_experts_and_stages_on_each_rank(tmp_path, world, cap, strategy):
    first = run_distributed(train, 4, str(tmp_path / "a"), None, 48, PP2 | EP2)[0]
    middle = str(tmp_path / "a" / "step=2.ckpt")
    resumed = run_distributed(train, world, str(tmp_path / "b"), middle, cap, strategy)
    assert {result["steps"] for result in resumed} == {4}
    for result in resumed:
        np.testing.assert_allclose(result["losses"], first["losses"][2:], rtol=1e-5)
    assert set(resumed[0]["weights"]) == set(first["weights"])
    for name, weight in first["weights"].items():
        scale = max(float(np.abs(weight).max()), 1e-6)
        np.testing.assert_allclose(
            resumed[0]["weights"][name], weight, atol=1e-5 * scale, rtol=0, err_msg=name
        )


def validate_uneven(cap: int, strategy: dict[str, Any]) -> dict[str, Any]:
    module = trainers.module(model=CONFIG)
    trainer = trainers.trainer(cap, strategy)
    # 2 and 5 samples: fewer than ranks, and a number that they do not divide.
    made = [trainers.jagged(trainers.random_batch(trainers.LENGTHS[i], i)) for i in (3, 4)]
    (metrics,) = trainer.validate(module, trainers.Batches([], made), verbose=False)
    return metrics


@pytest.mark.parametrize(
    ("cap", "strategy"),
    [(24, {"expert_model_parallel_size": 4}), (48, PP2 | EP2), (48, VPP2)],
    ids=["4-ep4", "4-pp2-ep2", "4-pp2-vpp2"],
)
def test_uneven_batches_reach_every_rank_as_often(cap, strategy):
    (alone,) = run_distributed(validate_uneven, 1, 256, {})
    for metrics in run_distributed(validate_uneven, 4, cap, strategy):
        assert metrics["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-5)


def predict(cap: int, strategy: dict[str, Any]) -> list[Any]:
    module = trainers.module(model=CONFIG)
    trainer = trainers.trainer(cap, strategy)
    made = [trainers.jagged(trainers.random_batch(trainers.LENGTHS[i], i)) for i in (0, 3)]
    outputs = trainer.predict(module, trainers.Batches([], made))
    return [
        {name: [row.numpy() for row in rows.unbind()] for name, rows in one.items()}
        for one in outputs
    ]


@pytest.mark.parametrize(
    ("cap", "strategy"),
    [(24, {"expert_model_parallel_size": 4}), (48, VPP2), (96, VPP2 | TP2)],
    ids=["4-ep4", "4-pp2-vpp2", "4-pp2-vpp2-tp2-sp"],
)
def test_predictions_come_back_from_the_last_chunk_in_order(cap, strategy):
    (alone,) = run_distributed(predict, 1, 256, {})
    first, *others = run_distributed(predict, 4, cap, strategy)
    assert others == [[{}, {}]] * 3
    for found, wanted in zip(first, alone, strict=True):
        assert set(found) == set(wanted) == {"log_probs", "entropies"}
        for name, rows in wanted.items():
            for row, wanted_row in zip(found[name], rows, strict=True):
                np.testing.assert_allclose(row, wanted_row, rtol=1e-5, atol=1e-5)
