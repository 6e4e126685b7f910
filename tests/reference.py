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

from lightning_dcp.config.model import ModelConfig

Weights = dict[str, Tensor]


def forward(
    weights: Weights,
    config: ModelConfig,
    ids: Tensor,
    routers: list[Tensor] | None = None,
    routes: Tensor | None = None,
) -> Tensor:
    """Logits ``[length, vocab_size]`` of one sequence ``[length]``.

    ``routers`` gets the logits ``[length, experts]`` of each layer's router. ``routes``
    ``[length, layers, top-k]`` are the experts to use; of tokens after them routers choose.
    """
    return _head(weights, config, _last_hidden(weights, config, ids, routers, routes))


def forward_mtp(
    weights: Weights,
    config: ModelConfig,
    ids: Tensor,
    routers: list[Tensor] | None = None,
    routes: Tensor | None = None,
) -> list[Tensor]:
    """The same, and then those of each depth of multi-token prediction, DeepSeek-V3 section 2.2.

    At depth k, row i sees token i + k, 0 past the end, and predicts token i + 1 + k.
    """
    hidden = _last_hidden(weights, config, ids, routers, routes)
    logits = [_head(weights, config, hidden)]
    for depth in range(1, config.mtp_num_layers + 1):
        names = _under(weights, f"mtp.layers.{depth - 1}.")
        further = F.pad(ids[depth:], (0, min(depth, len(ids))))
        embedded = weights["embedding.word_embeddings.weight"][further]
        both = (
            _norm(embedded, names["enorm.weight"], config),
            _norm(hidden, names["hnorm.weight"], config),
        )
        hidden = torch.cat(both, -1) @ names["eh_proj.weight"].t()
        hidden = _layer(_under(names, "mtp_model_layer."), config, hidden, routers)
        hidden = _norm(hidden, names["final_layernorm.weight"], config)
        logits.append(_head(weights, config, hidden))
    return logits


def _last_hidden(
    weights: Weights,
    config: ModelConfig,
    ids: Tensor,
    routers: list[Tensor] | None,
    routes: Tensor | None,
) -> Tensor:
    hidden = weights["embedding.word_embeddings.weight"][ids]
    for layer in range(config.num_layers):
        given = None if routes is None else routes[:, layer]
        names = _under(weights, f"decoder.layers.{layer}.")
        hidden = _layer(names, config, hidden, routers, given)
    return _norm(hidden, weights["decoder.final_layernorm.weight"], config)


def _under(weights: Weights, prefix: str) -> Weights:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def _head(weights: Weights, config: ModelConfig, hidden: Tensor) -> Tensor:
    output = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    return (hidden @ output.t())[:, : config.vocab_size]


def _layer(
    names: Weights,
    config: ModelConfig,
    hidden: Tensor,
    routers: list[Tensor] | None,
    given: Tensor | None = None,
) -> Tensor:
    cos, sin = _rope(config, len(hidden), hidden.dtype)
    normed = _norm(hidden, names["input_layernorm.weight"], config)
    hidden = hidden + _attention(names, config, normed, cos, sin)
    normed = _norm(hidden, names["pre_mlp_layernorm.weight"], config)
    if config.moe is None:
        return hidden + _mlp(names, "mlp", normed)
    return hidden + _experts(names, config, normed, routers, given)


def _mlp(names: Weights, prefix: str, x: Tensor) -> Tensor:
    gate, up = (x @ names[f"{prefix}.linear_fc1.weight"].t()).chunk(2, -1)
    return (F.silu(gate) * up) @ names[f"{prefix}.linear_fc2.weight"].t()


def _experts(
    names: Weights,
    config: ModelConfig,
    x: Tensor,
    routers: list[Tensor] | None,
    given: Tensor | None,
) -> Tensor:
    """Every expert on every token, weighed by the router: what dropless dispatching comes to."""
    moe = config.moe
    logits = x @ names["mlp.router.weight"].t()
    if routers is not None:
        routers.append(logits)
    chosen = chosen_experts(config, logits, names.get("mlp.router.expert_bias"), given)
    scores = logits.softmax(-1) if moe.score_function == "softmax" else logits.sigmoid()
    scores = torch.where(chosen, scores, 0)
    if moe.topk > 1:
        scores = scores / scores.sum(-1, keepdim=True)
    output = torch.zeros_like(x)
    for expert in range(moe.num_experts):
        of_expert = _mlp(names, f"mlp.experts.local_experts.{expert}", x)
        output = output + scores[:, expert, None] * of_expert
    if moe.shared_expert_ffn_hidden_size:
        output = output + _mlp(names, "mlp.shared_experts", x)
    return output


def chosen_experts(
    config: ModelConfig, logits: Tensor, bias: Tensor | None = None, given: Tensor | None = None
) -> Tensor:
    """``[tokens, experts]`` bool: the best of each token; the bias chooses but does not weigh.

    Of the first tokens those that are ``given``, ``[tokens or fewer, top-k]``.
    """
    scores = logits.softmax(-1) if config.moe.score_function == "softmax" else logits.sigmoid()
    best = (scores if bias is None else scores + bias).topk(config.moe.topk, -1).indices
    if given is not None:
        best = torch.cat((given, best[len(given) :]))
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, best, True)


