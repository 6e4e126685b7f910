"""What is predicted of a plan, checked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from planning_workloads import predictions, workloads

from lightning_dcp.planning import (
    CostModel,
    Group,
    Plan,
    PlanError,
    Step,
    evaluate,
    group_times,
    plan_global_batch,
)

# Rows take 1 s, every further rank of a group 10 s, each micro-batch 100 s; attention is free.
MODEL = CostModel(
    seconds_per_row=1.0, seconds_per_pair=0.0, kv_seconds_per_row_within=0.0,
    hop_seconds_within=10.0, fixed_seconds=100.0, activation_bytes_per_row=8.0,
)  # fmt: skip
# Rank 0 is done after 130 s, rank 1 after 105 s; then 100 + 10 + 4 s on both.
PLAN = Plan(
    (Step((Group(0, 1, (0,)), Group(1, 1, (1,)))), Step((Group(0, 2, (2,)),))),
    lengths=(30, 5, 7),
    num_ranks=2,
    max_seqlen_per_dp_cp_rank=32,
)


def test_lockstep() -> None:
    report = evaluate(PLAN, MODEL)
    assert report.predicted_seconds == 130 + 114
    assert report.tokens_per_second == pytest.approx(42 / 244)
    total = 2 * 244
    assert report.idle_share == pytest.approx(25 / total)
    assert report.communication_share == pytest.approx(2 * 10 / total)
    # 7 tokens take 8 on two ranks.
    assert report.padding_share == pytest.approx(1 / total)
    assert report.peak_activation_bytes == 30 * 8
    assert report.quality == report.bound_seconds / 244


def test_exposed_communication_counts() -> None:
    model = CostModel(
        seconds_per_row=1.0, seconds_per_pair=0.0, kv_seconds_per_row_within=3.0,
        hop_seconds_within=0.0, fixed_seconds=0.0,
    )  # fmt: skip
    report = evaluate(PLAN, model)
    assert report.predicted_seconds == 30 + 4 + 12
    assert report.communication_share == pytest.approx(2 * 12 / (2 * 46))


def test_free_running_ranks_wait_only_for_their_group() -> None:
    steps = (
        Step((Group(0, 1, (0,)), Group(1, 1, (1,)))),
        Step((Group(0, 1, (3,)), Group(1, 1, (2,)))),
    )
    plan = Plan(steps, lengths=(30, 5, 28, 2), num_ranks=2, max_seqlen_per_dp_cp_rank=32)
    assert evaluate(plan, MODEL).predicted_seconds == 130 + 128
    free = evaluate(plan, MODEL, execution="free_running")
    assert free.predicted_seconds == max(130 + 102, 105 + 128)
    # A group of both ranks waits for the later one.
    assert evaluate(PLAN, MODEL, execution="free_running").predicted_seconds == 130 + 114


@settings(max_examples=60, deadline=None)
@given(workload=workloads(), prediction=predictions())
def test_every_plan_carries_what_evaluate_says(workload: dict, prediction: dict) -> None:
    plan = plan_global_batch(**workload, **prediction)
    model, execution = prediction["cost_model"], prediction["execution"]
    report = evaluate(plan, model, execution=execution)
    assert plan.report == report
    assert plan.quality == report.quality
    lockstep = evaluate(plan, model)
    assert lockstep.predicted_seconds == pytest.approx(sum(map(max, group_times(plan, model))))
    assert report.predicted_seconds <= lockstep.predicted_seconds * (1 + 1e-9)
    for share in (report.idle_share, report.padding_share, report.communication_share):
        assert 0 <= share < 1


def test_a_plan_can_be_predicted_with_another_model() -> None:
    plan = plan_global_batch([9, 30, 4], num_ranks=2, max_seqlen_per_dp_cp_rank=32)
    slow = CostModel(seconds_per_row=1.0)
    assert evaluate(plan, slow).predicted_seconds > 1000 * plan.report.predicted_seconds


def test_a_broken_plan_is_not_predicted() -> None:
    plan = Plan(PLAN.steps[:1], lengths=(30, 5, 7), num_ranks=2, max_seqlen_per_dp_cp_rank=32)
    with pytest.raises(PlanError, match="in no group: sample 2"):
        evaluate(plan, MODEL)


def test_an_unknown_execution() -> None:
    with pytest.raises(ValueError, match=r"execution='eager' is unknown; choose 'lockstep' or"):
        plan_global_batch([4], num_ranks=1, max_seqlen_per_dp_cp_rank=8, execution="eager")
