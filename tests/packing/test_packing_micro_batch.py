"""Micro-batches against brute force: tokens, labels, masks, counts, extras; and no device sync."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_reference import Case, cases, narrowed, nested

from lightning_dcp.packing import (
    IGNORE_INDEX,
    GlobalBatch,
    Jagged,
    pack_micro_batch,
    read_global_batch,
)


def targets(case: Case, rank: int, labels, kept) -> list[int]:
    """The next token of the whole sequence, where it is a target."""
    wanted = []
    for sample, position in case.rows(rank):
        is_target = position + 1 < case.lengths[sample] and bool(kept[sample][position + 1])
        wanted.append(int(labels[sample][position + 1]) if is_target else IGNORE_INDEX)
    return wanted


def all_kept(case: Case) -> list[list[bool]]:
    return [[True] * length for length in case.lengths]


@settings(deadline=None)
@given(cases())
def test_tokens_positions_and_masks(case):
    tokens = case.tokens()
    ranks = case.pack(read_global_batch({"input_ids": case.jagged(tokens)}))
    for rank, micro_batch in enumerate(ranks):
        rows = case.rows(rank)
        is_padding = [position >= case.lengths[sample] for sample, position in rows]
        assert micro_batch.padding_mask.tolist() == is_padding
        assert micro_batch.position_ids.tolist() == [position for _, position in rows]
        assert micro_batch.input_ids.tolist() == [
            0 if pad else int(tokens[sample][position])
            for (sample, position), pad in zip(rows, is_padding, strict=True)
        ]
        assert micro_batch.local_cp_size == case.cp_size
        assert micro_batch.sample_ids == case.sample_ids
        assert micro_batch.is_group_leader == (rank == 0)


@settings(deadline=None)
@given(cases())
def test_every_token_is_on_exactly_one_rank(case):
    tokens = case.tokens()
    ranks = case.pack(read_global_batch({"input_ids": case.jagged(tokens)}))
    held = Counter(id_ for rank in ranks for id_ in rank.input_ids[~rank.padding_mask].tolist())
    assert held == Counter(id_ for sample in case.sample_ids for id_ in tokens[sample].tolist())


@settings(deadline=None)
@given(cases())
def test_labels_are_shifted_before_the_cut(case):
    tokens = case.tokens()
    ranks = case.pack(read_global_batch({"input_ids": case.jagged(tokens)}))
    for rank, micro_batch in enumerate(ranks):
        wanted = targets(case, rank, tokens, all_kept(case))
        assert micro_batch.labels.tolist() == wanted
        assert micro_batch.loss_mask.tolist() == [label != IGNORE_INDEX for label in wanted]
        assert int(micro_batch.num_tokens) == sum(label != IGNORE_INDEX for label in wanted)
    total = sum(case.lengths[sample] - 1 for sample in case.sample_ids)
    assert sum(int(rank.num_tokens) for rank in ranks) == total


@settings(deadline=None)
@given(cases(), st.data())
def test_separate_labels_and_loss_mask(case, data):
    """Each may be stored in its own way, with offsets objects of its own."""
    labels = [row.clone() for row in case.tokens(offset=50_000)]
    kept = [torch.ones(length, dtype=torch.bool) for length in case.lengths]
    for row, mask in zip(labels, kept, strict=True):
        drawn = st.lists(st.sampled_from("yyim"), min_size=len(row), max_size=len(row))
        for position, kind in enumerate(data.draw(drawn)):
            if kind == "i":
                row[position] = IGNORE_INDEX
            if kind == "m":
                mask[position] = False
    dtype = data.draw(st.sampled_from([torch.bool, torch.int64, torch.float32]))
    batch = read_global_batch(
        {
            "input_ids": case.jagged(case.tokens()),
            "labels": case.jagged(labels, contiguous=data.draw(st.booleans())),
            "loss_mask": case.jagged(
                [mask.to(dtype) for mask in kept], contiguous=data.draw(st.booleans())
            ),
        }
    )
    for rank, micro_batch in enumerate(case.pack(batch)):
        wanted = targets(case, rank, labels, kept)
        assert micro_batch.labels.tolist() == wanted
        assert micro_batch.loss_mask.tolist() == [label != IGNORE_INDEX for label in wanted]
        assert int(micro_batch.num_tokens) == sum(label != IGNORE_INDEX for label in wanted)


@settings(deadline=None)
@given(cases(), st.sampled_from([(), (3,), (2, 2)]), st.booleans())
def test_extras_follow_their_tokens_and_samples(case, trailing, contiguous):
    per_token = [torch.rand(length, *trailing) for length in case.lengths]
    per_sample = torch.rand(len(case.lengths), *trailing)
    batch = read_global_batch(
        {
            "input_ids": case.jagged(case.tokens()),
            "routes": case.jagged(per_token, contiguous=contiguous),
            "weights": per_sample,
        }
    )
    padding = torch.zeros(trailing)
    for rank, micro_batch in enumerate(case.pack(batch)):
        wanted = [
            per_token[sample][position] if position < case.lengths[sample] else padding
            for sample, position in case.rows(rank)
        ]
        assert set(micro_batch.extras) == {"routes", "weights"}
        assert torch.equal(micro_batch.extras["routes"], torch.stack(wanted))
        assert torch.equal(micro_batch.extras["weights"], per_sample[list(case.sample_ids)])


@pytest.mark.parametrize("share_offsets", [True, False])
def test_labels_with_the_same_offsets_object_or_an_equal_one(share_offsets):
    ids = nested([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    offsets = ids.offsets() if share_offsets else ids.offsets().clone()
    labels = torch.nested.nested_tensor_from_jagged(ids.values() + 10, offsets=offsets)
    batch = read_global_batch({"input_ids": ids, "labels": labels})
    # One set of starts serves both: packing then makes one index.
    assert batch.labels.starts is batch.input_ids.starts
    ranks = [pack_micro_batch(batch, [1, 0], cp_size=2, cp_rank=rank) for rank in (0, 1)]
    assert ranks[0].labels.tolist() == [15, -100, 12, -100]
    assert ranks[1].labels.tolist() == [-100, -100, 13, -100]


def test_labels_stored_in_another_way_have_starts_of_their_own():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    batch = read_global_batch({"input_ids": nested(rows), "labels": narrowed(rows, [2, 1])})
    assert batch.labels.starts.tolist() != batch.input_ids.starts.tolist()
    assert pack_micro_batch(batch, [0, 1]).labels.tolist() == [2, 3, -100, 5, -100]


def test_a_mask_of_every_target_leaves_no_target():
    ids = nested([torch.tensor([1, 2, 3])])
    mask = nested([torch.zeros(3, dtype=torch.bool)])
    micro_batch = pack_micro_batch(read_global_batch({"input_ids": ids, "loss_mask": mask}), [0])
    assert micro_batch.labels.tolist() == [-100] * 3
    assert int(micro_batch.num_tokens) == 0


# What users of such systems reported: the smallest input of each kind, and the right value.


def test_zigzag_is_per_sequence():
    batch = read_global_batch({"input_ids": nested([torch.arange(8), torch.arange(8, 16)])})
    first, second = (pack_micro_batch(batch, [0, 1], cp_size=2, cp_rank=rank) for rank in (0, 1))
    assert first.input_ids.tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert second.input_ids.tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    # A roll after the cut would give 6 after 1, and 8 after 7.
    assert first.labels.tolist() == [1, 2, 7, -100, 9, 10, 15, -100]
    assert second.labels.tolist() == [3, 4, 5, 6, 11, 12, 13, 14]


def test_odd_lengths_keep_their_last_token():
    batch = read_global_batch(
        {"input_ids": nested([torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7])])}
    )
    first, second = (pack_micro_batch(batch, [0, 1], cp_size=2, cp_rank=rank) for rank in (0, 1))
    assert first.input_ids.tolist() == [1, 4, 5, 0]
    assert second.input_ids.tolist() == [2, 3, 6, 7]
    assert first.labels.tolist() == [2, -100, 6, -100]
    assert second.labels.tolist() == [3, 4, 7, -100]
    assert first.padding_mask.tolist() == [False, False, False, True]
    assert not second.padding_mask.any()
    assert first.layout.cu_seqlens.tolist() == [0, 4, 7]
    assert first.layout.cu_seqlens_padded.tolist() == [0, 4, 8]


def test_seventeen_stored_tokens_have_sixteen_targets():
    batch = read_global_batch({"input_ids": nested([torch.arange(17)])})
    ranks = [pack_micro_batch(batch, [0], cp_size=2, cp_rank=rank) for rank in (0, 1)]
    assert [len(rank.input_ids) for rank in ranks] == [10, 10]
    labels = [label for rank in ranks for label in rank.labels.tolist() if label != IGNORE_INDEX]
    assert sorted(labels) == list(range(1, 17))
    assert sum(int(rank.num_tokens) for rank in ranks) == 16


def test_a_repeated_sample_has_its_targets_twice():
    batch = read_global_batch({"input_ids": nested([torch.tensor([3, 1, 2])] * 2)})
    alone = pack_micro_batch(batch, [0])
    both = pack_micro_batch(batch, [0, 1])
    assert both.labels.tolist() == alone.labels.tolist() * 2 == [1, 2, -100] * 2
    assert both.position_ids.tolist() == [0, 1, 2] * 2


def test_padding_is_not_told_by_a_token_id():
    # Tokens with the id that padding rows hold are tokens all the same.
    batch = read_global_batch({"input_ids": nested([torch.zeros(3, dtype=torch.int64)])})
    ranks = [pack_micro_batch(batch, [0], cp_size=2, cp_rank=rank) for rank in (0, 1)]
    assert ranks[0].padding_mask.tolist() == [False, True]
    assert ranks[0].labels.tolist() == [0, -100]
    assert ranks[1].labels.tolist() == [0, -100]


# No device synchronisation: a meta tensor has no values that could be waited for.


def meta_batch() -> GlobalBatch:
    starts, lengths = np.array([0, 6, 13]), np.array([5, 7, 1])

    def values(dtype, *trailing):
        return torch.empty(14, *trailing, dtype=dtype, device="meta")

    def jagged(dtype, *trailing):
        return Jagged(values(dtype, *trailing), starts, lengths)

    return GlobalBatch(
        input_ids=jagged(torch.int64),
        # Starts of its own, so that it gets an index of its own.
        labels=Jagged(values(torch.int64), starts.copy(), lengths),
        loss_mask=jagged(torch.float32),
        extras={
            "routes": jagged(torch.float32, 2, 3),
            "weights": torch.empty(3, 4, device="meta"),
        },
    )


def test_a_meta_tensor_shows_a_synchronisation():
    scalar = torch.zeros(2, device="meta").sum()
    for read in (scalar.item, scalar.tolist, scalar.cpu, scalar.__bool__, scalar.__int__):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            read()


@pytest.mark.parametrize(("cp_size", "tp_size"), [(1, 1), (2, 1), (3, 2)])
def test_packing_never_waits_for_the_device(cp_size, tp_size):
    for rank in range(cp_size):
        micro_batch = pack_micro_batch(
            meta_batch(), [2, 0, 1], cp_size=cp_size, cp_rank=rank, tp_size=tp_size
        )
        rows = micro_batch.layout.num_rows
        for each in (
            micro_batch.input_ids,
            micro_batch.labels,
            micro_batch.loss_mask,
            micro_batch.position_ids,
            micro_batch.padding_mask,
        ):
            assert each.shape == (rows,)
            assert each.device.type == "meta"
        assert micro_batch.num_tokens.shape == ()
        assert micro_batch.num_tokens.device.type == "meta"
        assert micro_batch.extras["routes"].shape == (rows, 2, 3)
        assert micro_batch.extras["weights"].shape == (3, 4)


def test_moving_a_micro_batch_moves_every_tensor():
    ids = nested([torch.arange(3), torch.arange(2)])
    batch = read_global_batch({"input_ids": ids, "weights": torch.rand(2)})
    micro_batch = pack_micro_batch(batch, [0, 1])
    assert micro_batch.to("meta") is micro_batch
    tensors = [getattr(micro_batch, each.name) for each in fields(micro_batch)]
    tensors += list(micro_batch.extras.values())
    tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
    assert len(tensors) == 6 + 1
    assert {each.device.type for each in tensors} == {"meta"}


@pytest.mark.parametrize(
    ("sample_ids", "options", "message"),
    [
        ([], {}, "at least one sequence, found none"),
        ([0], {"cp_size": 2, "cp_rank": 2}, r"cp_rank must be in 0\.\.1, found 2"),
    ],
)
def test_refused_packs(sample_ids, options, message):
    batch = read_global_batch({"input_ids": nested([torch.arange(3)])})
    with pytest.raises(ValueError, match=message):
        pack_micro_batch(batch, sample_ids, **options)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32])
def test_ids_of_any_integer_type_become_int64_before_the_fill(dtype):
    # As uint8, -100 would wrap around to the real id 156.
    ids = nested([torch.tensor([1, 156]).to(dtype)])
    micro_batch = pack_micro_batch(read_global_batch({"input_ids": ids}, vocab_size=157), [0])
    assert micro_batch.input_ids.tolist() == [1, 156]
    assert micro_batch.labels.tolist() == [156, -100]
    assert micro_batch.input_ids.dtype == micro_batch.labels.dtype == torch.int64
    assert int(micro_batch.num_tokens) == 1


def test_a_sample_that_the_batch_lacks():
    batch = read_global_batch({"input_ids": nested([torch.tensor([1, 2])])})
    for sample in (-1, 1):
        with pytest.raises(ValueError, match=r"sample_ids must be in 0\.\.0"):
            pack_micro_batch(batch, [sample])
