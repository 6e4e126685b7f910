"""What is logged from micro_batch_step: sums over micro-batches and ranks, in every layout."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import numpy as np
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from user_steps import build

import trainers
from distributed import run_distributed
from lightning_dcp import DynamicCPModule

LAYOUTS = {
    "1": (1, 256, {}),
    "2": (2, 48, {}),
    # Packs of one token beside long sequences: some ranks have rows without a target.
    "4": (4, 24, {}),
    "4-tp2": (4, 48, {"tensor_model_parallel_size": 2}),
    "2-pp2-vpp2": (
        2,
        96,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
}


class Logs(DynamicCPModule):
    def micro_batch_step(self, micro_batch):
        loss, count = super().micro_batch_step(micro_batch)
        self.log_micro_batch("own_loss", loss, count)
        labels = micro_batch.labels
        even = micro_batch.loss_mask & (labels % 2 == 0)
        # Only where there is one: other ranks log nothing of this name.
        if even.any():
            self.log_micro_batch("mean_of_even", labels[even].sum(), even.sum())
        return loss, count


def fit(cap, strategy):
    model = replace(trainers.CONFIG, num_layers=4)
    module = build(Logs, model=model)
    trainer = trainers.trainer(cap, strategy)
    found = []
    trainer.callbacks.append(
        LambdaCallback(
            on_train_batch_end=lambda trainer, module, *_: found.append(
                {
                    name: float(trainer.callback_metrics[name])
                    for name in ("train_loss", "own_loss", "mean_of_even")
                }
            )
        )
    )
    data = trainers.batches(3, 2)
    trainer.fit(module, data)
    validated = trainer.validate(module, data, verbose=False)[0]
    tested = trainer.test(module, data, verbose=False)[0]
    return found, validated, tested


@functools.cache
def fit_of(layout):
    world, cap, strategy = LAYOUTS[layout]
    return run_distributed(fit, world, cap, strategy)


def mean_of_even(batches):
    labels = [ids[1:] for seed, lengths in batches for ids in trainers.random_batch(lengths, seed)]
    labels = np.concatenate(labels)
    return labels[labels % 2 == 0].mean()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_metric_is_the_mean_over_the_global_batch(layout):
    batches = list(enumerate(trainers.LENGTHS))
    for found, validated, tested in fit_of(layout):
        for step, values in enumerate(found):
            assert values["own_loss"] == pytest.approx(values["train_loss"], rel=1e-6)
            assert values["mean_of_even"] == pytest.approx(mean_of_even([batches[step]]), rel=1e-6)
        for prefix, metrics in (("val", validated), ("test", tested)):
            own, all_ = metrics[f"{prefix}_own_loss"], metrics[f"{prefix}_loss"]
            assert own == pytest.approx(all_, rel=1e-6)
            # Weighed over batches by the count, and not by batches.
            wanted = mean_of_even(batches[:2])
            assert metrics[f"{prefix}_mean_of_even"] == pytest.approx(wanted, rel=1e-6)


class LogsDirectly(DynamicCPModule):
    def micro_batch_step(self, micro_batch):
        loss, count = super().micro_batch_step(micro_batch)
        self.log("own", loss, sync_dist=True)
        return loss, count


class LogsElsewhere(DynamicCPModule):
    def log_step(self, step):
        self.log_micro_batch("own", 1.0, 1)


class LogsRows(DynamicCPModule):
    def micro_batch_step(self, micro_batch):
        self.log_micro_batch("own", micro_batch.labels, 1)


MISTAKES = {
    LogsDirectly: r"Use self\.log_micro_batch\(name, total, count\)",
    LogsElsewhere: "log_micro_batch is for micro_batch_step; use self.log elsewhere",
    LogsRows: r"takes a sum and a count, two scalars, found shapes \[\(\d+,\), \(\)\]",
}


def mistakes():
    found = []
    for cls in MISTAKES:
        try:
            trainers.trainer(48).fit(build(cls), trainers.batches(1))
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found


def test_other_ways_to_log_are_refused():
    for found in run_distributed(mistakes, 2):
        for message, wanted in zip(found, MISTAKES.values(), strict=True):
            assert re.search(wanted, message), message
