"""Objectives token by token from their definitions, and batches that have what they read."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import trainers
from lightning_dcp.objectives import SFT, Objective, PolicyLoss, TopKDistillation

K = 3
OBJECTIVES: dict[str, Objective] = {
    "sft": SFT(label_smoothing=0.1, z_loss=0.01),
    "weights": SFT(sample_weight="sample_weight", token_weight="token_weight"),
    "policy": PolicyLoss(
        clip_low=0.2, clip_high=0.4, kl_coefficient=0.1, entropy_coefficient=0.05, temperature=0.8
    ),
    "grpo": PolicyLoss(advantages="sample_advantage"),
    "distillation": TopKDistillation(temperature=2.0),
    "log_probs": TopKDistillation(teacher_values="log_probs", values="teacher_log_probs"),
}


@functools.cache
def samples(batch: int) -> list[dict[str, Tensor]]:
    """For each sample everything the objectives read; NaN where it belongs to no target."""
    generator = torch.Generator().manual_seed(batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    made = []
    for ids in trainers.random_batch(trainers.LENGTHS[batch], batch):
        n = len(ids)
        teacher = normal(n, 20).log_softmax(1).topk(K)
        sample = {
            "input_ids": torch.tensor(ids),
            "loss_mask": torch.rand(n, generator=generator) < 0.8,
            "sample_weight": torch.rand((), generator=generator),
            "token_weight": torch.rand(n, generator=generator),
            "old_log_probs": normal(n) * 0.7 - 4.5,
            "ref_log_probs": normal(n) * 0.7 - 4.5,
            "advantages": normal(n),
            "sample_advantage": normal(),
            "teacher_ids": teacher.indices,
            "teacher_values": normal(n, K),
            "teacher_log_probs": teacher.values,
        }
        # A teacher that knows fewer than k tokens.
        sample["teacher_log_probs"][::5, -1] = -torch.inf
        for value in sample.values():
            if value.is_floating_point() and value.dim():
                value[~sample["loss_mask"]] = torch.nan
                value[0] = torch.nan
        made.append(sample)
    return made


def batch_of(index: int) -> dict[str, Tensor]:
    """The global batch of ``samples(index)``, its jagged keys on the same offsets."""
    made = samples(index)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in made])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    batch: dict[str, Any] = {}
    for key, first in made[0].items():
        values = [sample[key] for sample in made]
        batch[key] = (
            torch.nested.nested_tensor_from_jagged(torch.cat(values), offsets)
            if first.dim()
            else torch.stack(values)
        )
    return batch


def sample_loss(name: str, logits: Tensor, batch: int, sample: int) -> tuple[Tensor, int]:
    """The sum of one sample's losses under objective ``name``, token by token."""
    made = samples(batch)[sample]
    kept = [i for i in range(1, len(logits)) if made["loss_mask"][i]]
    losses = [_token_loss(name, OBJECTIVES[name], logits[i - 1], made, i) for i in kept]
    return sum(losses, torch.zeros(())), len(kept)


def _token_loss(
    name: str, objective: Any, logits: Tensor, sample: dict[str, Tensor], i: int
) -> Tensor:
    """The loss of token ``i``, which ``logits`` [vocab_size] predict."""
    logits = logits / objective.temperature
    log_probs = logits - logits.exp().sum().log()
    log_prob = log_probs[sample["input_ids"][i]]
    if name == "sft":
        return -0.9 * log_prob - 0.1 * log_probs.mean() + 0.01 * logits.exp().sum().log() ** 2
    if name == "weights":
        return -log_prob * sample["sample_weight"] * sample["token_weight"][i]
    if name in ("policy", "grpo"):
        return _policy_loss(name, log_probs, log_prob, sample, i)
    at = log_probs[sample["teacher_ids"][i]]
    if name == "distillation":
        teacher = (sample["teacher_values"][i] / 2).softmax(0)
        return sum(teacher[j] * (teacher[j].log() - at[j]) for j in range(K))
    teacher = sample["teacher_log_probs"][i]
    return sum(teacher[j].exp() * (teacher[j] - at[j]) for j in range(K) if teacher[j] > -99)


def _policy_loss(
    name: str, log_probs: Tensor, log_prob: Tensor, sample: dict[str, Tensor], i: int
) -> Tensor:
    ratio = (log_prob - sample["old_log_probs"][i]).exp()
    high = 1.4 if name == "policy" else 1.2
    advantage = sample["advantages"][i] if name == "policy" else sample["sample_advantage"]
    clipped = min(max(ratio, torch.tensor(0.8)), torch.tensor(high))
    loss = -min(ratio * advantage, clipped * advantage)
    if name == "grpo":
        return loss
    apart = sample["ref_log_probs"][i] - log_prob
    entropy = -(log_probs.exp() * log_probs).sum()
    return loss + 0.1 * (apart.exp() - apart - 1) - 0.05 * entropy
