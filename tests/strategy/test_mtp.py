"""Multi-token prediction through the Trainer: logs, checkpoints, stages, and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

import reference
import trainers
from distributed import run_distributed
from lightning_dcp import DPO, ModelConfig
from lightning_dcp.engine import DynamicCPEngine, PlanSettings, full_model_state
from lightning_dcp.model import Recompute, build_gpt_model, hidden_states
from lightning_dcp.parallel import ParallelSizes, setup_parallel

CONFIG = dataclasses.replace(trainers.CONFIG, mtp_num_layers=2, mtp_loss_scaling_factor=0.5)
BATCHES = [trainers.random_batch(trainers.LENGTHS[index], index) for index in range(3)]
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SAME = ("train_loss", "mtp_loss_1", "mtp_loss_2", "grad_norm", "val_loss")


def start():
    """The whole initial weights, from this rank's stage and the others'."""
    world = dist.get_world_size()
    found = []
    for tied in (False, True):
        context = setup_parallel(
            ParallelSizes(world_size=world, pipeline_model_parallel_size=world)
        )
        config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
        try:
            model = build_gpt_model(config, context, seed=1)
            found.append((full_model_state(model, context), hasattr(model, "mtp")))
        finally:
            context.destroy()
    return [({key: value.numpy() for key, value in state.items()}, has) for state, has in found]


def test_the_last_stage_has_the_depths():
    (whole,) = run_distributed(start, 1)
    first, last = run_distributed(start, 2)
    for (wanted, _), (found, on_first), (_, on_last) in zip(whole, first, last, strict=True):
        assert (on_first, on_last) == (False, True)
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert "output_layer.weight" in whole[0][0]
    assert "output_layer.weight" not in whole[1][0]


def fit(folder):
    module = trainers.module(model=CONFIG)
    checkpoint = ModelCheckpoint(dirpath=folder, filename="last")
    trainer = trainers.trainer(24, enable_checkpointing=True, callbacks=[checkpoint])
    trainer.fit(module, trainers.batches(3))
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    trainer.validate(module, trainers.batches(3, 3), verbose=False)
    logged["val_loss"] = float(trainer.callback_metrics["val_loss"])
    predicted = trainer.predict(module, trainers.batches(3, 3))
    values = torch.cat([one["log_probs"].values() for one in predicted]) if predicted[0] else None
    return logged, values


def resume(path, cap, strategy):
    module = trainers.module(model=CONFIG, seed=9)
    more = trainers.trainer(cap, strategy, max_epochs=2)
    more.fit(module, trainers.batches(3), ckpt_path=path)
    return {key: float(value) for key, value in more.callback_metrics.items()}


def log_probs(weights):
    """Of every token by the saved model alone; 0 at the first of a sequence."""
    found = []
    for ids in (torch.tensor(ids) for batch in BATCHES for ids in batch):
        whole = reference.forward(weights, CONFIG, ids)[:-1].log_softmax(-1)
        found.append(F.pad(whole.gather(1, ids[1:, None])[:, 0], (1, 0)))
    return torch.cat(found)


def test_it_trains_logs_saves_and_goes_on_elsewhere(tmp_path):
    initial = run_distributed(start, 1)[0][0][0]
    (logged, values), *others = run_distributed(fit, 4, str(tmp_path))
    for other, _ in others:
        assert [other[key] for key in SAME] == [logged[key] for key in SAME]
    path = str(tmp_path / "last.ckpt")
    state = torch.load(path, weights_only=False)["state_dict"]
    weights = {name.removeprefix("model."): value for name, value in state.items()}

    settings = {"clip": 0.5, **trainers.OPTIMIZER}
    wanted = reference.train(initial, CONFIG, BATCHES * 2, **settings)
    after = reference.train(initial, CONFIG, BATCHES, **settings)["weights"]
    assert set(weights) == set(after)
    for name, value in after.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    check(logged, wanted, 2)

    # Evaluation and predictions are those of the model alone.
    alone = log_probs(weights)
    torch.testing.assert_close(values, alone, rtol=1e-5, atol=1e-5)
    num_targets = sum(len(ids) - 1 for batch in BATCHES for ids in batch)
    assert logged["val_loss"] == pytest.approx(-float(alone.sum()) / num_targets, rel=1e-5)

    for world, cap, strategy in ((1, 256, {}), (4, 48, TP2), (4, 48, PP2)):
        check(run_distributed(resume, world, path, cap, strategy)[0], wanted, 5)


def check(logged, wanted, step):
    assert logged["train_loss"] == pytest.approx(wanted["losses"][step], rel=1e-5)
    assert logged["grad_norm"] == pytest.approx(wanted["norms"][step], rel=1e-5)
    found = [logged[f"mtp_loss_{depth}"] for depth in (1, 2)]
    assert found == pytest.approx(wanted["mtp_losses"][step], rel=1e-5)


def unprepared():
    context = setup_parallel(ParallelSizes(world_size=1))
    try:
        model = build_gpt_model(CONFIG, context)
        engine = DynamicCPEngine(
            context, PlanSettings.of_run(context.sizes, max_seqlen_per_dp_cp_rank=96)
        )
        planned = engine.prepare(trainers.jagged([[1, 2, 3]]))
        (micro_batch,) = engine.micro_batches(planned)
        with torch.no_grad():
            hidden_states(model, micro_batch)
        try:
            hidden_states(model, micro_batch)
        except RuntimeError as error:
            return str(error)
    finally:
        engine.close()
        context.destroy()


def test_training_on_a_batch_that_was_not_prepared_for_it():
    (message,) = run_distributed(unprepared, 1)
    assert "mtp_num_layers=2" in message
    assert "for 0 depths" in message
    assert "engine.prepare(..., mtp_depths=2)" in message


def train_without_an_output_layer():
    """Runs one pass whose output layer fails when it is called; the gradients' norms by part."""
    context = setup_parallel(ParallelSizes(world_size=1))
    try:
        model = build_gpt_model(CONFIG, context)
        model.output_layer.forward = None
        engine = DynamicCPEngine(
            context, PlanSettings.of_run(context.sizes, max_seqlen_per_dp_cp_rank=96)
        )
        planned = engine.prepare(trainers.jagged([[1, 2, 3, 4]]), mtp_depths=2)
        (micro_batch,) = engine.micro_batches(planned)
        hidden, _ = hidden_states(model, micro_batch)
        (hidden * 0).sum().backward()
        return {name: float(p.grad.norm()) for name, p in model.named_parameters()}
    finally:
        engine.close()
        context.destroy()


