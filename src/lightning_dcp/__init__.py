"""Dynamic context parallelism for PyTorch Lightning on Megatron-Core.

Importing the package makes the strategy name ``dynamic_cp`` known to Lightning, and imports neither
Lightning nor torch nor Megatron-Core: each public name brings in its module when it is asked for.
"""

from typing import TYPE_CHECKING

from lightning_dcp._lazy import lazy_names
from lightning_dcp._registration import register_strategies

if TYPE_CHECKING:
    from lightning_dcp.callbacks import StepReport as StepReport
    from lightning_dcp.callbacks import ThroughputMonitor as ThroughputMonitor
    from lightning_dcp.config.model import ModelConfig as ModelConfig
    from lightning_dcp.config.model import Recompute as Recompute
    from lightning_dcp.config.moe import MoEConfig as MoEConfig
    from lightning_dcp.config.optimizer import LRSchedule as LRSchedule
    from lightning_dcp.config.optimizer import OptimizerSettings as OptimizerSettings
    from lightning_dcp.data import ParquetDataModule as ParquetDataModule
    from lightning_dcp.data import SyntheticDataModule as SyntheticDataModule
    from lightning_dcp.data import TextDataModule as TextDataModule
    from lightning_dcp.engine import DynamicCPEngine as DynamicCPEngine
    from lightning_dcp.engine import StepResult as StepResult
    from lightning_dcp.loss import linear_cross_entropy as linear_cross_entropy
    from lightning_dcp.module import DynamicCPModule as DynamicCPModule
    from lightning_dcp.objectives import DPO as DPO
    from lightning_dcp.objectives import SFT as SFT
    from lightning_dcp.objectives import Extra as Extra
    from lightning_dcp.objectives import Objective as Objective
    from lightning_dcp.objectives import PolicyLoss as PolicyLoss
    from lightning_dcp.objectives import TopKDistillation as TopKDistillation
    from lightning_dcp.objectives import ValueLoss as ValueLoss
    from lightning_dcp.packing import MicroBatch as MicroBatch
    from lightning_dcp.planning import Plan as Plan
    from lightning_dcp.planning import PlanError as PlanError
    from lightning_dcp.planning import PlanSettings as PlanSettings
    from lightning_dcp.planning import draw_plan as draw_plan
    from lightning_dcp.planning import plan_global_batch as plan_global_batch
    from lightning_dcp.prediction_writer import PredictionWriter as PredictionWriter
    from lightning_dcp.strategy import DynamicCPStrategy as DynamicCPStrategy
    from lightning_dcp.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from lightning_dcp.weight_averaging import WeightAveraging as WeightAveraging

# A public name and the module that has it; mypy reads the imports above instead.
_MODULES = {
    "DPO": "objectives",
    "DynamicCPEngine": "engine",
    "DynamicCPModule": "module",
    "DynamicCPStrategy": "strategy",
    "EMAWeightAveraging": "weight_averaging",
    "Extra": "objectives",
    "LRSchedule": "config.optimizer",
    "MicroBatch": "packing",
    "MoEConfig": "config.moe",
    "ModelConfig": "config.model",
    "Objective": "objectives",
    "OptimizerSettings": "config.optimizer",
    "ParquetDataModule": "data",
    "Plan": "planning",
    "PlanError": "planning",
    "PlanSettings": "planning",
    "PolicyLoss": "objectives",
    "PredictionWriter": "prediction_writer",
    "Recompute": "config.model",
    "SFT": "objectives",
    "StepReport": "callbacks",
    "StepResult": "engine",
    "SyntheticDataModule": "data",
    "TextDataModule": "data",
    "ThroughputMonitor": "callbacks",
    "TopKDistillation": "objectives",
    "ValueLoss": "objectives",
    "WeightAveraging": "weight_averaging",
    "draw_plan": "planning",
    "linear_cross_entropy": "loss",
    "plan_global_batch": "planning",
}
__all__ = list(_MODULES)

if not TYPE_CHECKING:  # With a __getattr__ any name would be right to mypy.
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

register_strategies()
