"""The layout of a pack against brute force, and what public reports say that it must be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from packing_reference import Case, cases, padded_lengths, rows_of_rank

from lightning_dcp.config.padding import PackPadding
from lightning_dcp.packing import PackLayout


def layouts(case: Case) -> list[PackLayout]:
    return [
        PackLayout.of(
            case.lengths,
            cp_size=case.cp_size,
            cp_rank=rank,
            tp_size=case.tp_size,
            padding=case.padding,
        )
        for rank in range(case.cp_size)
    ]


@settings(deadline=None)
@given(cases())
def test_rows_are_the_zigzag_of_every_sequence(case):
    for rank, layout in enumerate(layouts(case)):
        rows = rows_of_rank(case.lengths, case.cp_size, rank, case.tp_size, case.padding)
        assert layout.num_rows == len(rows)
        assert layout.sequence_of_row.tolist() == [sequence for sequence, _ in rows]
        assert layout.positions.tolist() == [position for _, position in rows]
        assert (~layout.is_padding).tolist() == [
            position < case.lengths[sequence] for sequence, position in rows
        ]


@settings(deadline=None)
@given(cases())
def test_boundaries_are_sums_of_whole_lengths_on_every_rank(case):
    whole = padded_lengths(case.lengths, case.cp_size, case.tp_size, case.padding)
    for layout in layouts(case):
        assert layout.padded_lengths.tolist() == whole
        assert layout.cu_seqlens.tolist() == np.cumsum([0, *case.lengths]).tolist()
        assert layout.cu_seqlens_padded.tolist() == np.cumsum([0, *whole]).tolist()
        assert layout.cu_seqlens.dtype == layout.cu_seqlens_padded.dtype == np.int32
        assert layout.row_starts.tolist() == [
            boundary // case.cp_size for boundary in np.cumsum([0, *whole])
        ]
        assert layout.max_seqlen == max(whole)


@settings(deadline=None)
@given(cases())
def test_gather_index_puts_the_rows_of_all_ranks_in_token_order(case):
    gathered = [
        row
        for rank in range(case.cp_size)
        for row in rows_of_rank(case.lengths, case.cp_size, rank, case.tp_size, case.padding)
    ]
    whole = padded_lengths(case.lengths, case.cp_size, case.tp_size, case.padding)
    in_order = rows_of_rank(whole, 1, 0, 1)
    for layout in layouts(case):
        assert [gathered[index] for index in layout.gather_index] == in_order


@settings(deadline=None)
@given(cases())
def test_the_number_of_rows_is_a_multiple_of_all_that_must_divide_it(case):
    for layout in layouts(case):
        tokens = layout.num_rows * case.cp_size
        align = case.tp_size * (2 * case.cp_size if case.cp_size > 1 else 1)
        assert tokens == layout.padded_lengths.sum()
        assert tokens % (align * (128 if case.padding.fp8 else 1)) == 0
        assert layout.num_rows % (case.padding.pad_to_length_bucket or 1) == 0
        assert layout.num_rows == (case.padding.pad_to_length or layout.num_rows)
        if case.padding.fp8:
            assert not (layout.padded_lengths % 16).any()


def test_rows_that_fill_up_a_pack_are_padding_at_its_end():
    padding = PackPadding(pad_to_length_bucket=8)
    first, second = (
        PackLayout.of([3, 6], cp_size=2, cp_rank=rank, padding=padding) for rank in (0, 1)
    )
    assert first.cu_seqlens.tolist() == [0, 3, 9]
    assert first.cu_seqlens_padded.tolist() == [0, 4, 16]
    # The last sequence is cut as one of 12 tokens: chunks of 3.
    assert first.positions.tolist() == [0, 3, 0, 1, 2, 9, 10, 11]
    assert (~first.is_padding).tolist() == [True, False, True, True, True, False, False, False]
    assert second.positions.tolist() == [1, 2, *range(3, 9)]
    assert (~second.is_padding).tolist() == [True] * 5 + [False] * 3


@pytest.mark.parametrize("cp_rank", range(32))
def test_boundaries_are_never_cut(cp_rank):
    layout = PackLayout.of([3, 64, 65, 1], cp_size=32, cp_rank=cp_rank)
    assert layout.cu_seqlens.tolist() == [0, 3, 67, 132, 133]
    assert layout.cu_seqlens_padded.tolist() == [0, 64, 128, 256, 320]


def test_zigzag_is_per_sequence():
    layout = PackLayout.of([8, 8], cp_size=2, cp_rank=0)
    tokens = layout.positions + 8 * layout.sequence_of_row
    assert tokens.tolist() == [0, 1, 6, 7, 8, 9, 14, 15]


def test_positions_of_a_length_that_needs_padding():
    first, second = (PackLayout.of([4803], cp_size=2, cp_rank=rank) for rank in (0, 1))
    assert first.positions.tolist() == [*range(1201), *range(3603, 4804)]
    assert second.positions.tolist() == list(range(1201, 3603))
    assert (~first.is_padding).tolist() == [True] * 2401 + [False]
    assert not second.is_padding.any()


def test_odd_lengths_keep_their_last_token():
    first, second = (PackLayout.of([4, 3], cp_size=2, cp_rank=rank) for rank in (0, 1))
    assert first.padded_lengths.tolist() == [4, 4]
    assert first.positions.tolist() == [0, 3, 0, 3]
    assert second.positions.tolist() == [1, 2, 1, 2]
    assert (~first.is_padding).tolist() == [True, True, True, False]
    assert not second.is_padding.any()


@pytest.mark.parametrize("cp_rank", [0, 2])
@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_rows_divide_by_the_tensor_parallel_size(cp_rank, tp_size):
    layout = PackLayout.of([1, 7, 12, 13], cp_size=3, cp_rank=cp_rank, tp_size=tp_size)
    assert (np.diff(layout.row_starts) % (2 * tp_size) == 0).all()


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "at least one sequence, found none"),
        ([3, 0], {}, "Sequence 1 of the pack has length 0"),
        ([3, 2, -4], {}, "Sequence 2 of the pack has length -4"),
        ([3], {"cp_size": 2, "cp_rank": 2}, r"cp_rank must be in 0\.\.1, found 2"),
        ([3], {"cp_size": 2, "cp_rank": -1}, r"cp_rank must be in 0\.\.1, found -1"),
        ([3], {"cp_rank": 1}, r"cp_rank must be in 0\.\.0, found 1"),
        ([3, 6], {"padding": PackPadding(pad_to_length=8)}, "take 9 rows .* pad_to_length=8"),
        ([3], {"cp_size": 2, "padding": PackPadding(pad_to_length=5)}, "5 is no multiple of 2"),
    ],
)
def test_refused_layouts(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        PackLayout.of(lengths, **options)
