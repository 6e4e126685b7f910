"""Builds Megatron-Core's GPTModel; the only place that does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from lightning_dcp.model.attention import PackedAttention
from lightning_dcp.model.config import ModelConfig, transformer_config
from lightning_dcp.model.value_head import put_value_head
from lightning_dcp.parallel import ParallelContext, quiet_megatron

# Rope needs no table of positions; Megatron-Core asks for the number all the same.
_ANY_SEQUENCE_LENGTH = 1 << 31


def build_gpt_model(
    config: ModelConfig,
    context: ParallelContext,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> GPTModel:
    """Builds the model of this rank; CP hooks are not installed yet.

    TransformerEngine serves it where it is installed and there is a GPU; PyTorch elsewhere.

    Args:
        config: The model's sizes.
        context: The parallel state.
        dtype: Of the weights.
        seed: Of the initial weights; the same on all ranks. The caller's random state is kept.

    Raises:
        ValueError: A tensor-parallel size that does not divide what it splits.
    """
    config.check_tensor_parallel(context.sizes.tensor_model_parallel_size)
    fused = HAVE_TE and not context.cpu_mode
    spec = _fused_spec(config) if fused else _torch_spec(config)
    with _seeded(seed, context), quiet_megatron():
        model = GPTModel(
            config=transformer_config(
                config, context.sizes, dtype=dtype, cpu=context.cpu_mode, fused=fused
            ),
            transformer_layer_spec=spec,
            vocab_size=config.padded_vocab_size,
            max_sequence_length=_ANY_SEQUENCE_LENGTH,
            position_embedding_type="rope",
            rotary_base=config.rotary_base,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            pg_collection=context.pg_collection,
        )
        if config.head == "value":
            put_value_head(model)
        # Torch's norms make their weights in the default type.
        return model.to(dtype)


def _fused_spec(config: ModelConfig) -> ModuleSpec:
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)


def _torch_spec(config: ModelConfig) -> TransformerBlockSubmodules:
    """Megatron-Core's local layer with our attention, and torch's norm at the end of the block.

    The norm is named here because Megatron-Core would otherwise take TransformerEngine's wherever
    that is importable, GPU or not.
    """
    submodules = get_gpt_layer_local_submodules(
        qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    submodules.self_attention.submodules.core_attention = PackedAttention
    layer = ModuleSpec(module=TransformerLayer, submodules=submodules)
    return TransformerBlockSubmodules(
        layer_specs=[layer] * config.num_layers, layer_norm=WrappedTorchNorm
    )


@contextmanager
def _seeded(seed: int, context: ParallelContext) -> Iterator[None]:
    if context.cpu_mode:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
        return
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        yield
