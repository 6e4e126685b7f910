"""What is trained for, on per-token log-probabilities. Torch, no Megatron-Core, no Lightning."""

from lightning_dcp.objectives.base import Extra, Objective
from lightning_dcp.objectives.distillation import TopKDistillation
from lightning_dcp.objectives.outputs import FusedOutputs, LogitsOutputs, TargetOutputs
from lightning_dcp.objectives.policy import PolicyLoss
from lightning_dcp.objectives.sft import SFT

__all__ = [
    "SFT",
    "Extra",
    "FusedOutputs",
    "LogitsOutputs",
    "Objective",
    "PolicyLoss",
    "TargetOutputs",
    "TopKDistillation",
]
