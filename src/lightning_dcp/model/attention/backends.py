"""Which attention serves a model: a table from the option's values to the layers they make.

To add one, write a function that gives Megatron-Core's submodules of a layer, with a core attention
that follows ``packed_seq_params.cp_group``, and put it in :data:`BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from lightning_dcp.config.model import ModelConfig
from lightning_dcp.model.attention.packed import PackedAttention
from lightning_dcp.model.layers import RMSNorm


@dataclass(frozen=True)
class AttentionBackend:
    """An attention, and the layer that it comes in.

    Attributes:
        layer: Makes the submodules of a transformer layer.
        norm: Of the block's end, and of depths of multi-token prediction.
        fused: Whether TransformerEngine's kernels serve the rest of the layer too: rope, grouped
            products of experts, FP8.
    """

    layer: Callable[[ModelConfig], TransformerLayerSubmodules]
    norm: Any
    fused: bool


def choose_backend(name: str, *, cpu_mode: bool) -> AttentionBackend:
    """The backend of a run: a key of :data:`BACKENDS`, or "auto".

    That is TransformerEngine's where it is installed and there is a GPU, PyTorch's elsewhere.

    Raises:
        ValueError: There is no such backend, or it cannot serve this run.
    """
    te_serves = HAVE_TE and not cpu_mode
    if name == "auto":
        name = "te" if te_serves else "torch"
    if name not in BACKENDS:
        raise ValueError(f"attention_backend={name!r} is none of {', '.join(['auto', *BACKENDS])}.")
    if BACKENDS[name].fused and not te_serves:
        missing = "the run is on the CPU" if HAVE_TE else "it is not installed"
        raise ValueError(
            f"attention_backend={name!r} needs TransformerEngine and a GPU, and {missing}. "
            "Leave it at 'auto', or use 'torch'."
        )
    return BACKENDS[name]


def _te_layer(config: ModelConfig) -> TransformerLayerSubmodules:
    return get_gpt_layer_with_transformer_engine_submodules(
        num_experts=config.moe.num_experts if config.moe else None,
        # All experts of a rank in one grouped product; PyTorch's layer takes them one by one.
        moe_grouped_gemm=config.moe is not None,
        qk_layernorm=config.qk_layernorm,
    )


def _torch_layer(config: ModelConfig) -> TransformerLayerSubmodules:
    submodules = get_gpt_layer_local_submodules(
        num_experts=config.moe.num_experts if config.moe else None,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    # Megatron-Core's local layer takes TransformerEngine's norms wherever that is importable, GPU
    # or not: all of them are named here.
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    attention = submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        # Only with the option: Megatron-Core refuses a spec that names them without it.
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return submodules


BACKENDS = {
    "torch": AttentionBackend(_torch_layer, norm=RMSNorm, fused=False),
    "te": AttentionBackend(_te_layer, norm=TENorm, fused=True),
}
"""By the name that ``ModelConfig.attention_backend`` takes."""
