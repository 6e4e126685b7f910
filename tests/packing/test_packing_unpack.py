"""Rows of all ranks come back as whole sequences in the order of the global batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_reference import CP_SIZES, nested

from lightning_dcp.config.padding import PackPadding
from lightning_dcp.packing import (
    PackLayout,
    UnpackedSamples,
    pack_micro_batch,
    read_global_batch,
    to_jagged,
    unpack_rows,
)


@st.composite
def partitions(draw):
    """Lengths, and their samples dealt to groups of several CP sizes in any order."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(lengths))))
    cuts = draw(st.sets(st.integers(1, len(lengths) - 1))) if len(lengths) > 1 else set()
    bounds = [0, *sorted(cuts), len(lengths)]
    packs = [order[i:j] for i, j in itertools.pairwise(bounds)]
    sizes = [draw(st.sampled_from(CP_SIZES)) for _ in packs]
    return lengths, list(zip(packs, sizes, strict=True))


@settings(deadline=None)
@given(
    partitions(),
    st.sampled_from([(), (3,), (2, 2)]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 1, 7, 64]),
)
def test_round_trip_over_several_groups(partition, trailing, tp_size, bucket):
    padding = PackPadding(pad_to_length_bucket=bucket)
    lengths, packs = partition
    tokens = [100 * sample + torch.arange(n) for sample, n in enumerate(lengths)]
    values = [torch.rand(length, *trailing) for length in lengths]
    batch = read_global_batch({"input_ids": nested(tokens), "values": nested(values)})
    parts: dict[str, list[UnpackedSamples]] = {"input_ids": [], "values": []}
    for sample_ids, cp_size in packs:
        ranks = [
            pack_micro_batch(
                batch,
                sample_ids,
                cp_size=cp_size,
                cp_rank=rank,
                tp_size=tp_size,
                padding=padding,
            )
            for rank in range(cp_size)
        ]
        for key, rows in (
            ("input_ids", [rank.input_ids for rank in ranks]),
            ("values", [rank.extras["values"] for rank in ranks]),
        ):
            # Any rank's layout will do.
            parts[key].append(unpack_rows(rows, ranks[-1].layout, sample_ids))
    for key, wanted in (("input_ids", tokens), ("values", values)):
        found = to_jagged(parts[key], len(lengths)).unbind()
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_gradients_reach_the_rows_and_not_the_padding():
    layout = PackLayout.of([3, 2], cp_size=2)
    ranks = [torch.rand(layout.num_rows, requires_grad=True) for _ in range(2)]
    part = unpack_rows(ranks, layout, [1, 0])
    to_jagged([part], 2).values().sum().backward()
    for rank, rows in enumerate(ranks):
        mine = PackLayout.of([3, 2], cp_size=2, cp_rank=rank)
        assert rows.grad.tolist() == (~mine.is_padding).astype(float).tolist()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([4], "The group has 2 ranks, found 1"),
        ([4, 4, 4], "The group has 2 ranks, found 3"),
        ([4, 5], "CP rank 1 gave 5 rows; the layout has 4"),
        ([3, 4], "CP rank 0 gave 3 rows; the layout has 4"),
    ],
)
def test_unpack_refuses_rows_of_another_layout(rows, message):
    layout = PackLayout.of([4, 3], cp_size=2)
    with pytest.raises(ValueError, match=message):
        unpack_rows([torch.zeros(number) for number in rows], layout, [0, 1])


def part(*sample_ids: int) -> UnpackedSamples:
    return UnpackedSamples(sample_ids, (1,) * len(sample_ids), torch.tensor(sample_ids))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(0, 2), part(2, 1)], "Sample 2 is there 2 times among the outputs of 3 samples"),
        ([part(0), part(2)], "Sample 1 is there 0 times"),
        ([part(0, 1)], "Sample 2 is there 0 times"),
        ([part(0, 1, 2, 3)], "Sample 3 is there 1 times among the outputs of 3 samples"),
        ([], "Sample 0 is there 0 times"),
    ],
)
def test_every_sample_once_or_an_error_that_names_it(parts, message):
    with pytest.raises(ValueError, match=message):
        to_jagged(parts, 3)
