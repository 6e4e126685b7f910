"""Made-up rollouts: the same for the same seed, and valid for the model that they name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_dcp import SyntheticDataModule
from lightning_dcp.data import LengthDistribution, SyntheticRollouts
from lightning_dcp.objectives import PolicyLoss
from lightning_dcp.packing import RouteShape, check_routes, read_global_batch


def batches(**options):
    module = SyntheticDataModule(
        vocab_size=32,
        lengths=LengthDistribution(kind="uniform", low=1, high=9),
        min_length=1,
        global_batch_size=6,
        num_batches=2,
        num_workers=0,
        **options,
    )
    module.setup()
    return list(module.train_dataloader())


@pytest.mark.parametrize(("experts", "dtype"), [(4, torch.uint8), (300, torch.int16)])
def test_every_key_is_what_the_loss_and_the_routers_read(experts, dtype):
    rollouts = SyntheticRollouts(num_layers=3, num_experts=experts, topk=2)
    made, again, plain = batches(rollouts=rollouts), batches(rollouts=rollouts), batches()
    for one, other, tokens in zip(made, again, plain, strict=True):
        # The tokens do not depend on what comes with them.
        assert torch.equal(one["input_ids"].values(), tokens["input_ids"].values())
        lengths = one["input_ids"].offsets().diff()
        assert one["routed_experts"].offsets().diff().tolist() == (lengths - 1).tolist()
        assert one["routed_experts"].dtype == dtype
        for key, value in one.items():
            stored = value.values() if value.is_nested else value
            against = other[key].values() if value.is_nested else other[key]
            assert torch.equal(stored, against)
        read = read_global_batch(one, vocab_size=32, may_lack_last=["routed_experts"])
        check_routes(read, RouteShape(3, 2, experts))
        PolicyLoss().check(read)
        prompts = [int((~mask).sum()) for mask in one["loss_mask"].unbind()]
        assert prompts == [int(0.25 * length) for length in lengths.tolist()]
        assert np.abs(one["old_log_probs"].values().numpy() + np.log(32)).max() < 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"topk": 5}, "topk=5 is more than rollouts.num_experts=4"),
        ({"num_layers": 0}, "num_layers=0 must be 1 or more"),
        ({"prompt_share": 1.5}, "prompt_share=1.5 must be from 0 to 1"),
    ],
)
def test_sizes_that_no_model_has(options, found):
    with pytest.raises(ValueError, match=found):
        SyntheticRollouts(**{"num_layers": 2, "num_experts": 4, "topk": 2, **options})
