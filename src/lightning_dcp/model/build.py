"""Builds Megatron-Core's GPTModel; the only place that does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from lightning_dcp.config.model import ModelConfig, Recompute
from lightning_dcp.model.attention.backends import AttentionBackend, choose_backend
from lightning_dcp.model.chunk import ModelChunk
from lightning_dcp.model.experts import PackedMoELayer, PackedTopKRouter
from lightning_dcp.model.global_names import initialize, mark_whole_experts, use_whole_names
from lightning_dcp.model.layers import put_value_head
from lightning_dcp.model.megatron_config import transformer_config
from lightning_dcp.model.mtp import MTPModel, mtp_block
from lightning_dcp.parallel import ParallelContext, quiet_megatron

# Rope needs no table of positions; Megatron-Core asks for the number all the same.
_ANY_SEQUENCE_LENGTH = 1 << 31


def build_gpt_model(
    config: ModelConfig,
    context: ParallelContext,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    recompute: Recompute = Recompute(),
    fp8: str | None = None,
    virtual_stage: int | None = None,
) -> ModelChunk:
    """Builds the model of this rank, or one chunk of it; CP hooks are not installed yet.

    Args:
        config: The model's sizes.
        context: The parallel state.
        dtype: Of the weights.
        seed: Of the initial weights; the same on all ranks. The caller's random state is kept.
        recompute: What the backward pass computes again.
        fp8: Format of eight bits for matrix products, on GPUs.
        virtual_stage: Which of this rank's chunks, under virtual pipeline stages.

    Raises:
        ValueError: A parallel size that does not divide what it splits, or an attention that cannot
            serve the run.
    """
    # Under the strategy its rules have said so already; a loop over the engine comes here first.
    config.check_parallel(context.sizes)
    backend = choose_backend(config.attention_backend, cpu_mode=context.cpu_mode)
    fused = backend.fused
    if fp8 is not None and not fused:
        raise ValueError(
            f"fp8={fp8!r} needs TransformerEngine's layers: attention_backend="
            f"{config.attention_backend!r} gives PyTorch's here."
        )
    with _seeded(seed, context), quiet_megatron():
        megatron_config = transformer_config(
            config,
            context.sizes,
            dtype=dtype,
            cpu=context.cpu_mode,
            fused=fused,
            recompute=recompute,
            fp8=fp8,
        )
        layer = _layer(backend, config)
        make: Any = ModelChunk
        if config.mtp_num_layers:
            depths = mtp_block(layer, megatron_config, virtual_stage, fused=fused)
            make = partial(MTPModel, real_vocab_size=config.vocab_size, mtp_block_spec=depths)
        model: ModelChunk = make(
            config=megatron_config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[layer] * get_num_layers_to_build(megatron_config, virtual_stage),
                layer_norm=backend.norm,
            ),
            vocab_size=config.padded_vocab_size,
            max_sequence_length=_ANY_SEQUENCE_LENGTH,
            position_embedding_type="rope",
            rotary_base=config.rotary_base,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            pg_collection=context.pg_collection,
            pre_process=context.starts_model(virtual_stage),
            post_process=context.ends_model(virtual_stage),
            vp_stage=virtual_stage,
        )
        model.context = context
        if config.head == "value":
            put_value_head(model)
        mark_whole_experts(model)
        initialize(model, megatron_config, context, seed=seed)
        if virtual_stage is None:
            use_whole_names(model, context)
        return model


def _layer(backend: AttentionBackend, config: ModelConfig) -> ModuleSpec:
    """A transformer layer, with our router and MoE layer where the model has experts."""
    submodules = backend.layer(config)
    if config.moe is not None:
        mlp: Any = submodules.mlp
        experts = copy.copy(mlp.keywords["submodules"])
        experts.router = PackedTopKRouter
        submodules.mlp = partial(PackedMoELayer, submodules=experts)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def build_model(
    config: ModelConfig,
    context: ParallelContext,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    recompute: Recompute = Recompute(),
    fp8: str | None = None,
) -> torch.nn.Module:
    """This rank's part of the model: a GPTModel, or a ``ModuleList`` of its virtual stages' chunks.

    Options and errors are those of :func:`build_gpt_model`.
    """
    build: Callable[..., torch.nn.Module] = partial(
        build_gpt_model, config, context, dtype=dtype, seed=seed, recompute=recompute, fp8=fp8
    )
    virtual = context.sizes.virtual_pipeline_model_parallel_size
    if virtual == 1:
        return build()
    chunks = torch.nn.ModuleList(build(virtual_stage=stage) for stage in range(virtual))
    use_whole_names(chunks, context)
    return chunks


def model_chunks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The chunks of what :func:`build_model` gave, in the order of the layers."""
    return list(model) if isinstance(model, torch.nn.ModuleList) else [model]


@contextmanager
def _seeded(seed: int, context: ParallelContext) -> Iterator[None]:
    devices = [] if context.cpu_mode else [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        if not context.cpu_mode:
            # Sequence parallelism forks Megatron-Core's random states: there must be some.
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        yield