def test_losses_come_along_with_any_use_of_the_hidden_states_and_make_no_logits():
    (norms,) = run_distributed(train_without_an_output_layer, 1)
    for part in ("mtp.layers.0.eh_proj", "mtp.layers.1.eh_proj", "decoder.layers.0.mlp.linear_fc1"):
        assert norms[f"{part}.weight"] > 0
    assert norms["embedding.word_embeddings.weight"] > 0
    assert norms["output_layer.weight"] > 0


def build(recompute):
    context = setup_parallel(ParallelSizes(world_size=1))
    try:
        build_gpt_model(CONFIG, context, recompute=recompute)
    except ValueError as error:
        return str(error)
    finally:
        context.destroy()


@pytest.mark.parametrize(
    ("recompute", "found"),
    [
        (Recompute(granularity="full", method="block"), "'block' and 1"),
        (Recompute(granularity="full", num_layers=2), "'uniform' and 2"),
    ],
)
def test_a_recomputation_that_it_lacks(recompute, found):
    (message,) = run_distributed(build, 1, recompute)
    assert "recompute.method='uniform' and recompute.num_layers=1 only" in message
    assert found in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mtp_num_layers": -1}, "mtp_num_layers=-1 must be 0 or more"),
        ({"mtp_loss_scaling_factor": -0.1}, "mtp_loss_scaling_factor=-0.1 must be finite and not"),
        ({"mtp_loss_scaling_factor": float("nan")}, "mtp_loss_scaling_factor=nan must be finite"),
        ({"mtp_num_layers": 1, "head": "value"}, "mtp_num_layers=1 predicts tokens, which head="),
    ],
)
def test_sizes_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_an_objective_that_counts_something_else():
    with pytest.raises(ValueError, match=r"mtp_num_layers=2\).*DPO counts pairs of its own"):
        trainers.module(model=CONFIG, objective=DPO())


def test_a_depth_costs_about_a_layer():
    assert CONFIG.sizes.num_layers == CONFIG.num_layers + 2
