"""Copies and pickles of a module, during a fit and after it."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from test_experts_and_stages import CONFIG as EXPERTS

import trainers
from distributed import run_distributed
from lightning_dcp.engine import full_model_state


def copies(strategy: dict, model=trainers.CONFIG):
    module = trainers.module(model=model)
    trainer = trainers.trainer(96, strategy)
    found = {}

    def look():
        copied = copy.deepcopy(module)
        context = trainer.strategy.context
        found["whole"] = full_model_state(module, context)
        found["copy"] = full_model_state(copied, context)
        mine, others = dict(module.named_parameters()), dict(copied.named_parameters())
        found["own"] = not any(others[name] is mine[name] for name in mine)

    module.on_train_end = look
    trainer.fit(module, trainers.batches(1))
    del module.on_train_end
    after = copy.deepcopy(module)
    np.testing.assert_equal(
        [p.detach().numpy() for p in after.parameters()],
        [p.detach().numpy() for p in module.parameters()],
    )
    try:
        pickled = pickle.loads(pickle.dumps(module)).state_dict()
    except TypeError as error:
        return found, str(error)
    return found, pickled


@pytest.mark.parametrize(
    ("world", "strategy", "model"),
    [
        (2, {}, trainers.CONFIG),
        (2, {"tensor_model_parallel_size": 2}, trainers.CONFIG),
        (2, {"pipeline_model_parallel_size": 2}, EXPERTS),
        (2, {"expert_model_parallel_size": 2}, EXPERTS),
    ],
    ids=["2", "2-tp2", "2-pp2", "2-ep2"],
)
def test_a_copy_is_the_same_part_and_a_pickle_is_whole(world, strategy, model):
    for rank, (found, pickled) in enumerate(run_distributed(copies, world, strategy, model)):
        assert found["own"]
        assert set(found["copy"]) == set(found["whole"])
        assert bool(found["whole"]) == (rank == 0)
        for name, weight in found["whole"].items():
            np.testing.assert_equal(found["copy"][name].numpy(), weight.numpy())
        if strategy:
            assert f"{next(iter(strategy))}=2" in pickled
        elif rank == 0:
            assert set(pickled) == set(found["whole"])
            for name, weight in found["whole"].items():
                np.testing.assert_equal(pickled[name].numpy(), weight.numpy())
