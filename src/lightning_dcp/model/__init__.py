"""The model: Megatron-Core's GPTModel, with attention for packed sequences under any CP group."""

from lightning_dcp.model.build import build_gpt_model
from lightning_dcp.model.config import ModelConfig, Recompute
from lightning_dcp.model.moe_config import MoEConfig
from lightning_dcp.model.mtp import take_mtp_losses
from lightning_dcp.model.outputs import HiddenStates, hidden_states, whole_logits

__all__ = [
    "HiddenStates",
    "MoEConfig",
    "ModelConfig",
    "Recompute",
    "build_gpt_model",
    "hidden_states",
    "take_mtp_losses",
    "whole_logits",
]
