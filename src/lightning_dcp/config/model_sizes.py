"""The sizes of a decoder that decide what a token costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_dcp.config.checks import check_at_least

_BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder with grouped-query attention and gated MLPs, dense or mixture of experts.

    Attributes:
        num_layers: Transformer layers.
        hidden_size: Width of the residual stream.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads.
        head_dim: Width of one head.
        intermediate_size: Width of the MLP of a dense layer.
        vocab_size: Rows of the output layer.
        num_experts: Routed experts of a MoE layer; 0 for a dense model.
        num_experts_per_tok: Experts that each token is sent to.
        moe_intermediate_size: Width of one expert.
        shared_expert_intermediate_size: Width of the expert that sees every token; 0 for none.
        num_dense_layers: Layers of a MoE model that have a dense MLP instead of experts.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    num_dense_layers: int = 0

    def __post_init__(self) -> None:
        needed = ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
                  "head_dim", "vocab_size")  # fmt: skip
        for name, value in asdict(self).items():
            check_at_least(name, value, 1 if name in needed else 0)
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} with num_experts="
                f"{self.num_experts}: each token goes to 1 up to all experts"
            )
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"num_dense_layers={self.num_dense_layers} of num_layers={self.num_layers}"
            )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Reads the sizes from the contents of a Hugging Face ``config.json``.

        Args:
            config: The mapping; the decoder's part is taken if it has a ``text_config``.

        Raises:
            ValueError: A size is missing, or the model has multi-head latent attention.
        """
        # Vision-language models nest the decoder's sizes.
        config = config.get("text_config", config)
        if config.get("kv_lora_rank"):
            raise ValueError(
                f"kv_lora_rank={config['kv_lora_rank']}: multi-head latent attention has no cost "
                "model yet; measure the model and fit one"
            )
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        experts = next((config[k] for k in _NUM_EXPERTS if config.get(k)), 0)
        return cls(
            num_layers=_size(config, "num_hidden_layers"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate_size=_size(config, "intermediate_size"),
            vocab_size=_size(config, "vocab_size"),
            num_experts=experts,
            num_experts_per_tok=_size(config, "num_experts_per_tok") if experts else 0,
            # Mixtral has no width of its own for experts.
            moe_intermediate_size=(
                config.get("moe_intermediate_size") or config["intermediate_size"] if experts else 0
            ),
            shared_expert_intermediate_size=_shared(config) if experts else 0,
            num_dense_layers=_dense_layers(config) if experts else 0,
        )

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def expert_weights(self) -> int:
        """Weights of routed experts that a token meets, over all layers."""
        per_layer = 3 * self.hidden_size * self.moe_intermediate_size * self.num_experts_per_tok
        return self.num_moe_layers * per_layer

    @property
    def shared_weights(self) -> int:
        """Weights that every token meets, over all layers and the output layer."""
        query = self.num_attention_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key_value)
        # Gate, up and down of a gated MLP.
        dense = 3 * self.hidden_size * self.intermediate_size
        moe = self.hidden_size * (self.num_experts + 3 * self.shared_expert_intermediate_size)
        num_dense = self.num_layers - self.num_moe_layers
        layers = self.num_layers * attention + num_dense * dense + self.num_moe_layers * moe
        # The output layer alone: looking an embedding up multiplies nothing.
        return layers + self.hidden_size * self.vocab_size

    @property
    def key_value_bytes_per_row(self) -> int:
        """Bytes of one token's keys and values over all layers, in bfloat16."""
        return self.num_layers * 2 * self.num_key_value_heads * self.head_dim * _BYTES

    @property
    def layer_input_bytes_per_row(self) -> int:
        """Bytes of one token's layer inputs: what full recomputation keeps."""
        return self.num_layers * self.hidden_size * _BYTES

    @property
    def activation_bytes_per_row(self) -> int:
        """Bytes that the backward pass needs of one token, without recomputation.

        Counted as by Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
        Transformer Models"), for a fused attention that keeps no scores: inputs of two norms, of
        attention and of the MLP; queries, keys, values and the attention's output; and of each
        gated MLP the gate, the value and their product.
        """
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        common = 4 * self.hidden_size + heads * self.head_dim
        # A dispatcher gives each expert a copy of the token's row.
        routed = self.num_experts_per_tok * (3 * self.moe_intermediate_size + self.hidden_size)
        moe = routed + 3 * self.shared_expert_intermediate_size
        dense_layers = self.num_layers - self.num_moe_layers
        mlp = dense_layers * 3 * self.intermediate_size + self.num_moe_layers * moe
        return _BYTES * (self.num_layers * common + mlp)

    def training_flops(self, lengths: Iterable[int]) -> int:
        """Floating-point operations of a forward and a backward pass over causal sequences.

        Six for each token and weight that it meets; attention's two products over half of all
        pairs, twice again in the backward pass (Korthikanti et al. 2022).
        """
        weights = self.shared_weights + self.expert_weights
        width = self.num_layers * self.num_attention_heads * self.head_dim
        return sum(6 * weights * length + 6 * width * length**2 for length in lengths)

    @property
    def fingerprint(self) -> str:
        """A short name that models of the same sizes share, and others do not."""
        # Sorted: calibration files outlive the order of the fields.
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


LLAMA_8B = ModelSizes(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=14_336, vocab_size=128_256,
)  # fmt: skip
"""Llama 3.1 8B, dense: the sizes of its published configuration."""

QWEN3_30B_A3B = ModelSizes(
    num_layers=48, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    intermediate_size=6144, vocab_size=151_936, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768,
)  # fmt: skip
"""Qwen3-30B-A3B, a mixture of experts: the sizes of its published configuration."""

# As Qwen, Mixtral and DeepSeek call it.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"the model's configuration has {name}={value!r}; it needs an integer")
    return value


def _shared(config: Mapping[str, Any]) -> int:
    # Qwen gives the width, DeepSeek how many experts of the routed ones' width.
    width: int = config.get("shared_expert_intermediate_size") or 0
    return width or (config.get("n_shared_experts") or 0) * (
        config.get("moe_intermediate_size") or 0
    )


def _dense_layers(config: Mapping[str, Any]) -> int:
    """Qwen's rule (every ``decoder_sparse_step``-th layer, but for ``mlp_only_layers``)."""
    step = config.get("decoder_sparse_step") or 1
    # DeepSeek's.
    first = config.get("first_k_dense_replace") or 0
    only = set(config.get("mlp_only_layers") or ())
    layers = range(_size(config, "num_hidden_layers"))
    return sum((k + 1) % step != 0 or k in only or k < first for k in layers)
