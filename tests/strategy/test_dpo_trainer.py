"""DPO through the Trainer: pairs share a micro-batch in every layout of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import trainers
from distributed import run_distributed
from lightning_dcp import DPO, MoEConfig

LENGTHS = [30, 12, 7, 40, 22, 22, 5, 9, 60, 3]


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num = len(LENGTHS)
    return {
        **trainers.jagged(trainers.random_batch(LENGTHS, seed)),
        # The two of a pair are far apart in the batch.
        "pair_id": torch.arange(num) % (num // 2),
        "is_chosen": torch.arange(num) < num // 2,
        "reference_log_probs": -50 * torch.rand(num, generator=generator),
    }


EXPERTS = replace(trainers.CONFIG, moe=MoEConfig(num_experts=4, ffn_hidden_size=16))


def train(cap: int, strategy: dict[str, object], config=trainers.CONFIG) -> dict[str, object]:
    module = trainers.module(model=config, objective=DPO(beta=0.2, reference_per="sample"))
    trainer = trainers.trainer(cap, strategy)
    losses, pairs, torn = [], [], 0

    def keep(*args: object) -> None:
        nonlocal torn
        losses.append(float(module.last_step.loss))
        pairs.append(int(module.last_step.num_tokens))
        for step in module.last_step.plan.steps:
            for group in step.groups:
                ids = [sample % (len(LENGTHS) // 2) for sample in group.sample_ids]
                torn += len(ids) != 2 * len(set(ids))

    module.on_train_batch_end = keep
    trainer.fit(module, trainers.Batches([batch(0), batch(1), batch(2)]))
    return {"losses": losses, "pairs": pairs, "torn": torn}


@pytest.mark.parametrize(
    ("world", "cap", "strategy"),
    [
        (2, 80, {}),
        (4, 40, {}),
        (4, 80, {"pipeline_model_parallel_size": 2}),
        (4, 80, {"dynamic_context_parallel": False, "context_parallel_size": 2}),
    ],
    ids=["2", "4", "4-pp2", "4-static2"],
)
def test_pairs_stay_together_and_give_the_numbers_of_one_process(world, cap, strategy):
    (alone,) = run_distributed(train, 1, 256, {})
    assert alone["pairs"] == [5, 5, 5]
    for result in run_distributed(train, world, cap, strategy):
        assert result["torn"] == 0
        assert result["pairs"] == alone["pairs"]
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_pairs_of_a_model_with_experts():
    (alone,) = run_distributed(train, 1, 256, {}, EXPERTS)
    strategy = {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    for result in run_distributed(train, 4, 80, strategy, EXPERTS):
        assert result["torn"] == 0
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
