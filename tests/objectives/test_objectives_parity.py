"""Every objective gives the numbers of a plain torch loop, in every layout, fused or not."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest
import torch
from objectives_reference import OBJECTIVES, batch_of, sample_loss, samples

import reference
import trainers
from distributed import run_distributed
from lightning_dcp import DynamicCPModule
from lightning_dcp.engine import full_model_state

NUM_STEPS = 3


class Keeps(DynamicCPModule):
    """Remembers whole weights at the start and the end, and the losses between."""

    def _weights(self):
        state = full_model_state(self, self.trainer.strategy.context)
        return {name.removeprefix("model."): value.numpy().copy() for name, value in state.items()}

    def on_train_start(self):
        self.start, self.losses = self._weights(), []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(self.last_step.loss))

    def on_train_end(self):
        self.end = self._weights()


def fit(cap, strategy, names, fused):
    found = {}
    for name in names:
        plain = trainers.module()
        module = Keeps(
            plain.model_config,
            plain.optimizer_settings,
            plain.lr_schedule,
            seed=1,
            objective=OBJECTIVES[name],
            fused_loss=fused,
        )
        data = trainers.Batches([batch_of(index) for index in range(NUM_STEPS)])
        trainers.trainer(cap, strategy).fit(module, data)
        found[name] = {"start": module.start, "end": module.end, "losses": module.losses}
    return found


@functools.cache
def start():
    return run_distributed(fit, 1, 256, {}, ["sft"], True)[0]["sft"]["start"]


@functools.cache
def expected(name):
    batches = [
        trainers.random_batch(lengths, index)
        for index, lengths in enumerate(trainers.LENGTHS[:NUM_STEPS])
    ]
    return reference.train(
        start(),
        trainers.CONFIG,
        batches,
        clip=0.5,
        sample_loss=functools.partial(sample_loss, name),
        **trainers.OPTIMIZER,
    )


TP2 = {"tensor_model_parallel_size": 2}
STATIC = {"dynamic_context_parallel": False, "context_parallel_size": 4}


@pytest.mark.parametrize(
    ("world", "cap", "strategy", "names", "fused"),
    [
        (1, 256, {}, list(OBJECTIVES), True),
        (1, 256, {}, list(OBJECTIVES), False),
        (2, 48, {}, ["policy", "distillation"], True),
        (2, 256, TP2, list(OBJECTIVES), False),
        (4, 24, {}, list(OBJECTIVES), True),
        (4, 48, TP2, list(OBJECTIVES), True),
        (4, 24, STATIC, list(OBJECTIVES), True),
        (8, 24, TP2, ["policy"], True),
    ],
    ids=["1", "1-logits", "2", "2-tp2-logits", "4", "4-tp2", "4-static", "8-tp2"],
)
def test_losses_and_weights_after_three_steps(world, cap, strategy, names, fused):
    results = run_distributed(fit, world, cap, strategy, names, fused)
    for name in names:
        wanted, found = expected(name), results[0][name]
        np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-5, err_msg=name)
        for key, weight in wanted["weights"].items():
            scale = np.abs(weight).max()
            np.testing.assert_allclose(
                found["end"][key], weight, atol=1e-5 * scale, rtol=0, err_msg=f"{name} {key}"
            )
        for other in results[1:]:
            assert other[name]["losses"] == found["losses"]


def fit_tied():
    config = dataclasses.replace(trainers.CONFIG, tie_word_embeddings=True)
    losses = {}
    for tp in (1, 2):
        for fused in (True, False):
            module = trainers.module(model=config, fused_loss=fused)
            seen = losses.setdefault(f"tp {tp}, fused {fused}", [])
            module.on_train_batch_end = lambda *_, m=module, s=seen: s.append(m.last_step.loss)
            trainers.trainer(256, {"tensor_model_parallel_size": tp}).fit(
                module, trainers.batches(NUM_STEPS)
            )
    return {name: [float(loss) for loss in seen] for name, seen in losses.items()}


def test_tied_weights_train_alike_with_and_without_logits():
    losses = run_distributed(fit_tied, 2)[0]
    wanted = losses.pop("tp 1, fused False")
    assert len(losses) == 3
    assert len(set(wanted)) == NUM_STEPS
    for name, found in losses.items():
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=name)


def test_the_cases_reach_every_branch_of_the_clip():
    weights = {key: torch.tensor(value) for key, value in start().items()}
    regions = Counter()
    for sample in samples(0):
        logits = reference.forward(weights, trainers.CONFIG, sample["input_ids"])[:-1] / 0.8
        at = logits.log_softmax(1).gather(1, sample["input_ids"][1:, None])[:, 0]
        ratios = (at - sample["old_log_probs"][1:]).exp()
        for ratio, advantage in zip(ratios, sample["advantages"][1:], strict=True):
            if not advantage.isnan():
                regions[(int(ratio > 0.8) + int(ratio > 1.4), bool(advantage > 0))] += 1
    assert len(regions) == 6
    assert min(regions.values()) >= 5
