"""What is trained for, on log-probabilities or values. Torch, no Megatron-Core, no Lightning."""

from lightning_dcp.objectives.base import Extra, Objective
from lightning_dcp.objectives.distillation import TopKDistillation
from lightning_dcp.objectives.policy import PolicyLoss
from lightning_dcp.objectives.preference import DPO
from lightning_dcp.objectives.sequences import once_per_group, sequence_means, sequence_sums
from lightning_dcp.objectives.sft import SFT
from lightning_dcp.objectives.target_outputs import (
    FusedOutputs,
    LogitsOutputs,
    TargetOutputs,
    ValueOutputs,
)
from lightning_dcp.objectives.value import ValueLoss

__all__ = [
    "DPO",
    "SFT",
    "Extra",
    "FusedOutputs",
    "LogitsOutputs",
    "Objective",
    "PolicyLoss",
    "TargetOutputs",
    "TopKDistillation",
    "ValueLoss",
    "ValueOutputs",
    "once_per_group",
    "sequence_means",
    "sequence_sums",
]
