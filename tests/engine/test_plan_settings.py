"""What the engine asks planning for."""

from __future__ import annotations

import pytest

from lightning_dcp.config.padding import PackPadding
from lightning_dcp.config.parallel import ParallelSizes
from lightning_dcp.planning import PlanSettings, make_plan

LENGTHS = [30, 5, 9, 17, 3]


def plan_of(*, tp: int = 1, pp: int = 1, ep: int = 1, cap: int = 16, **options):
    sizes = ParallelSizes(
        world_size=4 * tp * pp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
    )
    settings = PlanSettings.of_run(sizes, max_seqlen_per_dp_cp_rank=cap, **options)
    return make_plan(LENGTHS, settings)


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
    assert plan_of(tp=tp, pp=pp, ep=ep).report.execution == execution


def test_packs_are_planned_with_their_padding():
    bucketed = plan_of(cap=20, padding=PackPadding(pad_to_length_bucket=8))
    rows = [bucketed.rows(group) for step in bucketed.steps for group in step.groups]
    assert set(rows) <= {8, 16}
    fixed = plan_of(cap=20, padding=PackPadding(pad_to_length=18))
    assert {fixed.rows(group) for step in fixed.steps for group in step.groups} == {18}


@pytest.mark.parametrize("execution", ["free_running", "lockstep"])
def test_a_given_execution_stays(execution):
    assert plan_of(execution=execution).report.execution == execution


def test_only_the_static_planner_gets_a_cp_size():
    sizes = ParallelSizes(world_size=4, context_parallel_size=2)
    for planner, size in (("static", 2), ("balanced", None)):
        settings = PlanSettings.of_run(sizes, max_seqlen_per_dp_cp_rank=16, planner=planner)
        assert settings.context_parallel_size == size
