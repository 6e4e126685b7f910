"""The model: Megatron-Core's GPTModel, with attention for packed sequences under any CP group."""

# First, for its side effect: Megatron-Core's notices at import stay away.
from lightning_dcp import _megatron as _megatron
from lightning_dcp.config.model import ModelConfig, Recompute
from lightning_dcp.config.moe import MoEConfig
from lightning_dcp.model.build import build_gpt_model, build_model, model_chunks
from lightning_dcp.model.forward import HiddenStates, hidden_states, stage_output, whole_logits
from lightning_dcp.model.router_replay import check_routers, gather_recorded

__all__ = [
    "HiddenStates",
    "MoEConfig",
    "ModelConfig",
    "Recompute",
    "build_gpt_model",
    "build_model",
    "check_routers",
    "gather_recorded",
    "hidden_states",
    "model_chunks",
    "stage_output",
    "whole_logits",
]
