"""A critic through the Trainer: its head, its values in order, checkpoints, and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

import reference
import trainers
from distributed import run_distributed
from lightning_dcp import DPO, SFT, ModelConfig, ValueLoss
from lightning_dcp.model import build_gpt_model
from lightning_dcp.objectives import ValueOutputs
from lightning_dcp.parallel import ParallelSizes, setup_parallel

CRITIC = dataclasses.replace(trainers.CONFIG, head="value")
BATCHES = (0, 3)
TP2 = {"tensor_model_parallel_size": 2}


def tokens(index):
    return trainers.random_batch(trainers.LENGTHS[index], index)


def data():
    """Two batches with returns; every third token is no target."""
    made = []
    for index in BATCHES:
        batch = trainers.jagged(tokens(index))
        offsets = batch["input_ids"].offsets()
        positions = torch.arange(int(offsets[-1]))
        for key, values in (("returns", positions / 50), ("loss_mask", positions % 3 != 0)):
            batch[key] = torch.nested.nested_tensor_from_jagged(values, offsets)
        made.append(batch)
    return trainers.Batches(made, made)


def head():
    """The head's weight under tensor parallelism, its marks, and all its parameters' names."""
    world = dist.get_world_size()
    context = setup_parallel(ParallelSizes(world_size=world, tensor_model_parallel_size=world))
    try:
        model = build_gpt_model(CRITIC, context, seed=3)
    finally:
        context.destroy()
    weight = model.output_layer.weight
    marks = [hasattr(weight, mark) for mark in ("tensor_model_parallel", "sequence_parallel")]
    return (
        weight.detach().numpy(),
        marks,
        [name for name, _ in model.output_layer.named_parameters()],
    )


def test_the_head_is_one_weight_that_all_ranks_hold():
    ((weight, _, _),) = run_distributed(head, 1)
    assert weight.shape == (1, 32)
    assert 0.1 < weight.std() < 0.4
    for found, marks, names in run_distributed(head, 2):
        np.testing.assert_array_equal(found, weight)
        # Each rank has all rows, so its gradient is whole: one more sum would double it.
        assert marks == [False, False]
        assert names == ["weight"]


def values_of(outputs):
    """The values by batch and sample; None on ranks that get none."""
    if not outputs[0]:
        return None
    assert [set(one) for one in outputs] == [{"values"}] * len(BATCHES)
    return [[row.numpy() for row in one["values"].unbind()] for one in outputs]


def fit(folder):
    """Trains a critic and saves it; what was logged, and the values that it predicts then."""
    module = trainers.module(model=CRITIC)
    checkpoint = ModelCheckpoint(dirpath=folder, filename="last")
    trainer = trainers.trainer(24, enable_checkpointing=True, callbacks=[checkpoint])
    trainer.fit(module, data())
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    trainer.validate(module, data(), verbose=False)
    logged["val_loss"] = float(trainer.callback_metrics["val_loss"])
    return logged, values_of(trainer.predict(module, data()))


def load(path, cap, strategy):
    """The values of a saved critic, and the loss of one more step after resuming."""
    module = trainers.module(model=CRITIC, seed=9)
    trainer = trainers.trainer(cap, strategy)
    values = values_of(trainer.predict(module, data(), ckpt_path=path))
    more = trainers.trainer(cap, strategy, max_epochs=2)
    more.fit(module, data(), ckpt_path=path)
    return values, float(module.last_step.loss)


def expected(path):
    """Values, and their mean loss over the tokens before a target, from the saved weights."""
    state = torch.load(path, weights_only=False)["state_dict"]
    weights = {name.removeprefix("model."): value for name, value in state.items()}
    assert weights["output_layer.weight"].shape == (1, 32)
    values, losses = [], []
    for index, batch in zip(BATCHES, data().val, strict=True):
        rows = [
            reference.forward(weights, CRITIC, torch.tensor(ids))[:, 0] for ids in tokens(index)
        ]
        values.append([row.numpy() for row in rows])
        for row, returns, mask in zip(
            rows, batch["returns"].unbind(), batch["loss_mask"].unbind(), strict=True
        ):
            losses += ((row - returns)[:-1][mask[1:]] ** 2 / 2).tolist()
    return values, losses


def check(found, wanted):
    for batch, wanted_batch in zip(found, wanted, strict=True):
        for row, wanted_row in zip(batch, wanted_batch, strict=True):
            np.testing.assert_allclose(row, wanted_row, rtol=1e-5, atol=1e-5)


def test_a_critic_trains_predicts_saves_and_goes_on_elsewhere(tmp_path):
    (logged, values), *others = run_distributed(fit, 4, str(tmp_path))
    path = str(tmp_path / "last.ckpt")
    wanted, losses = expected(path)
    check(values, wanted)
    assert [other[1] for other in others] == [None] * 3
    np.testing.assert_allclose(logged["val_loss"], np.mean(losses), rtol=1e-5)
    assert logged["tokens"] == sum(mask[1:].sum() for mask in data().val[-1]["loss_mask"].unbind())
    resumed = []
    for world, cap, strategy in (
        (1, 256, {}),
        (4, 48, TP2),
        (4, 48, {**TP2, "sequence_parallel": True}),
        (4, 48, {"pipeline_model_parallel_size": 2}),
    ):
        (values, loss), *_ = run_distributed(load, world, path, cap, strategy)
        check(values, wanted)
        resumed.append(loss)
    np.testing.assert_allclose(resumed, resumed[0], rtol=1e-5)
    assert resumed[0] < logged["train_loss"]


def test_values_of_bfloat16_states_are_not_rounded_to_bfloat16():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (50, 1))
    values = ValueOutputs(hidden=hidden, weight=weight).values()
    exact = (hidden.double() @ weight[0].double()).float()
    torch.testing.assert_close(values, exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(exact.bfloat16().float(), exact, rtol=1e-5, atol=1e-5)


def test_a_head_that_is_not_there_or_tied():
    with pytest.raises(ValueError, match="head='logits' is none of vocabulary, value"):
        ModelConfig(head="logits")
    with pytest.raises(ValueError, match="Set tie_word_embeddings=False"):
        ModelConfig(head="value", tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("config", "objective", "message"),
    [
        (
            CRITIC,
            SFT(),
            r"SFT needs a model with head='vocabulary', found ModelConfig\(head='value'",
        ),
        (CRITIC, DPO(), "DPO needs a model with head='vocabulary'"),
        (trainers.CONFIG, ValueLoss(), "ValueLoss needs a model with head='value'"),
    ],
)
def test_an_objective_of_another_head(config, objective, message):
    with pytest.raises(ValueError, match=message):
        trainers.module(model=config, objective=objective)


def test_the_default_objective_is_that_of_the_head():
    assert trainers.module(model=CRITIC).objective == ValueLoss()
    assert trainers.module().objective == SFT()


@pytest.mark.parametrize("clip", [0.0, -0.2, float("inf")])
def test_a_clip_that_is_not_above_zero(clip):
    with pytest.raises(ValueError, match=f"clip={clip}"):
        ValueLoss(clip=clip)


def test_what_a_value_loss_reads():
    assert [extra.key for extra in ValueLoss().extras] == ["returns"]
    clipped = ValueLoss(clip=0.2, mask="m")
    assert [extra.key for extra in clipped.extras] == ["returns", "old_values", "m"]