def _balance(config: ModelConfig, logits: Tensor) -> Tensor:
    """Load-balancing loss of a set of tokens, from their router logits ``[tokens, experts]``."""
    moe = config.moe
    scores = logits.softmax(-1) if moe.score_function == "softmax" else logits.sigmoid()
    if moe.score_function == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    share = chosen_experts(config, logits).float().mean(0) / moe.topk
    return moe.num_experts * (share * scores.mean(0)).sum()


def _router_losses(
    config: ModelConfig, routers: list[list[Tensor]], packs: list[tuple[int, ...]] | None
) -> Tensor:
    """Of a batch, from the router logits of each sample and layer."""
    moe, total = config.moe, torch.zeros(())
    if moe is None:
        return total
    for layer in range(len(routers[0])):
        logits = [sample[layer] for sample in routers]
        every = torch.cat(logits)
        total = total + moe.z_loss_coeff * every.logsumexp(-1).square().mean()
        if moe.seq_aux_loss_coeff:
            of_sequences = torch.stack([_balance(config, one) for one in logits])
            total = total + moe.seq_aux_loss_coeff * of_sequences.mean()
        for pack in packs if packs is not None and moe.aux_loss_coeff else ():
            packed = torch.cat([logits[sample] for sample in pack])
            share = len(packed) / len(every)
            total = total + moe.aux_loss_coeff * share * _balance(config, packed)
    return total


def _update_biases(
    config: ModelConfig,
    weights: Weights,
    routers: list[list[Tensor]],
    routes: list[Tensor | None],
) -> None:
    """Moves each expert's bias towards an even load, once a step."""
    if config.moe is None or not config.moe.expert_bias:
        return
    layers = [f"decoder.layers.{layer}." for layer in range(config.num_layers)]
    layers += [f"mtp.layers.{depth}.mtp_model_layer." for depth in range(config.mtp_num_layers)]
    for layer, prefix in enumerate(layers):
        bias = weights[f"{prefix}mlp.router.expert_bias"]
        chosen = []
        for sample, given in zip(routers, routes, strict=True):
            replayed = None if given is None or layer >= config.num_layers else given[:, layer]
            chosen.append(chosen_experts(config, sample[layer].detach(), bias, replayed))
        counts = torch.cat(chosen).sum(0).float()
        bias += config.moe.expert_bias_update_rate * (counts.mean() - counts).sign()


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


def _mtp_losses(
    config: ModelConfig, outputs: list[list[Tensor]], batch: list[list[int]]
) -> list[Tensor]:
    """Of each depth, the mean over its own targets in the batch; 0 without any."""
    means = []
    for depth in range(1, config.mtp_num_layers + 1):
        rows = [logits[depth][: -1 - depth] for logits in outputs]
        labels = [torch.tensor(ids[1 + depth :], dtype=torch.int64) for ids in batch]
        total = F.cross_entropy(torch.cat(rows), torch.cat(labels), reduction="sum")
        means.append(total / max(len(torch.cat(labels)), 1))
    return means


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
    packs: list[list[tuple[int, ...]]] | None = None,
    batch_loss: Callable[[list[Tensor], int], tuple[Tensor, int]] | None = None,
    routes: list[list[np.ndarray]] | None = None,
) -> dict[str, object]:
    """Trains for one step a batch; the loss is the mean over the batch's target tokens.

    Args:
        sample_loss: From logits ``[length, vocab_size]``, batch and sample, the sum of the losses
            of the sample's target tokens, and how many they are; cross-entropy by default.
        packs: For each batch the samples of each micro-batch, for the router's ``aux_loss``.
        batch_loss: Instead, from the logits of all samples and batch, a sum and what divides it.
        routes: For each batch and sample the experts to use; the routers' own by default. The
            load-balancing losses are about the routers' own in any case.

    Returns:
        ``losses`` and ``norms`` by step, ``mtp_losses`` by step and depth, ``grads`` by step and
        name (before clipping), ``weights``.
    """
    weights = {k: torch.tensor(v) for k, v in state.items()}
    trained = {k: w.requires_grad_() for k, w in weights.items() if not k.endswith("expert_bias")}
    decayed = [w for w in trained.values() if w.dim() > 1]
    kept = [w for w in trained.values() if w.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        eps=adam_eps,
    )
    losses, mtp_losses, grads, norms = [], [], [], []
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        routers: list[list[Tensor]] = [[] for _ in batch]
        given: list[Tensor | None] = [None] * len(batch)
        if routes is not None:
            given = [torch.tensor(one, dtype=torch.int64) for one in routes[index]]
        of_depths = [
            forward_mtp(weights, config, torch.tensor(ids), of_sample, of_tokens)
            for ids, of_sample, of_tokens in zip(batch, routers, given, strict=True)
        ]
        outputs = [logits[0] for logits in of_depths]
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
        of_routers = _router_losses(config, routers, packs[index] if packs else None)
        further = _mtp_losses(config, of_depths, batch)
        of_mtp = config.mtp_loss_scaling_factor * sum(further) / max(config.mtp_num_layers, 1)
        (loss + of_routers + of_mtp).backward()
        mtp_losses.append([float(one.detach()) for one in further])
        losses.append(float(loss.detach()))
        grads.append({k: w.grad.numpy().copy() for k, w in trained.items()})
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), clip)))
        optimizer.step()
        _update_biases(config, weights, routers, given)
    return {
        "losses": losses,
        "mtp_losses": mtp_losses,
        "norms": norms,
        "grads": grads,
        "weights": {k: w.detach().numpy() for k, w in weights.items()},
    }
