"""Planning: which ranks run which samples together, step by step. Pure Python and NumPy."""

from lightning_dcp.config.model_sizes import LLAMA_8B, QWEN3_30B_A3B, ModelSizes
from lightning_dcp.config.parallel import Execution
from lightning_dcp.planning.api import PLANNERS, Planner, make_plan, plan_global_batch
from lightning_dcp.planning.bound import lower_bound
from lightning_dcp.planning.cost.calibration import (
    MeasuredMicroBatch,
    fit_cost_model,
    predict,
    r_squared,
)
from lightning_dcp.planning.cost.estimate import cost_model_of_run
from lightning_dcp.planning.cost.model import CostModel, CostParts
from lightning_dcp.planning.cost.presets import CPU, H100, H200, DevicePreset, preset_of
from lightning_dcp.planning.draw import draw_plan
from lightning_dcp.planning.plan import Group, Plan, PlanError, PlanReport, Step
from lightning_dcp.planning.planners.megatron import has_megatron_scheduler
from lightning_dcp.planning.planners.packs import Pack, complete, lay_out
from lightning_dcp.planning.report import evaluate, group_times
from lightning_dcp.planning.request import PlanRequest, PlanSettings

__all__ = [
    "CPU",
    "H100",
    "H200",
    "LLAMA_8B",
    "PLANNERS",
    "QWEN3_30B_A3B",
    "CostModel",
    "CostParts",
    "DevicePreset",
    "Execution",
    "Group",
    "MeasuredMicroBatch",
    "ModelSizes",
    "Pack",
    "Plan",
    "PlanError",
    "PlanReport",
    "PlanRequest",
    "PlanSettings",
    "Planner",
    "Step",
    "complete",
    "cost_model_of_run",
    "draw_plan",
    "evaluate",
    "fit_cost_model",
    "group_times",
    "has_megatron_scheduler",
    "lay_out",
    "lower_bound",
    "make_plan",
    "plan_global_batch",
    "predict",
    "preset_of",
    "r_squared",
]
