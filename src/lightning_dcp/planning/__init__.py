"""Planning: which ranks run which samples together, step by step. Pure Python and NumPy."""

from lightning_dcp.planning.api import PLANNERS, Planner, plan_global_batch
from lightning_dcp.planning.cost import CostModel
from lightning_dcp.planning.packs import Pack, complete, lay_out
from lightning_dcp.planning.plan import Group, Plan, PlanError, Step
from lightning_dcp.planning.problem import Problem

__all__ = [
    "PLANNERS",
    "CostModel",
    "Group",
    "Pack",
    "Plan",
    "PlanError",
    "Planner",
    "Problem",
    "Step",
    "complete",
    "lay_out",
    "plan_global_batch",
]
