"""The planner ``megatron``: Megatron-Core's own scheduler, where the installed build has it."""

from __future__ import annotations

import importlib

from lightning_dcp.planning.plan import Step
from lightning_dcp.planning.problem import Problem

# Where the development branch keeps the scheduler. Looked up by name when it is asked for: the
# import pulls in torch, which planning does without.
_MODULE = "megatron.core.datasets.data_schedule"
_CLASS = "DefaultDynamicCPScheduler"


def plan_megatron(problem: Problem) -> list[Step]:
    """Refuses, and says which Megatron-Core build has the scheduler.

    Args:
        problem: The planning request.

    Raises:
        ImportError: The installed Megatron-Core has no ``DefaultDynamicCPScheduler``.
        NotImplementedError: It has one, but there is no adapter for it yet.
    """
    if not has_megatron_scheduler():
        raise ImportError(
            "planner='megatron' needs a Megatron-Core build with DefaultDynamicCPScheduler (its "
            "dev branch); the installed build has none. Use planner='balanced'"
        )
    raise NotImplementedError(
        f"planner='megatron': the installed Megatron-Core has {_CLASS}, but its plans for the "
        f"{problem.num_ranks} DPxCP ranks cannot be converted yet. Use planner='balanced'"
    )


def has_megatron_scheduler() -> bool:
    """Whether the installed Megatron-Core has ``DefaultDynamicCPScheduler``."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        return False
    return hasattr(module, _CLASS)
