"""``Plan.validate`` names the step, the ranks and the numbers of each kind of broken plan."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_dcp.config.padding import PackPadding
from lightning_dcp.planning import CostModel, Group, Plan, PlanError, Step, group_times

FIRST = Step((Group(0, 2, (0,)), Group(2, 1, (1,)), Group(3, 1, (2, 3))))
WHOLE = Step((Group(0, 4, (4,)),))
LENGTHS = (8, 4, 3, 1, 13)


def plan_of(*steps: Step, lengths: tuple[int, ...] = LENGTHS, num_ranks: int = 4) -> Plan:
    return Plan(steps, lengths=lengths, num_ranks=num_ranks, max_seqlen_per_dp_cp_rank=4)


def test_a_valid_plan() -> None:
    plan = plan_of(FIRST, WHOLE)
    assert plan.validate() is None
    assert plan.cp_sizes() == {1: 2, 2: 1, 4: 1}
    assert list(plan.cp_sizes()) == [1, 2, 4]
    assert [plan.rows(group) for group in FIRST.groups] == [4, 4, 4]
    assert plan.rows(WHOLE.groups[0]) == 4
    assert plan.most_rows(FIRST) == 4
    assert (plan.num_tokens, plan.num_padded_tokens) == (29, 32)


def test_rows_count_the_padding_of_each_sample() -> None:
    group = Group(0, 2, (0, 1))
    plan = Plan((), lengths=(1, 9), num_ranks=2, max_seqlen_per_dp_cp_rank=16, tp_size=2)
    # Multiples of tp * 2 * cp = 8: 8 and 16 tokens over two ranks.
    assert plan.rows(group) == 4 + 8


def test_group_of() -> None:
    assert [FIRST.group_of(rank).first_rank for rank in range(4)] == [0, 0, 2, 3]
    assert list(FIRST.groups[0].ranks) == [0, 1]
    with pytest.raises(ValueError, match="rank 4: ranks 0-1, rank 2, rank 3"):
        FIRST.group_of(4)


def test_the_whole_pool_may_have_any_size() -> None:
    plan = plan_of(Step((Group(0, 6, (0,)),)), lengths=(20,), num_ranks=6)
    assert plan.validate() is None


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        pytest.param(
            [FIRST],
            r"steps 0-0, ranks 0-3: 4 of 5 samples are planned; in no group: sample 4 \(13 tokens",
            id="missing sample",
        ),
        pytest.param(
            [FIRST, Step((Group(0, 4, (1, 4)),))],
            r"step 1, ranks 0-3: 6 rows a rank after padding, over .*=4; samples \(1, 4\)",
            id="cap exceeded",
        ),
        pytest.param(
            [FIRST, WHOLE, Step((Group(0, 4, (1,)),))],
            "step 2, ranks 0-3: sample 1 of 4 tokens is already in step 0, rank 2",
            id="duplicate",
        ),
        pytest.param(
            [Step((Group(0, 4, (3, 3)),))],
            "step 0, ranks 0-3: sample 3 of 1 tokens is already in step 0, ranks 0-3",
            id="twice in one group",
        ),
        pytest.param(
            [FIRST, Step((Group(0, 2, (0,)), Group(1, 1, (1,)), Group(2, 2, (2,))))],
            "step 1, rank 1: the group starts at rank 1, .* before it already take ranks 0-1",
            id="overlap",
        ),
        pytest.param(
            [FIRST, Step((Group(0, 1, (1,)), Group(2, 2, (2,))))],
            "step 1, ranks 2-3: ranks 1-1 before the group are in no group",
            id="gap",
        ),
        pytest.param(
            [Step((Group(0, 2, (0,)), Group(2, 1, (1,))))],
            "step 0: the groups end before rank 3, the pool is ranks 0-3; .*: ranks 0-1, rank 2",
            id="too few ranks",
        ),
        pytest.param(
            [WHOLE, Step((Group(0, 4, (4,)), Group(4, 1, (1,))))],
            "step 1: the groups end before rank 5, the pool is ranks 0-3",
            id="too many ranks",
        ),
        pytest.param(
            [Step(())],
            "step 0: the groups end before rank 0, the pool is ranks 0-3.*: no groups",
            id="no groups",
        ),
        pytest.param(
            [FIRST, Step((Group(0, 1, (1,)), Group(1, 2, (0,)), Group(3, 1, (2,))))],
            "step 1, ranks 1-2: size 2 at first rank 1",
            id="misaligned",
        ),
        pytest.param(
            [FIRST, Step((Group(0, 3, (0,)), Group(3, 1, (1,))))],
            "step 1, ranks 0-2: size 3 at first rank 0",
            id="no power of two",
        ),
        pytest.param(
            [FIRST, Step((Group(0, 2, (4,)), Group(2, 2, ())))],
            "step 1, ranks 0-1: 8 rows",
            id="cap before the empty group",
        ),
        pytest.param(
            [FIRST, Step((Group(0, 2, (3,)), Group(2, 2, ())))],
            "step 1, ranks 2-3: the group holds no sample",
            id="empty group",
        ),
        pytest.param(
            [Step((Group(0, 0, ()), Group(0, 4, (4,))))],
            "step 0, ranks 0--1: a group of 0 ranks",
            id="no ranks",
        ),
        pytest.param(
            [Step((Group(0, 4, (5,)),))],
            r"step 0, ranks 0-3: sample ids \(5,\) are not all within the batch of 5",
            id="unknown sample",
        ),
        pytest.param(
            [Step((Group(0, 4, (-1, 0)),))],
            r"step 0, ranks 0-3: sample ids \(-1, 0\) are not all",
            id="negative sample",
        ),
        pytest.param(
            [Step((Group(0, 4, (3, 2)),))],
            r"step 0, ranks 0-3: sample ids \(3, 2\) do not ascend",
            id="order of samples",
        ),
        pytest.param(
            [Step((Group(2, 2, (0,)), Group(0, 2, (1,))))],
            "step 0, ranks 2-3: ranks 0-1 before the group are in no group",
            id="order of groups",
        ),
    ],
)
def test_a_broken_plan_is_named(steps: list[Step], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(*steps).validate()


def test_samples_of_a_unit_in_two_groups_are_named() -> None:
    whole = dataclasses.replace(plan_of(FIRST, WHOLE), keep_together=(0, 1, 2, 3, 4))
    whole.validate()
    groups = [group for group in FIRST.groups if len(group.sample_ids) == 1][:2]
    first, second = (group.sample_ids[0] for group in groups)
    units = list(range(5))
    units[second] = units[first]
    split = dataclasses.replace(whole, keep_together=tuple(units))
    message = f"sample {second} is in unit {units[first]} with sample {first}, which is in step 0"
    with pytest.raises(PlanError, match=message):
        split.validate()


def test_unit_ids_for_another_number_of_samples() -> None:
    plan = dataclasses.replace(plan_of(FIRST, WHOLE), keep_together=(0, 1))
    with pytest.raises(PlanError, match="2 unit ids for 5 samples"):
        plan.validate()


def test_packs_that_are_filled_up_beyond_the_cap_are_named() -> None:
    padding = PackPadding(pad_to_length_bucket=64)
    plan = dataclasses.replace(plan_of(FIRST, WHOLE), padding=padding)
    with pytest.raises(PlanError, match="64 rows a rank after padding, over the cap"):
        plan.validate()
    padding = PackPadding(pad_to_length=2)
    plan = dataclasses.replace(plan_of(FIRST, WHOLE), padding=padding)
    with pytest.raises(PlanError, match=r"over pad_to_length=2; samples"):
        plan.validate()


def test_group_times() -> None:
    # Rows take 1 s, exchanges 10 s a row and rank, and each micro-batch 100 s.
    model = CostModel(
        seconds_per_row=1.0, seconds_per_pair=0.0, kv_seconds_per_row_within=10.0,
        hop_seconds_within=0.0, fixed_seconds=100.0,
    )  # fmt: skip
    times = group_times(plan_of(FIRST, WHOLE), model)
    assert list(map(max, times)) == [144.0, 224.0]
    assert [len(step) for step in times] == [3, 1]


def test_only_predicted_plans_have_a_quality() -> None:
    plan = plan_of(FIRST, WHOLE)
    assert plan.report is None
    with pytest.raises(ValueError, match="was not predicted"):
        _ = plan.quality
