"""The model: Megatron-Core's GPTModel, with attention for packed sequences under any CP group."""

from lightning_dcp.model.build import build_gpt_model, build_model, model_chunks
from lightning_dcp.model.config import ModelConfig, Recompute
from lightning_dcp.model.moe_config import MoEConfig
from lightning_dcp.model.outputs import HiddenStates, hidden_states, stage_output, whole_logits

__all__ = [
    "HiddenStates",
    "MoEConfig",
    "ModelConfig",
    "Recompute",
    "build_gpt_model",
    "build_model",
    "hidden_states",
    "model_chunks",
    "stage_output",
    "whole_logits",
]
