"""What a checkpoint file gives a run: its weights, all of it, or an error that says why not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import trainers
from distributed import run_distributed
from lightning_dcp import DynamicCPModule, LRSchedule

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CONSTANT = LRSchedule(kind="constant")
OTHER_HEADS = replace(trainers.CONFIG, num_attention_heads=8, num_query_groups=4)


class WithHyperparameters(DynamicCPModule):
    def __init__(self, model=trainers.CONFIG, schedule=CONSTANT):
        super().__init__(model, lr_schedule=schedule, seed=1)
        self.save_hyperparameters()


class LoadsInConfigureModel(DynamicCPModule):
    """As a user would: the whole state dict into this rank's part."""

    path = ""

    def configure_model(self):
        is_new = self.model is None
        super().configure_model()
        if is_new:
            state = torch.load(self.path, weights_only=True)["state_dict"]
            whole = {name.removeprefix("model."): value for name, value in state.items()}
            self.model.load_state_dict(whole)


def val_loss(module: DynamicCPModule, strategy: dict, **options) -> float:
    (metrics,) = trainers.trainer(96, strategy).validate(
        module, trainers.batches(1, 2), verbose=False, **options
    )
    return metrics["val_loss"]


def refused(call) -> str:
    try:
        call()
    except (ValueError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def damage(folder: Path, good: Path) -> dict[str, Path]:
    """Files that are no checkpoints of this model, by kind."""
    content = good.read_bytes()
    paths = {kind: folder / f"{kind}.ckpt" for kind in ("empty", "garbage", "truncated", "list")}
    paths["empty"].write_bytes(b"")
    paths["garbage"].write_bytes(b"what is this" * 50)
    paths["truncated"].write_bytes(content[: len(content) // 2])
    torch.save([1, 2], paths["list"])
    paths["folder"] = folder / "folder.ckpt"
    paths["folder"].mkdir()
    paths["missing"] = folder / "missing.ckpt"
    checkpoint = torch.load(good, weights_only=True)
    (state,) = checkpoint["optimizer_states"]
    name = "model.decoder.final_layernorm.weight"
    # Longer: its first part would fit.
    state["state"][name]["exp_avg"] = torch.zeros(100)
    torch.save(checkpoint, folder / "moment.ckpt")
    paths["moment"] = folder / "moment.ckpt"
    foreign = {"state_dict": {"net.weight": torch.zeros(2)}, "pytorch-lightning_version": "2.6.0"}
    torch.save(foreign | {"epoch": 0, "global_step": 0}, folder / "foreign.ckpt")
    paths["foreign"] = folder / "foreign.ckpt"
    return paths


def uses_of_a_file(folder: str):
    here, good = Path(folder), Path(folder) / "good.ckpt"
    module = trainers.module()
    trainer = trainers.trainer(96, PP2)
    trainer.fit(module, trainers.batches(2))
    # After the fit, whose groups are gone.
    trainer.save_checkpoint(good)
    whole = trainer.strategy.lightning_module_state_dict()
    with pytest.warns(UserWarning, match="pipeline_model_parallel_size=2"):
        part = module.state_dict()
    found = {"part": sorted(part), "whole": {name: value.numpy() for name, value in whole.items()}}
    ids = trainers.jagged([[1, 2, 3, 4]])
    found["logits"] = [module(ids)[0].numpy()]

    losses = {"trained": val_loss(module, PP2)}
    losses["other layout"] = val_loss(module, TP2)
    found["logits"].append(module(ids)[0].numpy())
    losses["back"] = val_loss(module, {})
    found["logits"].append(module(ids)[0].numpy())
    for name, strategy in (("tp2", TP2), ("pp2", PP2)):
        losses[f"weights, {name}"] = val_loss(trainers.module(weights=str(good)), strategy)
        inside = LoadsInConfigureModel(trainers.CONFIG)
        inside.path = str(good)
        losses[f"configure_model, {name}"] = val_loss(inside, strategy)
    loaded = DynamicCPModule.load_from_checkpoint(good, model=trainers.CONFIG)
    losses["load_from_checkpoint"] = val_loss(loaded, TP2)
    found["losses"] = losses

    if dist.get_rank() == 0:
        damage(here, good)
        shutil.copy(good, here / "one rank.ckpt")
    dist.barrier()
    errors = {}
    kinds = ("empty", "garbage", "truncated", "list", "folder", "missing", "moment", "foreign")
    for kind in kinds:
        path = here / f"{kind}.ckpt"
        errors[kind] = refused(
            lambda path=path: trainers.trainer(96).fit(
                trainers.module(), trainers.batches(1), ckpt_path=path
            )
        )
    for kind in ("empty", "missing"):
        path = str(here / f"{kind}.ckpt")
        errors[f"weights {kind}"] = refused(
            lambda path=path: val_loss(trainers.module(weights=path), {})
        )
    other = trainers.module(model=OTHER_HEADS)
    errors["heads"] = refused(lambda: val_loss(other, TP2, ckpt_path=good))
    errors["heads of weights"] = refused(
        lambda: val_loss(trainers.module(model=OTHER_HEADS, weights=str(good)), {})
    )
    errors["heads of load"] = refused(lambda: DynamicCPModule.load_from_checkpoint(good))
    mine = here / ("empty.ckpt" if dist.get_rank() == 1 else "good.ckpt")
    errors["one rank"] = refused(
        lambda: trainers.trainer(96).fit(trainers.module(), trainers.batches(1), ckpt_path=mine)
    )
    found["errors"] = errors

    first = WithHyperparameters()
    trainer = trainers.trainer(96, max_epochs=1)
    trainer.fit(first, trainers.batches(2))
    trainer.save_checkpoint(here / "hyper.ckpt")
    again = trainers.trainer(96, max_epochs=2)
    again.fit(WithHyperparameters(), trainers.batches(2), ckpt_path=here / "hyper.ckpt")
    found["resumed"] = again.global_step
    found["of hyperparameters"] = WithHyperparameters.load_from_checkpoint(
        here / "hyper.ckpt"
    ).model_config
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("files"))
    return run_distributed(uses_of_a_file, 2, folder)


@pytest.mark.lightning("hook", "configure_model", "works")
def test_weights_are_the_same_wherever_they_are_loaded(found):
    for of_rank in found:
        losses = of_rank["losses"]
        for name, loss in losses.items():
            assert loss == pytest.approx(losses["trained"], rel=1e-5), name
        for logits in of_rank["logits"]:
            np.testing.assert_allclose(logits, found[0]["logits"][0], rtol=1e-4, atol=1e-5)


def test_a_part_has_the_names_of_the_whole(found):
    whole = set(found[0]["whole"])
    assert found[1]["whole"] == {}
    parts = [{name for name in of_rank["part"] if "_extra_state" not in name} for of_rank in found]
    assert parts[0] | parts[1] == whole
    assert not parts[0] & parts[1]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "empty.ckpt (0 bytes) cannot be read"),
        ("garbage", "garbage.ckpt (600 bytes) cannot be read"),
        ("truncated", "cannot be read as a checkpoint"),
        ("list", "list.ckpt is no checkpoint"),
        ("folder", "folder.ckpt (not a file) cannot be read"),
        ("missing", "missing.ckpt"),
        ("moment", "'exp_avg' of model.decoder.final_layernorm.weight has shape [100]"),
        ("foreign", "net.weight"),
        ("weights empty", "empty.ckpt (0 bytes) cannot be read"),
        ("weights missing", "missing.ckpt"),
        ("heads", "num_attention_heads=4, num_query_groups=2"),
        ("heads of weights", "num_attention_heads=8, num_query_groups=4"),
        ("heads of load", "Give the module a ModelConfig with the checkpoint's"),
        ("one rank", "empty.ckpt (0 bytes)"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_on_every_rank(found, kind, message):
    for of_rank in found:
        assert message in of_rank["errors"][kind]


def test_a_module_with_saved_hyperparameters_resumes(found):
    for of_rank in found:
        assert of_rank["resumed"] == 4
        assert of_rank["of hyperparameters"] == trainers.CONFIG


def test_without_a_run_there_is_nothing_to_call():
    module = trainers.module()
    with pytest.raises(RuntimeError, match="has no weights yet"):
        module(trainers.jagged([[1, 2]]))
    assert module.state_dict() == {}


def saved_after_validating(folder: str):
    """A fit, then validation by the same Trainer, whose optimizer went with the fit's model."""
    trainer, module = trainers.trainer(96), trainers.module()
    trainer.fit(module, trainers.batches(1, 1))
    trainer.validate(module, trainers.batches(1, 1), verbose=False)
    path = Path(folder) / "later.ckpt"
    trainer.save_checkpoint(path)
    resume = trainers.trainer(96, max_epochs=2)
    return refused(lambda: resume.fit(trainers.module(), trainers.batches(1), ckpt_path=path))


def test_a_checkpoint_without_an_optimizer_says_so(tmp_path):
    for message in run_distributed(saved_after_validating, 2, str(tmp_path)):
        assert "has 0 optimizer states" in message
