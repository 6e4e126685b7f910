"""The model's sizes: defaults, Megatron-Core's config of them, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_dcp.model import ModelConfig
from lightning_dcp.model.megatron_config import transformer_config
from lightning_dcp.parallel import ParallelSizes, quiet_megatron


def test_derived_sizes():
    config = ModelConfig(hidden_size=96, num_attention_heads=6, vocab_size=130)
    assert config.query_groups == 6
    assert config.head_width == 16
    # 8 / 3 of 96 is a multiple of 64 as it is.
    assert config.ffn_width == 256
    assert config.padded_vocab_size == 256


@pytest.mark.parametrize(("hidden", "ffn"), [(64, 192), (96, 256), (97, 320), (4096, 10944)])
def test_default_mlp_width(hidden, ffn):
    config = ModelConfig(hidden_size=hidden, num_attention_heads=1, kv_channels=2)
    assert config.ffn_width == ffn
    assert ffn % 64 == 0
    assert 0 <= ffn - 8 * hidden / 3 < 64


@pytest.mark.parametrize(
    ("vocab", "multiple", "padded"), [(128, 128, 128), (129, 128, 256), (1, 8, 8), (61, 1, 61)]
)
def test_padded_vocabulary(vocab, multiple, padded):
    config = ModelConfig(vocab_size=vocab, make_vocab_size_divisible_by=multiple)
    assert config.padded_vocab_size == padded


def test_given_sizes_win():
    config = ModelConfig(
        hidden_size=10, num_attention_heads=4, num_query_groups=2, kv_channels=6, ffn_hidden_size=7
    )
    assert (config.query_groups, config.head_width, config.ffn_width) == (2, 6, 7)


@pytest.mark.parametrize(
    "name",
    [
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "ffn_hidden_size",
        "vocab_size",
        "make_vocab_size_divisible_by",
    ],
)
@pytest.mark.parametrize("value", [0, -8])
def test_sizes_below_one(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be 1 or more"):
        ModelConfig(**{name: value})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"hidden_size": 100, "num_attention_heads": 8},
            "hidden_size=100 is not a multiple of num_attention_heads=8.*give kv_channels",
        ),
        (
            {"hidden_size": 24, "num_attention_heads": 8},
            "width of a head must be even for rope, found 3",
        ),
        ({"kv_channels": 5}, "width of a head must be even for rope, found 5"),
        (
            {"num_attention_heads": 8, "num_query_groups": 3},
            "num_attention_heads=8 is not a multiple of num_query_groups=3",
        ),
        (
            {"num_attention_heads": 8, "num_query_groups": 16},
            "num_attention_heads=8 is not a multiple of num_query_groups=16",
        ),
    ],
)
def test_sizes_that_do_not_fit_each_other(sizes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**sizes)


SPLIT = ModelConfig(
    hidden_size=48,
    num_attention_heads=12,
    num_query_groups=6,
    ffn_hidden_size=24,
    vocab_size=30,
    make_vocab_size_divisible_by=12,
)


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_tensor_parallel_sizes_that_divide(tp):
    SPLIT.check_tensor_parallel(tp)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"num_query_groups": 2}, 8, "size=8 does not divide num_attention_heads=12"),
        ({"num_query_groups": 2}, 3, "size=3 does not divide num_query_groups=2"),
        ({"ffn_hidden_size": 25}, 2, "size=2 does not divide ffn_hidden_size=25"),
        (
            {"make_vocab_size_divisible_by": 31},
            2,
            r"size=2 does not divide the padded vocabulary \(make_vocab_size_divisible_by\)=31",
        ),
    ],
)
def test_tensor_parallel_sizes_that_do_not_divide(changes, tp, message):
    config = dataclasses.replace(SPLIT, **changes)
    with pytest.raises(ValueError, match=f"tensor_model_parallel_{message}"):
        config.check_tensor_parallel(tp)


def test_megatron_config():
    config = dataclasses.replace(SPLIT, layernorm_epsilon=1e-6, num_layers=3)
    sizes = ParallelSizes(world_size=4, tensor_model_parallel_size=2)
    with quiet_megatron():
        made = transformer_config(config, sizes, dtype=torch.bfloat16, cpu=True, fused=False)
    assert (made.num_layers, made.hidden_size, made.ffn_hidden_size) == (3, 48, 24)
    assert (made.num_attention_heads, made.num_query_groups, made.kv_channels) == (12, 6, 4)
    assert made.layernorm_epsilon == 1e-6
    assert made.params_dtype is torch.bfloat16
    assert made.bf16
    assert made.tensor_model_parallel_size == 2
    assert made.use_cpu_initialization
    # The engine divides by all target tokens, once; dropout would need CUDA's random states.
    assert made.calculate_per_token_loss
    assert made.hidden_dropout == made.attention_dropout == 0.0
