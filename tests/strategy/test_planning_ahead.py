"""Plans are made while the previous step runs, by the same function, for the same lengths."""

from __future__ import annotations

import threading
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import trainers
from distributed import run_distributed
from lightning_dcp import DynamicCPModule
from lightning_dcp.engine import run as engine_module
from lightning_dcp.engine.prefetch import PlanningLoader, PlanPrefetcher
from lightning_dcp.planning import make_plan, plan_global_batch


def plan(lengths, units=None):
    return plan_global_batch(
        lengths, num_ranks=2, max_seqlen_per_dp_cp_rank=64, keep_together=units
    )


@pytest.fixture
def prefetcher():
    made = PlanPrefetcher(plan)
    yield made
    made.close()
    made._thread.shutdown()  # close() does not wait for the thread; the next test must not see it


def test_a_submitted_batch_has_the_plan_that_planning_gives(prefetcher):
    batch = trainers.jagged([[1, 2, 3], [4, 5]])
    prefetcher.submit(batch)
    lengths = np.array([3, 2])
    assert prefetcher.get(lengths)[0] == plan(lengths)
    # Asked again, it is planned on the spot.
    assert prefetcher.get(lengths)[0] == plan(lengths)


def test_units_are_part_of_what_a_plan_is_found_by(prefetcher):
    batch = trainers.jagged([[1, 2, 3], [4, 5], [6]]) | {"pair_ids": torch.tensor([3, 9, 3])}
    prefetcher.submit(batch, keep_together="pair_ids")
    lengths, units = np.array([3, 2, 1]), np.array([3, 9, 3])
    assert len(prefetcher._plans) == 1
    assert prefetcher.get(lengths, np.array([3, 3, 9]))[0].keep_together == (3, 3, 9)
    assert prefetcher.get(lengths)[0].keep_together is None
    assert len(prefetcher._plans) == 1
    assert prefetcher.get(lengths, units)[0].keep_together == (3, 9, 3)
    assert not prefetcher._plans


def test_what_is_no_batch_is_left_to_the_step(prefetcher):
    for batch in ([1], {"ids": 1}, {"input_ids": torch.zeros(2, 2)}, None):
        prefetcher.submit(batch)
    prefetcher.submit(trainers.jagged([[1]]), keep_together="pair_ids")
    prefetcher.submit(trainers.jagged([[1]]) | {"pair_ids": [0]}, keep_together="pair_ids")
    assert not prefetcher._plans


def test_an_error_of_the_planner_is_raised_where_the_plan_is_wanted(prefetcher):
    prefetcher.submit(trainers.jagged([[1] * 200]))
    with pytest.raises(ValueError, match="sample 0 has length 200"):
        prefetcher.get(np.array([200]))


def test_plans_that_nobody_wants_are_dropped(prefetcher):
    for length in range(1, 60):
        prefetcher.submit(trainers.jagged([[1] * length]))
    assert len(prefetcher._plans) <= 16


def test_the_loader_keeps_its_own_attributes(prefetcher):
    batches = [trainers.jagged([[1, 2]]), trainers.jagged([[3]])]
    loader = DataLoader(batches, batch_size=None)
    wrapped = PlanningLoader(loader, prefetcher)
    assert len(wrapped) == 2
    assert wrapped.sampler is loader.sampler
    assert [batch["input_ids"].values().tolist() for batch in wrapped] == [[1, 2], [3]]
    assert len(prefetcher._plans) == 2


class CutsShort(DynamicCPModule):
    """Changes the lengths after the plan was begun."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        rows = [row[:-1] for row in batch["input_ids"].unbind() if len(row) > 1]
        return {"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}


def fit(kind: str):
    threads = Counter()

    def watched(lengths, settings, **options):
        threads[threading.current_thread().name.split("_")[0]] += 1
        return make_plan(lengths, settings, **options)

    module = {"plain": trainers.module(), "cut": CutsShort(trainers.CONFIG)}[kind]
    shares, plans = [], []

    def on_end(*_):
        shares.append(module.last_step.plan_wait_share)
        plans.append(module.last_step.plan)

    module.on_train_batch_end = on_end
    with mock.patch.object(engine_module, "make_plan", watched):
        trainers.trainer(48).fit(module, trainers.batches(3, 1))
    return dict(threads), shares, plans


def test_a_fit_plans_every_batch_in_the_thread():
    results = run_distributed(fit, 2, "plain")
    for threads, shares, plans in results:
        assert threads == {"plan-prefetch": 4}
        assert shares[0] is None
        assert all(0 <= share <= 1 for share in shares[1:])
        assert plans == results[0][2]


def test_a_batch_that_changes_on_its_way_is_planned_as_it_arrives():
    for threads, _, plans in run_distributed(fit, 2, "cut"):
        assert threads["MainThread"] == 4
        wanted = [sorted(n - 1 for n in lengths if n > 1) for lengths in trainers.LENGTHS[:3]]
        assert [sorted(plan.lengths) for plan in plans] == wanted
