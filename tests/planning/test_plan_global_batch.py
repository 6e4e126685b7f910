"""What holds for every plan of every planner, and what bad input gets."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from planning_workloads import (
    padded_workloads,
    predictions,
    workloads,
    workloads_of_units,
)

from lightning_dcp.config.padding import PackPadding, longest_that_fits, rows_per_rank
from lightning_dcp.planning import (
    CostModel,
    Group,
    Plan,
    PlanError,
    PlanRequest,
    PlanSettings,
    Step,
    evaluate,
    plan_global_batch,
)
from lightning_dcp.planning.planners.static import plan_static, static_packs_below
from lightning_dcp.planning.report import predicted_seconds

DYNAMIC = ["balanced", "longest_sequence"]
PLANNERS = [*DYNAMIC, "static"]


def broken_rules(plan: Plan) -> list[str]:
    """The contract once more, written without the code under test."""
    broken = []
    samples = [i for step in plan.steps for group in step.groups for i in group.sample_ids]
    if sorted(samples) != list(range(len(plan.lengths))):
        broken.append("samples")
    for step in plan.steps:
        if [r for group in step.groups for r in group.ranks] != list(range(plan.num_ranks)):
            broken.append("partition")
        for group in step.groups:
            aligned = math.log2(group.size).is_integer() and group.first_rank % group.size == 0
            if not (aligned or group.size == plan.num_ranks):
                broken.append("alignment")
            if not group.sample_ids or list(group.sample_ids) != sorted(group.sample_ids):
                broken.append("samples of a group")
            parts = plan.tp_size * (2 * group.size if group.size > 1 else 1)
            each = math.lcm(parts, 16) if plan.padding.fp8 else parts
            padded = sum(math.ceil(plan.lengths[i] / each) * each for i in group.sample_ids)
            rows = padded_pack(plan, padded // group.size, parts // group.size)
            if rows > plan.max_seqlen_per_dp_cp_rank:
                broken.append("cap")
            if rows != plan.rows(group):
                broken.append("rows")
    if plan.keep_together is not None:
        homes = {
            (plan.keep_together[i], k, group.first_rank)
            for k, step in enumerate(plan.steps)
            for group in step.groups
            for i in group.sample_ids
        }
        if len(homes) != len(set(plan.keep_together)):
            broken.append("units")
    return broken


def padded_pack(plan: Plan, rows: int, align: int) -> int:
    """Rows of a rank once the pack is filled up."""
    padding = plan.padding
    if padding.pad_to_length is not None:
        return max(rows, padding.pad_to_length)
    multiple = math.lcm(align * (128 if padding.fp8 else 1), padding.pad_to_length_bucket or 1)
    return math.ceil(rows / multiple) * multiple


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=300, deadline=None)
@given(workload=workloads(), prediction=predictions())
def test_every_plan_keeps_the_contract(planner: str, workload: dict, prediction: dict) -> None:
    plan = plan_global_batch(**workload, **prediction, planner=planner)
    assert broken_rules(plan) == []
    assert plan.validate() is None
    assert plan.lengths == tuple(workload["lengths"])
    assert plan.planner == planner


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=150, deadline=None)
@given(workload=padded_workloads(), prediction=predictions())
def test_the_cap_holds_after_packs_are_filled_up(
    planner: str, workload: dict, prediction: dict
) -> None:
    plan = plan_global_batch(**workload, **prediction, planner=planner)
    assert broken_rules(plan) == []
    assert plan.quality <= 1 + 1e-9
    again = evaluate(plan, prediction["cost_model"], execution=prediction["execution"])
    assert again == plan.report


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=150, deadline=None)
@given(workload=workloads_of_units(), prediction=predictions())
def test_units_stay_in_one_micro_batch(planner: str, workload: dict, prediction: dict) -> None:
    plan = plan_global_batch(**workload, **prediction, planner=planner)
    assert broken_rules(plan) == []
    assert plan.quality <= 1 + 1e-9
    again = evaluate(plan, prediction["cost_model"], execution=prediction["execution"])
    assert again == plan.report


def test_rounding_does_not_rule_out_a_static_plan() -> None:
    """Whatever is with what, the work is the same, but the last bit of its sum is not."""
    request = PlanRequest(
        (81_920, 1, 1, 1, 81_920, 81_920, 81_920, 81_920),
        PlanSettings(
            num_ranks=8,
            max_seqlen_per_dp_cp_rank=10_496,
            padding=PackPadding(fp8=True, pad_to_length=10_496),
        ),
        units=((0, 1, 2), (3,), (4,), (5,), (6,), (7,)),
    )
    seconds = predicted_seconds(request, plan_static(request))
    found = static_packs_below(request, math.nextafter(seconds, math.inf))
    assert seconds in [seconds_of_packs for _, seconds_of_packs in found]


@settings(max_examples=100, deadline=None)
@given(workload=padded_workloads() | workloads_of_units(), prediction=predictions())
def test_balanced_is_never_worse_when_packs_are_filled_up_or_samples_joined(
    workload: dict, prediction: dict
) -> None:
    seconds = {
        planner: plan_global_batch(
            **workload, **prediction, planner=planner
        ).report.predicted_seconds
        for planner in PLANNERS
    }
    assert seconds["balanced"] <= min(seconds.values())


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=60, deadline=None)
@given(workload=workloads())
def test_the_plan_is_the_same_every_time(planner: str, workload: dict) -> None:
    plan = plan_global_batch(**workload, planner=planner)
    assert plan_global_batch(**workload, planner=planner) == plan
    for convert in (tuple, np.array, lambda lengths: [np.int32(n) for n in lengths]):
        same = workload | {"lengths": convert(workload["lengths"])}
        assert plan_global_batch(**same, planner=planner) == plan


@pytest.mark.parametrize("planner", PLANNERS)
def test_ties_go_to_the_smaller_sample_id(planner: str) -> None:
    plan = plan_global_batch([8] * 8, num_ranks=4, max_seqlen_per_dp_cp_rank=8, planner=planner)
    ids = [i for step in plan.steps for group in step.groups for i in group.sample_ids]
    assert ids == list(range(8))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("num_ranks", range(1, 65))
def test_every_pool_size_holds_its_longest_sequence_and_a_single_token(
    planner: str, num_ranks: int
) -> None:
    cap = 6
    most = longest_that_fits(cap, num_ranks)
    options = {"num_ranks": num_ranks, "max_seqlen_per_dp_cp_rank": cap, "planner": planner}
    for lengths in ([most], [1], [most, 1], [1] * 3):
        assert broken_rules(plan_global_batch(lengths, **options)) == []
    with pytest.raises(ValueError, match=f"length {most + 1}, but at most {most} tokens fit"):
        plan_global_batch([1, most + 1], **options)


# The cases of the public reports, each with its small input.


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("num_ranks", [10, 14, 18, 20, 22])
def test_pool_sizes_that_are_no_power_of_two(planner: str, num_ranks: int) -> None:
    plan = plan_global_batch(
        [1, 1], num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=4, planner=planner
    )
    assert broken_rules(plan) == []


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_sequence_that_only_the_whole_pool_of_six_holds(planner: str) -> None:
    plan = plan_global_batch([20], num_ranks=6, max_seqlen_per_dp_cp_rank=4, planner=planner)
    assert plan.steps == (Step((Group(0, 6, (0,)),)),)
    assert plan.rows(plan.steps[0].groups[0]) == 4


@pytest.mark.parametrize("planner", [*PLANNERS, "megatron"])
@pytest.mark.parametrize("length", [0, -3])
def test_an_empty_sequence_is_named(planner: str, length: int) -> None:
    with pytest.raises(ValueError, match=rf"sample 1 has length {length}; .* 1 to 16"):
        plan_global_batch([3, length], num_ranks=4, max_seqlen_per_dp_cp_rank=4, planner=planner)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_cap_holds_after_padding(planner: str) -> None:
    plan = plan_global_batch([5, 5, 1], num_ranks=4, max_seqlen_per_dp_cp_rank=4, planner=planner)
    assert broken_rules(plan) == []
    assert max(plan.rows(group) for step in plan.steps for group in step.groups) <= 4


@pytest.mark.parametrize("planner", PLANNERS)
def test_one_sequence_keeps_four_ranks_busy(planner: str) -> None:
    plan = plan_global_batch([16], num_ranks=4, max_seqlen_per_dp_cp_rank=64, planner=planner)
    assert [group.sample_ids for step in plan.steps for group in step.groups] == [(0,)]
    assert plan.cp_sizes() == {4: 1}


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_rank_runs_the_same_number_of_micro_batches(planner: str) -> None:
    lengths = [40, 3, 3, 17, 1, 1, 9, 30, 2]
    plan = plan_global_batch(lengths, num_ranks=6, max_seqlen_per_dp_cp_rank=8, planner=planner)
    for rank in range(6):
        held = [step.group_of(rank).sample_ids for step in plan.steps]
        assert all(held)
        assert len(held) == len(plan.steps)


@pytest.mark.parametrize("planner", PLANNERS)
def test_an_uneven_batch_at_the_end_of_an_epoch(planner: str) -> None:
    plan = plan_global_batch([4] * 5, num_ranks=4, max_seqlen_per_dp_cp_rank=4, planner=planner)
    assert broken_rules(plan) == []


# Bad input.


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["num_ranks", "max_seqlen_per_dp_cp_rank", "tp_size"])
def test_sizes_below_one(name: str, value: int) -> None:
    options = {"num_ranks": 2, "max_seqlen_per_dp_cp_rank": 8, "tp_size": 1, name: value}
    with pytest.raises(ValueError, match=f"{name}={value} must be 1 or more"):
        plan_global_batch([1], **options)


@pytest.mark.parametrize("value", [2.0, True, None, "2", np.float32(2)])
@pytest.mark.parametrize("name", ["num_ranks", "max_seqlen_per_dp_cp_rank", "tp_size"])
def test_sizes_that_are_no_ints(name: str, value: object) -> None:
    options = {"num_ranks": 2, "max_seqlen_per_dp_cp_rank": 8, "tp_size": 1, name: value}
    with pytest.raises(TypeError, match=name):
        plan_global_batch([1], **options)


@pytest.mark.parametrize(
    "lengths",
    [
        *([4, 2.0], [4, True], [4, np.bool_(True)], [4, None], ["4"], "44", 4, None, {4}),
        *(np.array([4.0]), np.array([True]), np.array([[4]]), np.array(4)),
    ],
)
def test_lengths_that_are_no_ints(lengths: object) -> None:
    with pytest.raises(TypeError, match="length"):
        plan_global_batch(lengths, num_ranks=2, max_seqlen_per_dp_cp_rank=8)


@pytest.mark.parametrize("lengths", [[], np.array([], dtype=np.int64)])
def test_an_empty_batch(lengths: object) -> None:
    with pytest.raises(ValueError, match="lengths is empty"):
        plan_global_batch(lengths, num_ranks=2, max_seqlen_per_dp_cp_rank=8)


def test_a_sequence_that_is_too_long_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="sample 2 has length 33, but at most 32") as error:
        plan_global_batch([32, 1, 33], num_ranks=4, max_seqlen_per_dp_cp_rank=9)
    for change in ("raise max_seqlen_per_dp_cp_rank", "more ranks", "max_length"):
        assert change in str(error.value)


@pytest.mark.parametrize(("num_ranks", "tp_size", "least"), [(2, 1, 2), (3, 4, 8), (1, 4, 4)])
def test_a_cap_that_holds_no_sequence(num_ranks: int, tp_size: int, least: int) -> None:
    options = {"num_ranks": num_ranks, "tp_size": tp_size}
    message = f"max_seqlen_per_dp_cp_rank={least - 1} .* to at least {least}"
    with pytest.raises(ValueError, match=message):
        plan_global_batch([1], max_seqlen_per_dp_cp_rank=least - 1, **options)
    assert plan_global_batch([1], max_seqlen_per_dp_cp_rank=least, **options).steps


def test_a_cap_far_above_what_int64_holds_means_no_cap() -> None:
    plan = plan_global_batch([5, 3, 9, 1], num_ranks=2, max_seqlen_per_dp_cp_rank=10**30)
    assert len(plan.steps) == 1


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_to_length_bucket": 0}, "pad_to_length_bucket=0 must be 1 or more"),
        ({"pad_to_length_bucket": -2}, "pad_to_length_bucket=-2 must be 1 or more"),
        (
            {"pad_to_length_bucket": 17},
            "pad_to_length_bucket=17 is larger than max_seqlen_per_dp_cp_rank=16",
        ),
        (
            {"pad_to_length_bucket": 9},
            "pad_to_length_bucket=9 .* a multiple of 18, over max_seqlen_per_dp_cp_rank=16",
        ),
        ({"pad_to_length": 0}, "pad_to_length=0 must be 1 or more"),
        ({"pad_to_length": 18}, "pad_to_length=18 is larger than max_seqlen_per_dp_cp_rank=16"),
        ({"pad_to_length": 15}, "pad_to_length=15 is no multiple of 2, .*: use 14"),
        ({"pad_to_length": 8, "pad_to_length_bucket": 4}, "leave one out"),
        ({"fp8": True}, "fp8 .* a multiple of 256, over max_seqlen_per_dp_cp_rank=16"),
        (
            {"pad_to_length_bucket": 12, "lengths": [49]},
            "at most 48 tokens fit .* and pad_to_length_bucket=12; raise",
        ),
        (
            {"pad_to_length": 12, "lengths": [49]},
            "at most 48 tokens .* of pad_to_length=12 rows .* raise pad_to_length,",
        ),
    ],
)
def test_padding_that_cannot_work(planner: str, options: dict, message: str) -> None:
    request = {"lengths": [5], "num_ranks": 4, "max_seqlen_per_dp_cp_rank": 16} | options
    with pytest.raises(ValueError, match=message):
        plan_global_batch(**request, planner=planner)


@pytest.mark.parametrize("name", ["pad_to_length", "pad_to_length_bucket"])
@pytest.mark.parametrize("value", [8.0, True, "8"])
def test_lengths_to_pad_to_that_are_no_ints(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name}="):
        plan_global_batch([5], num_ranks=2, max_seqlen_per_dp_cp_rank=16, **{name: value})


def test_every_micro_batch_of_one_length_costs_its_linear_work() -> None:
    options = {"num_ranks": 2, "max_seqlen_per_dp_cp_rank": 64, "pad_to_length": 64}
    model = CostModel(seconds_per_row=1.0, seconds_per_pair=0.0, fixed_seconds=0.0)
    plan = plan_global_batch([3, 5], **options, planner="static", cost_model=model)
    assert plan.report.predicted_seconds == pytest.approx(64.0)
    assert plan.report.padding_share == pytest.approx(1 - 8 / 128)
    assert plan.report.idle_share == 0.0


# Samples that stay together.


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_unit_that_does_not_fit_is_named(planner: str) -> None:
    message = (
        r"2 samples .*: 1 \(20 tokens\), 2 \(14 tokens\); they take 10 rows .* 4 DPxCP ranks .* "
        r"at most 8 fit max_seqlen_per_dp_cp_rank=8"
    )
    with pytest.raises(ValueError, match=message):
        plan_global_batch(
            [4, 20, 14, 4],
            num_ranks=4,
            max_seqlen_per_dp_cp_rank=8,
            planner=planner,
            keep_together=[0, 7, 7, 1],
        )


def test_a_static_size_that_no_unit_fits() -> None:
    with pytest.raises(ValueError, match=r"samples \[0, 2\], which keep_together joins, have"):
        plan_global_batch(
            [8, 4, 8],
            num_ranks=4,
            max_seqlen_per_dp_cp_rank=8,
            planner="static",
            context_parallel_size=1,
            keep_together=[0, 1, 0],
        )


@pytest.mark.parametrize(
    ("keep_together", "error", "message"),
    [
        ([0], ValueError, r"shape \(1,\) for 2 samples"),
        ([[0, 1]], ValueError, r"shape \(1, 2\) for 2 samples"),
        ([], ValueError, r"shape \(0,\) for 2 samples"),
        ([0.0, 1.0], TypeError, "holds float64"),
        ([True, False], TypeError, "holds bool"),
        (["a", "b"], TypeError, "give an int for each sample"),
    ],
)
def test_unit_ids_that_cannot_work(keep_together, error, message) -> None:
    with pytest.raises(error, match=message):
        plan_global_batch(
            [3, 4], num_ranks=2, max_seqlen_per_dp_cp_rank=8, keep_together=keep_together
        )


def test_short_samples_of_a_unit_may_not_fit_a_larger_group() -> None:
    # Ten single tokens are 10 rows on one rank, but 20 on each rank of a group.
    options = {"num_ranks": 2, "keep_together": [0] * 10 + [1] * 10}
    with pytest.raises(ValueError, match="they take 20 rows"):
        plan_global_batch([1] * 20, **options, max_seqlen_per_dp_cp_rank=10)
    plan = plan_global_batch([1] * 20, **options, max_seqlen_per_dp_cp_rank=20)
    assert plan.cp_sizes() == {1: 2}


def test_a_planner_of_the_users_own_sees_units_as_samples() -> None:
    plan = plan_global_batch(
        [9, 3, 2],
        num_ranks=3,
        max_seqlen_per_dp_cp_rank=8,
        planner=one_after_the_other,
        keep_together=[5, 6, 5],
    )
    groups = [group.sample_ids for step in plan.steps for group in step.groups]
    assert groups == [(0, 2), (1,)]


def test_an_unknown_planner_lists_the_names() -> None:
    with pytest.raises(ValueError, match="'balanced', 'static', 'longest_sequence', 'megatron'"):
        plan_global_batch([1], num_ranks=2, max_seqlen_per_dp_cp_rank=8, planner="best")


@pytest.mark.parametrize("planner", DYNAMIC)
def test_context_parallel_size_belongs_to_static(planner: str) -> None:
    with pytest.raises(ValueError, match="context_parallel_size=2 with planner="):
        plan_global_batch(
            [1],
            num_ranks=2,
            max_seqlen_per_dp_cp_rank=8,
            planner=planner,
            context_parallel_size=2,
        )


# Planners of the user's own.


def one_after_the_other(request: PlanRequest) -> list[Step]:
    return [Step((Group(0, request.num_ranks, (i,)),)) for i in range(len(request.lengths))]


def test_a_function_as_planner() -> None:
    plan = plan_global_batch(
        [9, 3], num_ranks=3, max_seqlen_per_dp_cp_rank=8, planner=one_after_the_other
    )
    assert plan.planner == "one_after_the_other"
    assert plan.cp_sizes() == {3: 2}


def test_a_function_that_breaks_a_rule_is_found_out() -> None:
    with pytest.raises(PlanError, match="sample 1 "):
        plan_global_batch(
            [9, 3],
            num_ranks=3,
            max_seqlen_per_dp_cp_rank=8,
            planner=lambda request: one_after_the_other(request)[:1],
        )


@given(workload=workloads())
@settings(max_examples=50, deadline=None)
def test_the_tables_of_a_request_are_the_shared_padding_rule(workload: dict) -> None:
    cap, tp_size = workload["max_seqlen_per_dp_cp_rank"], workload["tp_size"]
    lengths = tuple(workload["lengths"])
    settings = PlanSettings(
        num_ranks=workload["num_ranks"], max_seqlen_per_dp_cp_rank=cap, tp_size=tp_size
    )
    request = PlanRequest(lengths, settings)
    for size in request.cp_sizes:
        assert request.rows[size] == [rows_per_rank(n, size, tp_size) for n in lengths]
    for sample, smallest in enumerate(request.min_cp_sizes):
        fits = [size for size in request.cp_sizes if request.rows[size][sample] <= cap]
        assert smallest == fits[0]
        # All larger sizes hold it too: planners rely on it.
        assert fits == [size for size in request.cp_sizes if size >= smallest]
