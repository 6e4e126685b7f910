"""Optimizers, torch's schedulers, the learning rate finder, throughput and sizes in the logs."""

from __future__ import annotations

import functools
import logging
import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateFinder, SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import RunningStage
from user_steps import Watch, build, plain

import lightning_dcp.callbacks
import trainers
from distributed import run_distributed
from lightning_dcp import (
    DynamicCPModule,
    DynamicCPStrategy,
    MoEConfig,
    OptimizerSettings,
    ThroughputMonitor,
)

BATCHES = 3


class OneCycle(DynamicCPModule):
    """Torch's schedulers by name, on Megatron-Core's optimizer."""

    interval, monitor = "step", None

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=BATCHES + 1)

    def configure_optimizers(self):
        optimizer = self.trainer.strategy.build_optimizer(self.optimizer_settings)
        config = {"scheduler": self.scheduler(optimizer), "interval": self.interval}
        return [optimizer], [config | ({"monitor": self.monitor} if self.monitor else {})]


class Cyclic(OneCycle):
    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-3, step_size_up=2)


class Plateau(OneCycle):
    interval, monitor = "epoch", "train_loss"

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)


def schedule(cls):
    """Rates and betas of a fit's steps, and those of the same scheduler on torch's AdamW."""
    found = []

    class Rates(Watch):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            found.append([(g["lr"], g["betas"][0]) for g in optimizer.param_groups])

    module, epochs = build(cls), 2 if cls is Plateau else 1
    trainers.trainer(96, callbacks=[rates := Rates()], max_epochs=epochs).fit(
        module, trainers.batches(BATCHES)
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], 1e-3, betas=(0.9, 0.95))
    scheduler, wanted = cls.scheduler(module, optimizer), []
    for step in range(BATCHES * epochs):
        (group,) = optimizer.param_groups
        wanted.append((group["lr"], group["betas"][0]))
        optimizer.step()
        if cls is not Plateau:
            scheduler.step()
        elif step == BATCHES - 1:
            scheduler.step(rates.losses[step])
    return found, wanted


def sgd():
    watch = Watch()
    settings = OptimizerSettings(optimizer="sgd", lr=1e-2, weight_decay=0.1)
    module = build()
    module.optimizer_settings = settings
    with pytest.raises(
        ValueError, match="Set use_distributed_optimizer=False, or optimizer='adam'"
    ):
        trainers.trainer(96).fit(module, trainers.batches(1))
    trainer = trainers.trainer(96, {"use_distributed_optimizer": False}, callbacks=[watch])
    trainer.fit(module, trainers.batches(BATCHES))
    return {"start": watch.start, "end": watch.end}


def find_rate(folder):
    module, watch = build(), Watch()
    finder = LearningRateFinder(
        min_lr=1e-5, max_lr=1e-2, num_training_steps=30, early_stop_threshold=None
    )
    trainer = trainers.trainer(
        96, callbacks=[finder, watch], default_root_dir=folder, max_epochs=-1, max_steps=4
    )
    trainer.fit(module, trainers.batches(4))
    # Lightning leaves weights, optimizer and steps as it found them.
    before = Watch()
    trainers.trainer(96, callbacks=[before], max_epochs=1).fit(build(), trainers.batches(1))
    same = all(np.array_equal(watch.start[name], before.start[name]) for name in watch.start)
    return {
        "suggested": finder.optimal_lr.suggestion(),
        "lr": module.lr,
        "settings": module.optimizer_settings.lr,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "steps": trainer.global_step,
        "same": same,
    }


class Collects(CSVLogger):
    """Keeps every metric that is logged."""

    def __init__(self, folder):
        super().__init__(folder)
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)


def throughput(folder):
    logger = Collects(folder)
    monitor = ThroughputMonitor(window_size=2)
    trainer = trainers.trainer(
        96, callbacks=[monitor], logger=logger, log_every_n_steps=1, precision="bf16-mixed"
    )
    trainer.fit(module := build(), trainers.batches(3))
    rows = [row for row in logger.rows if "train/samples" in row]
    flops = module.model_config.sizes.training_flops(trainers.LENGTHS[2])
    return {"rows": rows, "flops": flops, "available": monitor.available_flops}


def spikes(folder):
    callback = SpikeDetection(warmup=1, atol=1e9, exclude_batches_path=f"{folder}/skip.json")
    trainer = trainers.trainer(96, callbacks=[callback])
    trainer.fit(build(), trainers.batches(3))
    return trainer.global_step


