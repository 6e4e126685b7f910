"""Forward and backward over a plan, the optimizer, and full checkpoints of sharded states."""

from lightning_dcp.engine.agreement import agree_on_file
from lightning_dcp.engine.ahead import PlanningLoader
from lightning_dcp.engine.checkpoint import (
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
)
from lightning_dcp.engine.ddp import wrap_chunks, wrap_ddp
from lightning_dcp.engine.engine import (
    DynamicCPEngine,
    PlannedBatch,
    PlanSettings,
    StepResult,
)
from lightning_dcp.engine.optimizer import MegatronOptimizer, OptimizerSettings, build_optimizer

__all__ = [
    "DynamicCPEngine",
    "MegatronOptimizer",
    "OptimizerSettings",
    "PlanSettings",
    "PlannedBatch",
    "PlanningLoader",
    "StepResult",
    "agree_on_file",
    "build_optimizer",
    "full_model_state",
    "full_optimizer_state",
    "load_full_model_state",
    "load_full_optimizer_state",
    "wrap_chunks",
    "wrap_ddp",
]
