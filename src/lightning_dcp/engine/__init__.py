"""The engine: plans of global batches, and forward and backward over them; works without Lightning.

With ``setup_parallel`` and ``install_cp_hooks`` (``lightning_dcp.parallel``) and ``build_model``
(``lightning_dcp.model``) this is all that a training loop of one's own needs.
"""

# First, for its side effect: Megatron-Core's notices at import stay away.
from lightning_dcp import _megatron as _megatron
from lightning_dcp.config.optimizer import OptimizerSettings
from lightning_dcp.engine.agreement import (
    OtherRankError,
    Signals,
    raised_on_all,
    read_cost_model,
)
from lightning_dcp.engine.averages import AveragedWeights
from lightning_dcp.engine.between_runs import logits_between_runs
from lightning_dcp.engine.checkpoint import CheckpointFormat
from lightning_dcp.engine.checkpoint.files import check_model, read_on_all_ranks, read_weights, sign
from lightning_dcp.engine.checkpoint.whole import (
    WHOLE,
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
    load_kept_weights,
)
from lightning_dcp.engine.ddp import check_wrapped, wrap_chunks, wrap_ddp, wrap_module
from lightning_dcp.engine.losses import MetricSums
from lightning_dcp.engine.micro_batches import PlannedBatch
from lightning_dcp.engine.optimizer import MegatronOptimizer, build_optimizer, lr_scheduler
from lightning_dcp.engine.prefetch import PlanningLoader
from lightning_dcp.engine.run import DynamicCPEngine, StepResult
from lightning_dcp.planning import PlanSettings

__all__ = [
    "WHOLE",
    "AveragedWeights",
    "CheckpointFormat",
    "DynamicCPEngine",
    "MegatronOptimizer",
    "MetricSums",
    "OptimizerSettings",
    "OtherRankError",
    "PlanSettings",
    "PlannedBatch",
    "PlanningLoader",
    "Signals",
    "StepResult",
    "build_optimizer",
    "check_model",
    "check_wrapped",
    "full_model_state",
    "full_optimizer_state",
    "load_full_model_state",
    "load_full_optimizer_state",
    "load_kept_weights",
    "logits_between_runs",
    "lr_scheduler",
    "raised_on_all",
    "read_cost_model",
    "read_on_all_ranks",
    "read_weights",
    "sign",
    "wrap_chunks",
    "wrap_ddp",
    "wrap_module",
]
