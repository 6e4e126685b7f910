"""Dynamic context parallelism for PyTorch Lightning on Megatron-Core.

Importing the package makes the strategy name ``dynamic_cp`` known to Lightning.
"""

from lightning_dcp import _megatron
from lightning_dcp.callbacks import StepReport
from lightning_dcp.config.schedule import LRSchedule
from lightning_dcp.data import ParquetDataModule, SyntheticDataModule, TextDataModule
from lightning_dcp.engine import OptimizerSettings
from lightning_dcp.loss import linear_cross_entropy
from lightning_dcp.model import ModelConfig, MoEConfig, Recompute
from lightning_dcp.module import DynamicCPModule
from lightning_dcp.objectives import (
    DPO,
    SFT,
    Objective,
    PolicyLoss,
    TopKDistillation,
    ValueLoss,
)
from lightning_dcp.packing import MicroBatch
from lightning_dcp.planning import Plan, PlanError, plan_global_batch
from lightning_dcp.prediction_writer import PredictionWriter
from lightning_dcp.strategy import DynamicCPStrategy

# Here for its side effects, and before the modules that import Megatron-Core themselves.
del _megatron

__all__ = [
    "DPO",
    "SFT",
    "DynamicCPModule",
    "DynamicCPStrategy",
    "LRSchedule",
    "MicroBatch",
    "MoEConfig",
    "ModelConfig",
    "Objective",
    "OptimizerSettings",
    "ParquetDataModule",
    "Plan",
    "PlanError",
    "PolicyLoss",
    "PredictionWriter",
    "Recompute",
    "StepReport",
    "SyntheticDataModule",
    "TextDataModule",
    "TopKDistillation",
    "ValueLoss",
    "linear_cross_entropy",
    "plan_global_batch",
]
