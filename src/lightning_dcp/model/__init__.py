"""The model: Megatron-Core's GPTModel, with attention for packed sequences under any CP group."""

from lightning_dcp.config.model import ModelConfig, Recompute
from lightning_dcp.config.moe import MoEConfig
from lightning_dcp.model.build import build_gpt_model, build_model, model_chunks
from lightning_dcp.model.outputs import HiddenStates, hidden_states, stage_output, whole_logits
from lightning_dcp.model.router_replay import check_routers
from lightning_dcp.model.routes import ROUTES, RouteShape, check_routes

__all__ = [
    "ROUTES",
    "HiddenStates",
    "MoEConfig",
    "ModelConfig",
    "Recompute",
    "RouteShape",
    "build_gpt_model",
    "build_model",
    "check_routers",
    "check_routes",
    "hidden_states",
    "model_chunks",
    "stage_output",
    "whole_logits",
]
