"""Extras by target: the next token's value, or the sample's; nothing where there is no target."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from packing_reference import Case, cases

from lightning_dcp.packing import pack_micro_batch, read_global_batch


def pack(case: Case, batch, keys):
    return [
        pack_micro_batch(
            batch,
            case.sample_ids,
            cp_size=case.cp_size,
            cp_rank=rank,
            tp_size=case.tp_size,
            padding=case.padding,
            target_extras=keys,
        )
        for rank in range(case.cp_size)
    ]


@settings(deadline=None)
@given(cases())
def test_they_are_those_of_the_label(case):
    tokens = case.tokens()
    masks = [(ids % 3 != 0) for ids in tokens]
    # NaN wherever nothing is a target: it must not get through.
    values = [
        torch.where(mask[:, None], torch.stack((ids, -ids), 1).float(), torch.nan)
        for ids, mask in zip(tokens, masks, strict=True)
    ]
    of_samples = torch.arange(len(tokens)) + 0.5
    batch = read_global_batch(
        {
            "input_ids": case.jagged(tokens),
            "loss_mask": case.jagged(masks),
            "values": case.jagged(values),
            "unasked": case.jagged(tokens),
            "weight": of_samples,
        }
    )
    for rank, micro_batch in enumerate(pack(case, batch, ("values", "weight"))):
        assert set(micro_batch.target_extras) == {"values", "weight"}
        labels = micro_batch.labels.float().where(micro_batch.loss_mask, 0)
        wanted = torch.stack((labels, -labels), 1)
        torch.testing.assert_close(micro_batch.target_extras["values"], wanted, rtol=0, atol=0)
        samples = torch.tensor([of_samples[sample] for sample, _ in case.rows(rank)])
        torch.testing.assert_close(
            micro_batch.target_extras["weight"], samples.where(micro_batch.loss_mask, 0)
        )
        assert set(micro_batch.extras) == {"values", "unasked", "weight"}
