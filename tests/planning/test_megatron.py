"""The adapter to Megatron-Core's scheduler, on stand-ins of its interface."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import numpy as np
import pytest

from lightning_dcp.planning import PlanError, has_megatron_scheduler, plan_global_batch

MODULE = "megatron.core.datasets.data_schedule"
Answer = Callable[[list[tuple[int, int]], int, int], list[list[list[int]]]]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[dict]]:
    """Installs a scheduler that answers with a function of samples, cap and ranks."""

    def install(answer: Answer) -> list[dict]:
        calls: list[dict] = []

        class DefaultDynamicCPScheduler:
            def __init__(
                self,
                max_seqlen_per_dp_cp_rank: int,
                cp_size: int,
                dp_size: int,
                microbatch_group_size_per_vp_stage: int | None,
                *,
                min_cp_size: int = 1,
            ) -> None:
                assert microbatch_group_size_per_vp_stage is None
                assert min_cp_size == 1
                self.cap, self.num_ranks = max_seqlen_per_dp_cp_rank, cp_size * dp_size

            def get_groups_and_subsamples(
                self, sample_id_seqlens: list[tuple[int, int]]
            ) -> list[list[list[int]]]:
                calls.append({"samples": sample_id_seqlens, "num_ranks": self.num_ranks})
                return answer(sample_id_seqlens, self.cap, self.num_ranks)

        module = types.ModuleType(MODULE)
        module.DefaultDynamicCPScheduler = DefaultDynamicCPScheduler
        monkeypatch.setitem(sys.modules, MODULE, module)
        return calls

    return install


def one_each(samples: list[tuple[int, int]], cap: int, num_ranks: int) -> list[list[list[int]]]:
    """Samples in turn on single ranks; the number of samples is a multiple of the ranks."""
    ids = [sample for sample, _ in samples]
    return [[[i] for i in ids[k : k + num_ranks]] for k in range(0, len(ids), num_ranks)]


def test_samples_that_stay_together_are_refused(scheduler: Callable) -> None:
    scheduler(one_each)
    options = {"num_ranks": 2, "max_seqlen_per_dp_cp_rank": 16, "keep_together": [0, 0, 1]}
    with pytest.raises(NotImplementedError, match="planner='megatron' with keep_together"):
        plan_global_batch([3, 4, 5], **options, planner="megatron")
    # The other planners do not ask it.
    plan_global_batch([3, 4, 5], **options)


def test_its_cap_leaves_room_for_packs_that_are_filled_up(scheduler: Callable) -> None:
    seen = []

    def answer(samples, cap, num_ranks):
        seen.append(cap)
        return one_each(samples, cap, num_ranks)

    scheduler(answer)
    plan = plan_global_batch(
        [3, 4],
        num_ranks=2,
        max_seqlen_per_dp_cp_rank=15,
        planner="megatron",
        pad_to_length_bucket=6,
    )
    assert seen == [12]
    assert [plan.rows(group) for group in plan.steps[0].groups] == [6, 6]


def test_a_build_without_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, types.ModuleType(MODULE))
    assert not has_megatron_scheduler()
    with pytest.raises(ImportError, match="needs a Megatron-Core build with DefaultDynamicCPSch"):
        plan_global_batch([1], num_ranks=2, max_seqlen_per_dp_cp_rank=8, planner="megatron")


def test_its_plan_is_converted(scheduler: Callable) -> None:
    answer = [[[2, 0], [2, 0], [1], [3]], [[4]] * 4]
    calls = scheduler(lambda samples, cap, num_ranks: answer)
    assert has_megatron_scheduler()
    plan = plan_global_batch(
        [7, 4, 3, 2, 30], num_ranks=4, max_seqlen_per_dp_cp_rank=8, planner="megatron"
    )
    groups = [[(g.first_rank, g.size, g.sample_ids) for g in step.groups] for step in plan.steps]
    assert groups == [[(0, 2, (0, 2)), (2, 1, (1,)), (3, 1, (3,))], [(0, 4, (4,))]]
    assert plan.planner == "megatron"
    assert 0 < plan.quality <= 1
    # It is told the padded lengths, on the smallest group that holds each sample.
    assert calls == [
        {"samples": [(0, 7), (1, 4), (2, 3), (3, 2), (4, 32)], "num_ranks": 4},
    ]


def test_a_plan_over_the_cap_is_asked_for_again_with_more_padding(scheduler: Callable) -> None:
    def pairs(samples: list[tuple[int, int]], cap: int, num_ranks: int) -> list[list[list[int]]]:
        """Both samples on both ranks, if their lengths say that they fit."""
        together = sum(length for _, length in samples) <= cap * num_ranks
        return [[[0, 1], [0, 1]]] if together else [[[0], [0]], [[1], [1]]]

    calls = scheduler(pairs)
    # 5 and 3 tokens fit 2 ranks of 4 rows, but padded to 8 and 4 they do not.
    plan = plan_global_batch([5, 3], num_ranks=2, max_seqlen_per_dp_cp_rank=4, planner="megatron")
    assert len(plan.steps) == 2
    assert len(calls) == 1
    # 1 token alone is not padded, on two ranks it is: 2 + 2 rows of 3.
    plan = plan_global_batch([1, 1], num_ranks=2, max_seqlen_per_dp_cp_rank=3, planner="megatron")
    assert [call["samples"] for call in calls[1:]] == [[(0, 1), (1, 1)], [(0, 4), (1, 4)]]
    assert len(plan.steps) == 2


@pytest.mark.parametrize(
    "error", [AssertionError("5 != 4"), IndexError("list index"), ValueError("math domain error")]
)
def test_its_crashes_say_what_was_asked(scheduler: Callable, error: Exception) -> None:
    def crash(samples: list, cap: int, num_ranks: int) -> list:
        raise error

    scheduler(crash)
    message = (
        r"planner='megatron': .* asked for 2 samples of up to \d+ tokens \(padded\) on 10 DPxCP "
        rf"ranks with max_seqlen_per_dp_cp_rank=4, failed: {type(error).__name__}: {error}\. "
        "Use planner='balanced'"
    )
    with pytest.raises(PlanError, match=message) as caught:
        plan_global_batch([1, 1], num_ranks=10, max_seqlen_per_dp_cp_rank=4, planner="megatron")
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[[0], [0]]], "returned a plan that cannot run: .* in no group: sample 1"),
        ([[[0], [1]], [[0], [1]]], "returned a plan that cannot run: .* is already in step 0"),
        ([[[0, 1], []]], "returned a plan that cannot run: .* holds no sample"),
        ([[[0], [1], [1]]], "failed: ValueError: a micro-batch for 3 ranks, the pool has 2"),
        ([[[0], [7]]], "returned a plan that cannot run: .* not all within the batch of 2"),
        (None, "failed: TypeError"),
        ([[["a"], [1]]], "failed: ValueError"),
    ],
)
def test_a_plan_that_cannot_run(scheduler: Callable, answer: object, message: str) -> None:
    scheduler(lambda samples, cap, num_ranks: answer)
    with pytest.raises(PlanError, match=message):
        plan_global_batch([4, 4], num_ranks=2, max_seqlen_per_dp_cp_rank=8, planner="megatron")


def test_groups_that_are_not_aligned_are_refused(scheduler: Callable) -> None:
    scheduler(lambda samples, cap, num_ranks: [[[0], [1], [1], [2]]])
    with pytest.raises(PlanError, match="size 2 at first rank 1"):
        plan_global_batch([4, 4, 4], num_ranks=4, max_seqlen_per_dp_cp_rank=8, planner="megatron")


def test_balanced_is_no_worse_and_takes_its_plan_where_that_is_better(scheduler: Callable) -> None:
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(40):
        num_ranks = int(rng.integers(1, 9))
        lengths = rng.integers(1, 4096, num_ranks * int(rng.integers(1, 4)))
        options = {"num_ranks": num_ranks, "max_seqlen_per_dp_cp_rank": 4096}
        calls = scheduler(one_each)
        theirs = plan_global_batch(lengths, **options, planner="megatron")
        ours = plan_global_batch(lengths, **options)
        seen += len(calls) == 2
        assert ours.report.predicted_seconds <= theirs.report.predicted_seconds
    assert seen


def test_balanced_does_without_a_scheduler_that_crashes(scheduler: Callable) -> None:
    calls = scheduler(lambda samples, cap, num_ranks: 1 // 0)
    plan = plan_global_batch([5, 3, 9], num_ranks=2, max_seqlen_per_dp_cp_rank=8)
    assert calls
    assert plan.validate() is None
