"""What multi-token prediction reads further on: brute force over layouts, and counts."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_reference import Case, cases, nested

from lightning_dcp.packing import IGNORE_INDEX, pack_micro_batch, read_global_batch


def pack(case: Case, batch, mtp_depths: int):
    return [
        pack_micro_batch(
            batch,
            case.sample_ids,
            cp_size=case.cp_size,
            cp_rank=rank,
            tp_size=case.tp_size,
            padding=case.padding,
            mtp_depths=mtp_depths,
        )
        for rank in range(case.cp_size)
    ]


def at(sequence, position: int, *, fill: int) -> int:
    return int(sequence[position]) if position < len(sequence) else fill


def check(case: Case, batch, tokens, labels, depths: int) -> None:
    for rank, micro_batch in enumerate(pack(case, batch, depths)):
        assert len(micro_batch.mtp) == depths
        for depth, targets in enumerate(micro_batch.mtp, start=1):
            rows = case.rows(rank)
            assert targets.input_ids.tolist() == [
                at(tokens[sample], position + depth, fill=0) for sample, position in rows
            ]
            assert targets.labels.tolist() == [
                at(labels[sample], position + depth + 1, fill=IGNORE_INDEX)
                for sample, position in rows
            ]
            assert targets.input_ids.dtype == targets.labels.dtype == torch.int64


@settings(deadline=None)
@given(cases(), st.integers(1, 3))
def test_ids_and_labels_are_those_further_on_in_the_sequence(case, depths):
    tokens = case.tokens()
    batch = read_global_batch({"input_ids": case.jagged(tokens)})
    check(case, batch, tokens, tokens, depths)


@settings(deadline=None)
@given(cases(), st.integers(1, 3))
def test_masks_and_labels_of_their_own_belong_to_the_target(case, depths):
    tokens = case.tokens()
    labels = [ids.where(ids % 5 != 0, IGNORE_INDEX) + 0 for ids in case.tokens()]
    masks = [ids % 3 != 0 for ids in tokens]
    keys = {
        "input_ids": case.jagged(tokens),
        "labels": case.jagged(labels),
        "loss_mask": case.jagged(masks),
    }
    kept = [
        ids.where(mask, torch.tensor(IGNORE_INDEX)) for ids, mask in zip(labels, masks, strict=True)
    ]
    batch = read_global_batch(keys)
    check(case, batch, tokens, kept, depths)
    for depth in range(depths + 1):
        wanted = sum(int((ids[1 + depth :] != IGNORE_INDEX).sum()) for ids in kept)
        assert int(batch.num_targets_from(1 + depth)) == wanted


def test_boundaries_are_the_padded_ones():
    """Megatron-LM 4494: rolled over unpadded boundaries, token 21 would follow token 13."""
    batch = read_global_batch(
        {"input_ids": nested([torch.tensor([11, 12, 13]), torch.tensor([21, 22])])}
    )
    whole = pack_micro_batch(batch, [0, 1], tp_size=4, mtp_depths=2)
    assert whole.input_ids.tolist() == [11, 12, 13, 0, 21, 22, 0, 0]
    assert whole.mtp[0].input_ids.tolist() == [12, 13, 0, 0, 22, 0, 0, 0]
    assert whole.mtp[1].input_ids.tolist() == [13, 0, 0, 0, 0, 0, 0, 0]
    assert whole.mtp[0].labels.tolist() == [13] + [IGNORE_INDEX] * 7
    # Rank 0 of two has chunks 0 and 3 of each sequence, rank 1 those between.
    first, second = (
        pack_micro_batch(batch, [0, 1], cp_size=2, cp_rank=rank, mtp_depths=1).mtp[0]
        for rank in range(2)
    )
    assert first.input_ids.tolist() == [12, 0, 22, 0]
    assert second.input_ids.tolist() == [13, 0, 0, 0]


def test_without_depths_there_is_nothing():
    batch = read_global_batch({"input_ids": nested([torch.arange(5)])})
    assert pack_micro_batch(batch, [0]).mtp == ()
