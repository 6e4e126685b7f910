"""Parallel sizes that a model cannot be cut to, and experts that contradict each other."""

from __future__ import annotations

import pytest

from lightning_dcp.model import ModelConfig, MoEConfig, Recompute
from lightning_dcp.parallel import ParallelSizes

EXPERTS = ModelConfig(num_layers=4, moe=MoEConfig(num_experts=6, topk=2))


def sizes(**options: object) -> ParallelSizes:
    return ParallelSizes(world_size=8, **options)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            ModelConfig(num_layers=6),
            {"pipeline_model_parallel_size": 4},
            "num_layers=6 is not a multiple of .*=4 x virtual_pipeline_model_parallel_size=1 = 4",
        ),
        (
            ModelConfig(num_layers=6),
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "num_layers=6 .*virtual_pipeline_model_parallel_size=2 = 4",
        ),
        (ModelConfig(), {"expert_model_parallel_size": 2}, "the model has none"),
        (
            EXPERTS,
            {"expert_model_parallel_size": 4},
            "expert_model_parallel_size=4 does not divide moe.num_experts=6",
        ),
        (EXPERTS, {"tensor_model_parallel_size": 2}, "experts needs sequence_parallel=True"),
        (
            ModelConfig(moe=MoEConfig(token_dispatcher="allgather")),
            {"pipeline_model_parallel_size": 2},
            "token_dispatcher='allgather' does not work with pipeline_model_parallel_size=2",
        ),
        (
            ModelConfig(num_query_groups=2),
            {"tensor_model_parallel_size": 4},
            "tensor_model_parallel_size=4 does not divide num_query_groups=2",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_model(config, options, message):
    with pytest.raises(ValueError, match=message):
        config.check_parallel(sizes(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "moe.num_experts=0 must be 1 or more"),
        ({"num_experts": 2, "topk": 3}, "moe.topk=3 is more than the moe.num_experts=2"),
        ({"aux_loss_coeff": -1.0}, "moe.aux_loss_coeff=-1.0 must be finite and not negative"),
        ({"expert_bias": True}, "needs moe.score_function='sigmoid', found 'softmax'"),
        ({"router_fusion": True, "router_replay": True}, "Turn one of them off"),
    ],
)
def test_experts_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "recompute.num_layers=0 must be 1 or more"),
        ({"modules": ("attn",)}, r"found \['attn'\]"),
    ],
)
def test_recomputation_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        Recompute(**options)
