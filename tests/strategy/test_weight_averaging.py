"""EMA and running averages of the weights: values, validation, checkpoints, other layouts."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from user_steps import Scaled, Watch, build, plain, whole_weights

import reference
import trainers
from distributed import run_distributed
from lightning_dcp import EMAWeightAveraging, MoEConfig, WeightAveraging

DECAY = 0.7
LAYOUTS = {
    "2": (2, {}, {}),
    "2-unsharded": (2, {"use_distributed_optimizer": False}, {}),
    "4-tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, {}),
}


class Ends(Watch):
    """Also looks at the weights that validation has, and at those after the fit."""

    def on_validation_start(self, trainer, pl_module):
        self.before = whole_weights(pl_module, trainer)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.validated = whole_weights(pl_module, trainer)

    def on_validation_end(self, trainer, pl_module):
        self.after = whole_weights(pl_module, trainer)

    def on_train_end(self, trainer, pl_module):
        self.kept = whole_weights(pl_module, trainer)


def fit(folder, strategy, options, *, resume=None, max_epochs=2, precision="32-true"):
    watch = Ends()
    trainer = trainers.trainer(
        96,
        strategy,
        callbacks=[
            EMAWeightAveraging(decay=DECAY),
            watch,
            ModelCheckpoint(
                dirpath=folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True
            ),
        ],
        enable_checkpointing=True,
        max_epochs=max_epochs,
        precision=precision,
    )
    module = build(Scaled, **options)
    trainer.fit(module, trainers.batches(3, 1), ckpt_path=resume)
    return {
        **{name: getattr(watch, name) for name in ("start", "before", "validated", "after")},
        "kept": watch.kept,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "model": float(
            trainer.validate(module, trainers.batches(3, 1), verbose=False)[0]["val_loss"]
        ),
    }


def fit_and_resume(folder, strategy, options):
    whole = fit(f"{folder}/a", strategy, options)
    resumed = fit(f"{folder}/b", strategy, options, resume=f"{folder}/a/step=3.ckpt")
    return {"whole": whole, "resumed": resumed}


@functools.cache
def fits_of(layout, folder):
    world, strategy, options = LAYOUTS[layout]
    return run_distributed(fit_and_resume, world, folder, strategy, options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("averages"))


def assert_equal_weights(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_allclose(
            found[name], weight, atol=tolerance * np.abs(weight).max(), rtol=0, err_msg=name
        )


@pytest.mark.lightning("callback", "lightning_dcp.EMAWeightAveraging", "works")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_average_is_that_of_plain_torch(layout, folder):
    found = fits_of(layout, f"{folder}/{layout}")[0]["whole"]
    wanted = plain(found["start"], num=3, epochs=2, scaled=True, decay=DECAY)
    # Validation ran with the averages, training went on with the weights, the end has averages.
    assert_equal_weights(found["before"], wanted["end"])
    assert_equal_weights(found["validated"], wanted["average"])
    assert_equal_weights(found["after"], wanted["end"])
    assert_equal_weights(found["kept"], wanted["average"])
    weights = {name: torch.tensor(value) for name, value in wanted["average"].items()}
    losses = []
    for ids in map(torch.tensor, trainers.random_batch(trainers.LENGTHS[0], 0)):
        hidden = reference._last_hidden(weights, trainers.CONFIG, ids, None, None)
        logits = (hidden * weights["scale"]) @ weights["output_layer.weight"].t()
        logits = logits[:-1, : trainers.CONFIG.vocab_size]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"))
    assert found["val_loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert found["model"] == pytest.approx(found["val_loss"], rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_with_its_average(layout, folder):
    found = fits_of(layout, f"{folder}/{layout}")[0]
    for name in ("before", "validated", "after", "kept"):
        assert_equal_weights(found["resumed"][name], found["whole"][name], 1e-6)


def test_a_checkpoint_has_the_averages_whole(folder):
    found = fits_of("4-tp2-pp2", f"{folder}/4-tp2-pp2")[0]["whole"]
    checkpoint = torch.load(f"{folder}/4-tp2-pp2/a/step=6.ckpt", weights_only=True)
    for key, wanted in (("state_dict", "kept"), ("current_model_state", "before")):
        state = {n.removeprefix("model."): v.numpy() for n, v in checkpoint[key].items()}
        assert_equal_weights(state, found[wanted], 1e-6)
    # And another layout goes on with it.
    two = run_distributed(
        fit, 2, f"{folder}/other", {}, {}, resume=f"{folder}/4-tp2-pp2/a/step=3.ckpt"
    )[0]
    assert_equal_weights(two["kept"], found["kept"])


EXPERTS = MoEConfig(num_experts=4, expert_bias=True, score_function="sigmoid")


def averages_of_bfloat16(folder, moe):
    from dataclasses import replace

    options = {"model": replace(trainers.CONFIG, moe=EXPERTS)} if moe else {}
    strategy = {"expert_model_parallel_size": 2} if moe else {}
    whole = fit(f"{folder}/a", strategy, options, precision="bf16-mixed")
    resumed = fit(
        f"{folder}/b",
        strategy,
        options,
        resume=f"{folder}/a/step=3.ckpt",
        precision="bf16-mixed",
    )
    state = torch.load(f"{folder}/a/step=6.ckpt", weights_only=True)["averaging_state"]
    return whole, resumed, {name: value.numpy() for name, value in state["averages"].items()}


@pytest.mark.parametrize("moe", [False, True])
def test_averages_of_bfloat16_weights_are_float32(tmp_path, moe):
    whole, resumed, averages = run_distributed(averages_of_bfloat16, 2, str(tmp_path), moe)[0]
    for name in ("validated", "kept", "after"):
        for key, value in whole[name].items():
            np.testing.assert_array_equal(resumed[name][key], value, err_msg=f"{name} {key}")
    for name, value in averages.items():
        rounded = torch.tensor(value).bfloat16().float().numpy()
        kept = whole["kept"][name.removeprefix("model.")]
        # What is no bfloat16, an expert's bias say, is kept as it is.
        assert np.array_equal(kept, rounded) or np.array_equal(kept, value)
    assert any(value.dtype == np.float32 for value in averages.values())


def running_average():
    watch = Watch()
    callback = WeightAveraging()
    trainer = trainers.trainer(96, callbacks=[callback, watch], max_epochs=1)
    snapshots = []

    class Snapshots(Watch):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            snapshots.append(whole_weights(pl_module, trainer))

        def on_train_end(self, trainer, pl_module):
            self.kept = whole_weights(pl_module, trainer)

    last = Snapshots()
    trainer.callbacks.append(last)
    trainer.fit(build(), trainers.batches(3))

    never = trainers.trainer(
        96, callbacks=[EMAWeightAveraging(update_starting_at_step=100), other := Snapshots()]
    )
    snapshots_before = len(snapshots)
    never.fit(build(), trainers.batches(3, 1))
    return snapshots, last.kept, snapshots[snapshots_before:][-1], other.kept


@pytest.mark.lightning("callback", "lightning_dcp.WeightAveraging", "works")
def test_without_a_function_it_is_the_mean_and_without_an_update_the_weights():
    snapshots, kept, trained, unchanged = run_distributed(running_average, 2)[0]
    mean = {name: np.mean([one[name] for one in snapshots[:3]], 0) for name in kept}
    assert_equal_weights(kept, mean, 1e-6)
    assert_equal_weights(unchanged, trained, 0)


def averaged_biases(folder):
    strategy = {"pipeline_model_parallel_size": 2}
    checkpoint = ModelCheckpoint(dirpath=folder, filename="last")
    averaging = EMAWeightAveraging(decay=DECAY, use_buffers=True)
    trainer = trainers.trainer(
        96, strategy, callbacks=[averaging, checkpoint], enable_checkpointing=True
    )
    trainer.fit(trainers.module(model=replace(trainers.CONFIG, moe=EXPERTS)), trainers.batches(2))
    saved = torch.load(f"{folder}/last.ckpt", weights_only=False)["averaging_state"]["averages"]
    return sorted(name for name in saved if name.endswith("expert_bias"))


def test_buffers_of_every_stage_are_averaged(tmp_path):
    for names in run_distributed(averaged_biases, 2, str(tmp_path)):
        layers = [f"model.decoder.layers.{layer}.mlp.router.expert_bias" for layer in (0, 1)]
        assert names == layers
