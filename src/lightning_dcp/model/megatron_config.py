"""Megatron-Core's config, made from ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_dcp.config.model import ModelConfig, Recompute, check_mtp_recompute
from lightning_dcp.config.parallel import ParallelSizes


def transformer_config(
    config: ModelConfig,
    sizes: ParallelSizes,
    *,
    dtype: torch.dtype,
    cpu: bool,
    fused: bool,
    recompute: Recompute = Recompute(),
    fp8: str | None = None,
) -> TransformerConfig:
    """Megatron-Core's config of a model in a run; ``fused`` with TransformerEngine's kernels.

    Raises:
        ValueError: Multi-token prediction with a recomputation that Megatron-Core lacks for it.
    """
    check_mtp_recompute(config, recompute)
    options = recompute.megatron_options() | _pipeline_options(sizes, dtype)
    if config.moe is not None:
        options |= config.moe.megatron_options(config.ffn_width, grouped_gemm=fused)
    if fp8 is not None:
        # Packs are padded for its kernels; what an expert gets is not known before.
        options |= {"fp8": fp8, "moe_router_padding_for_quantization": config.moe is not None}
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        kv_channels=config.head_width,
        ffn_hidden_size=config.ffn_width,
        normalization="RMSNorm",
        layernorm_epsilon=config.layernorm_epsilon,
        qk_layernorm=config.qk_layernorm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        # None, not 0: by that the block of layers knows whether it ends in the norm.
        mtp_num_layers=config.mtp_num_layers or None,
        mtp_loss_scaling_factor=config.mtp_loss_scaling_factor,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=config.init_method_std,
        # The weights are drawn by their names afterwards, the same in any layout of ranks.
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Losses are sums of token losses; the engine divides once, by all target tokens.
        calculate_per_token_loss=True,
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        context_parallel_size=sizes.context_parallel_size,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        sequence_parallel=sizes.sequence_parallel,
        use_cpu_initialization=cpu,
        apply_rope_fusion=fused,
        bias_activation_fusion=not cpu,
        bias_dropout_fusion=not cpu,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **options,
    )


def _pipeline_options(sizes: ParallelSizes, dtype: torch.dtype) -> dict[str, Any]:
    if sizes.pipeline_model_parallel_size == 1:
        return {}
    virtual = sizes.virtual_pipeline_model_parallel_size
    return {
        "pipeline_dtype": dtype,
        # Stages send the shape first. Megatron-Core allows it with this dispatcher only, in dense
        # models too.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        # Two stages send in both directions between one pair of ranks. Batched, the two messages
        # get swapped, and nothing fails: micro-batches get each other's states.
        "overlap_p2p_comm": virtual > 1,
        "batch_p2p_comm": virtual == 1,
    }
