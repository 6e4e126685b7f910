"""Forward and backward over a plan, the optimizer, and full checkpoints of sharded states."""

# First, for its side effect: Megatron-Core's notices at import stay away.
from lightning_dcp import _megatron as _megatron
from lightning_dcp.config.optimizer import OptimizerSettings
from lightning_dcp.engine.agreement import agree_on_file
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
    StepResult,
)
from lightning_dcp.engine.lr_scheduler import lr_scheduler
from lightning_dcp.engine.optimizer import MegatronOptimizer, build_optimizer
from lightning_dcp.engine.prefetch import PlanningLoader
from lightning_dcp.planning import PlanSettings

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
    "lr_scheduler",
    "wrap_chunks",
    "wrap_ddp",
]
