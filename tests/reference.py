"""A decoder in plain torch, without Megatron-Core, packing or parallelism: what parity means.

It reads the weights of a full state dict and runs every sequence by itself, so that a fault in
packing, the zigzag, rope under CP, attention across documents, labels, the division of the loss,
gradient reduction, clipping or the optimizer shows up as a difference.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dcp.model.config import ModelConfig

Weights = dict[str, Tensor]


def forward(weights: Weights, config: ModelConfig, ids: Tensor) -> Tensor:
    """Logits ``[length, vocab_size]`` of one sequence ``[length]``."""
    hidden = weights["embedding.word_embeddings.weight"][ids]
    cos, sin = _rope(config, len(ids), hidden.dtype)
    for layer in range(config.num_layers):
        prefix = f"decoder.layers.{layer}."
        names = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        normed = _norm(hidden, names["input_layernorm.weight"], config)
        hidden = hidden + _attention(names, config, normed, cos, sin)
        normed = _norm(hidden, names["pre_mlp_layernorm.weight"], config)
        gate, up = (normed @ names["mlp.linear_fc1.weight"].t()).chunk(2, -1)
        hidden = hidden + (F.silu(gate) * up) @ names["mlp.linear_fc2.weight"].t()
    hidden = _norm(hidden, weights["decoder.final_layernorm.weight"], config)
    output = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    return (hidden @ output.t())[:, : config.vocab_size]


def _norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.layernorm_epsilon) * weight


def _rope(config: ModelConfig, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = config.head_width
    inverse = 1.0 / config.rotary_base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    angle = torch.cat((angle, angle), -1)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _attention(names: Weights, config: ModelConfig, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    groups, width = config.query_groups, config.head_width
    per_group = config.num_attention_heads // groups
    qkv = (x @ names["self_attention.linear_qkv.weight"].t()).view(
        len(x), groups, per_group + 2, width
    )
    query, key, value = qkv[:, :, :per_group].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
    if config.qk_layernorm:
        query = _norm(query, names["self_attention.q_layernorm.weight"], config)
        key = _norm(key, names["self_attention.k_layernorm.weight"], config)
    query, key = (_rotate(part, cos, sin) for part in (query, key))
    key, value = (part.repeat_interleave(per_group, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / width**0.5
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
    context = torch.einsum("hqk,khd->qhd", probabilities, value).flatten(1)
    return context @ names["self_attention.linear_proj.weight"].t()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def train(
    state: dict[str, np.ndarray],
    config: ModelConfig,
    batches: list[list[list[int]]],
    *,
    lr: float,
    weight_decay: float,
    clip: float,
    adam_eps: float,
    sample_loss: Callable[[Tensor, int, int], tuple[Tensor, int]] | None = None,
    batch_loss: Callable[[list[Tensor], int], tuple[Tensor, int]] | None = None,
) -> dict[str, object]:
    """Trains for one step a batch; the loss is the mean over the batch's target tokens.

    Args:
        sample_loss: From logits ``[length, vocab_size]``, batch and sample, the sum of the losses
            of the sample's target tokens, and how many they are; cross-entropy by default.
        batch_loss: Instead, from the logits of all samples and batch, a sum and what divides it.

    Returns:
        ``losses`` and ``norms`` by step, ``grads`` by step and name (before clipping), ``weights``.
    """
    weights = {k: torch.tensor(v).requires_grad_() for k, v in state.items()}
    decayed = [w for w in weights.values() if w.dim() > 1]
    kept = [w for w in weights.values() if w.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        eps=adam_eps,
    )
    losses, grads, norms = [], [], []
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        outputs = [forward(weights, config, torch.tensor(ids)) for ids in batch]
        total, num_tokens = torch.zeros(()), 0
        if batch_loss is not None:
            total, num_tokens = batch_loss(outputs, index)
        for sample, logits in enumerate(outputs if batch_loss is None else []):
            if sample_loss is None:
                ids = torch.tensor(batch[sample])
                part, count = F.cross_entropy(logits[:-1], ids[1:], reduction="sum"), len(ids) - 1
            else:
                part, count = sample_loss(logits, index, sample)
            total, num_tokens = total + part, num_tokens + count
        loss = total / max(num_tokens, 1)
        loss.backward()
        losses.append(float(loss.detach()))
        grads.append({k: w.grad.numpy().copy() for k, w in weights.items()})
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(weights.values()), clip)))
        optimizer.step()
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "weights": {k: w.detach().numpy() for k, w in weights.items()},
    }
