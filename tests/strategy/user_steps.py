"""Fits with what users hang into a step, and the same steps in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm

import reference
import trainers
from lightning_dcp import DynamicCPModule
from lightning_dcp.engine import full_model_state

EMBEDDING = "embedding.word_embeddings.weight"
LAST_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"
ADAMW = partial(
    torch.optim.AdamW,
    lr=trainers.OPTIMIZER["lr"],
    betas=(0.9, 0.95),
    eps=trainers.OPTIMIZER["adam_eps"],
)


def whole_weights(module: DynamicCPModule, trainer: Any) -> dict[str, np.ndarray]:
    """Whole weights under the reference's names; {} except on rank 0."""
    state = full_model_state(module, trainer.strategy.context)
    # Copies: of one process they are the weights themselves.
    return {
        name.removeprefix("model."): np.array(value.float().numpy())
        for name, value in state.items()
    }


def build(cls: type[DynamicCPModule] = DynamicCPModule, **options: Any) -> DynamicCPModule:
    """A module of this class with the settings of ``trainers.module``."""
    plain = trainers.module(**options)
    return cls(plain.model_config, plain.optimizer_settings, plain.lr_schedule, seed=1)


class Watch(Callback):
    """Whole weights at the start and the end of training, and the losses between."""

    def on_train_start(self, trainer, pl_module):
        self.start, self.losses = whole_weights(pl_module, trainer), []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(pl_module.last_step.loss))

    def on_train_end(self, trainer, pl_module):
        self.end = whole_weights(pl_module, trainer)


class Scaled(DynamicCPModule):
    """Has a parameter of its own outside of the model."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Another value in each process: the first one's counts.
        first = torch.distributed.get_rank() == 0
        self.scale = torch.nn.Parameter(torch.tensor([1.3 if first else 7.0]))

    def hidden_states(self, micro_batch):
        states = super().hidden_states(micro_batch)
        return states._replace(hidden=(states.hidden * self.scale).to(states.hidden.dtype))


class Edits(Callback):
    """Changes gradients in each of the ways in which a hook may, and keeps what it saw."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        named = dict(pl_module.model.named_parameters())
        self.seen.append(grad_norm(pl_module.model, norm_type=2))
        for name, parameter in named.items():
            edit(name.removeprefix("0."), parameter, trainer.global_step)


def edit(name: str, parameter: torch.Tensor, step: int) -> None:
    if name == EMBEDDING:
        parameter.grad.mul_(0.5)
    elif name == LAST_NORM:
        parameter.grad = parameter.grad * 3
    elif name == OUTPUT and step == 1:
        parameter.grad = None


class Freezes(Callback):
    """Freezes the embedding for the second step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for name, parameter in pl_module.model.named_parameters():
            if name.endswith(EMBEDDING):
                parameter.requires_grad_(batch_idx != 1)


def plain(
    start: dict[str, np.ndarray],
    *,
    num: int = 3,
    epochs: int = 1,
    scaled: bool = False,
    edits: bool = False,
    freezes: bool = False,
    decay: float | None = None,
    make_optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
) -> dict[str, Any]:
    """The same on whole weights, a sequence at a time."""
    weights = {name: torch.tensor(value).requires_grad_() for name, value in start.items()}
    decayed = [weight for weight in weights.values() if weight.dim() > 1]
    kept = [weight for weight in weights.values() if weight.dim() == 1]
    optimizer = make_optimizer(
        [
            {"params": decayed, "weight_decay": trainers.OPTIMIZER["weight_decay"]},
            {"params": kept, "weight_decay": 0.0},
        ]
    )
    losses, norms, averages = [], [], {}
    for step, lengths in list(enumerate(trainers.LENGTHS[:num])) * epochs:
        if freezes:
            weights[EMBEDDING].requires_grad_(step != 1)
        optimizer.zero_grad()
        total, count = torch.zeros(()), 0
        for ids in map(torch.tensor, trainers.random_batch(lengths, step)):
            hidden = reference._last_hidden(weights, trainers.CONFIG, ids, None, None)
            if scaled:
                hidden = hidden * weights["scale"]
            logits = hidden @ weights[OUTPUT].t()[:, : trainers.CONFIG.vocab_size]
            total = total + F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
            count += len(ids) - 1
        (total / count).backward()
        norms.append(
            {name: float(w.grad.norm()) for name, w in weights.items() if w.grad is not None}
        )
        if edits:
            for name, weight in weights.items():
                edit(name, weight, step)
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 0.5)
        optimizer.step()
        losses.append(float(total.detach() / count))
        for name, weight in weights.items():
            average = averages.get(name)
            value = weight.detach().clone()
            if average is not None and decay is not None:
                value = decay * average + (1 - decay) * value
            averages[name] = value
    return {
        "losses": losses,
        "norms": norms,
        "end": {name: weight.detach().numpy() for name, weight in weights.items()},
        "average": {name: value.numpy() for name, value in averages.items()},
    }
