"""What is trained for, on log-probabilities or values. Torch, no Megatron-Core, no Lightning."""

from lightning_dcp.objectives.distillation import TopKDistillation as TopKDistillation
from lightning_dcp.objectives.objective import Extra as Extra
from lightning_dcp.objectives.objective import Objective as Objective
from lightning_dcp.objectives.policy import PolicyLoss as PolicyLoss
from lightning_dcp.objectives.preference import DPO as DPO
from lightning_dcp.objectives.sequences import once_per_group as once_per_group
from lightning_dcp.objectives.sequences import sequence_means as sequence_means
from lightning_dcp.objectives.sequences import sequence_sums as sequence_sums
from lightning_dcp.objectives.sft import SFT as SFT
from lightning_dcp.objectives.target_outputs import FusedOutputs as FusedOutputs
from lightning_dcp.objectives.target_outputs import LogitsOutputs as LogitsOutputs
from lightning_dcp.objectives.target_outputs import TargetOutputs as TargetOutputs
from lightning_dcp.objectives.target_outputs import ValueOutputs as ValueOutputs
from lightning_dcp.objectives.value import ValueLoss as ValueLoss