def everything(folder):
    return {
        "schedules": {cls.__name__: schedule(cls) for cls in (OneCycle, Cyclic, Plateau)},
        "sgd": sgd(),
        "rate": find_rate(folder),
        "throughput": throughput(folder),
        "spikes": spikes(folder),
    }


@functools.cache
def on_two():
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(everything, 2, folder)


@pytest.mark.parametrize("cls", [OneCycle, Cyclic, Plateau])
def test_torchs_schedulers_change_rates_and_betas(cls):
    for result in on_two():
        found, wanted = result["schedules"][cls.__name__]
        for groups, (lr, beta) in zip(found, wanted, strict=True):
            for group in groups:
                assert group == pytest.approx((lr, beta), rel=1e-9)


def test_sgd_gives_the_numbers_of_torch():
    found = on_two()[0]["sgd"]
    wanted = plain(
        found["start"],
        make_optimizer=functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    )
    for name, weight in wanted["end"].items():
        np.testing.assert_allclose(found["end"][name], weight, atol=1e-5 * np.abs(weight).max())


@pytest.mark.lightning("callback", "LearningRateFinder", "works")
def test_the_learning_rate_finder_leaves_all_but_the_rate():
    first, second = (result["rate"] for result in on_two())
    assert first == second
    assert 1e-5 < first["suggested"] < 1e-2
    assert first["lr"] == first["settings"] == first["suggested"]
    assert set(first["rates"]) == {first["suggested"]}
    assert (first["steps"], first["same"]) == (4, True)


@pytest.mark.lightning("callback", "SpikeDetection", "works")
def test_spike_detection_lets_a_run_without_spikes_pass():
    assert [result["spikes"] for result in on_two()] == [3, 3]


@pytest.mark.lightning("callback", "lightning_dcp.ThroughputMonitor", "works")
def test_throughput_counts_a_global_batch_once():
    first, second = (result["throughput"] for result in on_two())
    # Lightning's monitor runs on the first rank.
    assert second["rows"] == []
    counted = np.cumsum([[len(one), sum(one)] for one in trainers.LENGTHS[:3]], 0)
    assert [
        [row["train/samples"], row["train/lengths"]] for row in first["rows"]
    ] == counted.tolist()
    last = first["rows"][-1]
    for name, number in (
        ("batches", 1),
        ("samples", len(trainers.LENGTHS[2])),
        ("items", sum(trainers.LENGTHS[2])),
    ):
        whole = last[f"train/{name}_per_sec"]
        assert last[f"train/device/{name}_per_sec"] == pytest.approx(whole / 2)
        assert whole / last["train/batches_per_sec"] == pytest.approx(number)
    assert last["train/flops_per_sec"] / last["train/batches_per_sec"] == pytest.approx(
        first["flops"], rel=1e-6
    )


def test_the_peak_is_that_of_the_type_that_is_computed_in(monkeypatch):
    asked = []
    monkeypatch.setattr(
        lightning_dcp.callbacks, "get_available_flops", lambda device, dtype: asked.append(dtype)
    )
    trainer = Trainer(
        accelerator="cpu", strategy=DynamicCPStrategy(96), precision="bf16-mixed", devices=2
    )
    trainer.state.stage = RunningStage.TRAINING
    ThroughputMonitor().setup(trainer, build(), "fit")
    assert asked == [torch.bfloat16]


def sizes_said(strategy):
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Lines()
    logger.addHandler(handler)
    try:
        model = replace(trainers.CONFIG, moe=MoEConfig(num_experts=4))
        trainers.trainer(96, strategy).fit(build(model=model), trainers.batches(1))
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "whole model" in line]


def test_the_whole_models_size_is_said_in_any_layout():
    strategies = [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {"expert_model_parallel_size": 2},
    ]
    said = [run_distributed(sizes_said, 4, strategy)[0] for strategy in strategies]
    model = replace(trainers.CONFIG, moe=MoEConfig(num_experts=4))
    (single,) = run_distributed(number_of_weights, 1, model)
    assert (
        said
        == [[f"The whole model has {single:,} parameters; a summary counts those of rank 0."]] * 3
    )


def number_of_weights(model):
    trainers.trainer(96).fit(module := build(model=model), trainers.batches(1))
    return sum(parameter.numel() for parameter in module.parameters())
