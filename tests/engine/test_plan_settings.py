"""What the engine asks planning for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from lightning_dcp.engine import DynamicCPEngine, PlanSettings
from lightning_dcp.planning import execution_of

LENGTHS = np.array([30, 5, 9, 17, 3])


def plan_of(settings: PlanSettings, *, tp: int = 1, pp: int = 1, ep: int = 1):
    sizes = SimpleNamespace(
        dp_cp_size=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
    )
    engine = DynamicCPEngine(SimpleNamespace(sizes=sizes), settings)
    try:
        return engine._plan(LENGTHS)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "execution"),
    [
        (1, 1, 1, "free_running"),
        (2, 1, 1, "free_running"),
        (1, 2, 1, "lockstep"),
        (1, 1, 4, "lockstep"),
    ],
)
def test_plans_are_made_for_what_the_parallel_sizes_run(tp, pp, ep, execution):
    settings = PlanSettings(max_seqlen_per_dp_cp_rank=16)
    assert plan_of(settings, tp=tp, pp=pp, ep=ep).report.execution == execution
    assert execution_of(pipeline_model_parallel_size=pp, expert_model_parallel_size=ep) == execution


def test_packs_are_planned_with_their_padding():
    settings = PlanSettings(max_seqlen_per_dp_cp_rank=20, pad_to_length_bucket=8)
    bucketed = plan_of(settings)
    rows = [bucketed.rows(group) for step in bucketed.steps for group in step.groups]
    assert set(rows) <= {8, 16}
    settings = PlanSettings(max_seqlen_per_dp_cp_rank=20, pad_to_length=18)
    fixed = plan_of(settings)
    assert {fixed.rows(group) for step in fixed.steps for group in step.groups} == {18}


@pytest.mark.parametrize("execution", ["free_running", "lockstep"])
def test_a_given_execution_stays(execution):
    settings = PlanSettings(max_seqlen_per_dp_cp_rank=16, execution=execution)
    assert plan_of(settings).report.execution == execution
