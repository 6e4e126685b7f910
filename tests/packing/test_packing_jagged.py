"""Lengths of jagged tensors, contiguous or not, and what is no jagged tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_reference import Case, cases, narrowed, nested, strided

from lightning_dcp.packing import Jagged, is_jagged, read_jagged


def sequences(jagged: Jagged) -> list[list]:
    return [
        jagged.values[start : start + length].tolist()
        for start, length in zip(jagged.starts, jagged.lengths, strict=True)
    ]


@settings(deadline=None)
@given(cases(), st.sampled_from([(), (3,), (2, 2)]))
def test_sequences_are_read_as_stored(case: Case, trailing):
    rows = [torch.rand(length, *trailing) for length in case.lengths]
    jagged = read_jagged(case.jagged(rows))
    assert jagged.lengths.tolist() == list(case.lengths)
    assert sequences(jagged) == [row.tolist() for row in rows]


def test_narrowed_lengths_are_not_the_differences_of_the_offsets():
    dense = torch.arange(12).view(2, 6)
    tensor = torch.nested.narrow(
        dense, 1, torch.tensor([0, 0]), torch.tensor([3, 2]), layout=torch.jagged
    )
    # The trap: what looks like the lengths is not.
    assert tensor.offsets().diff().tolist() != [3, 2]
    jagged = read_jagged(tensor)
    assert jagged.lengths.tolist() == [3, 2]
    assert sequences(jagged) == [[0, 1, 2], [6, 7]]


def test_narrowed_starts_and_lengths_are_both_honoured():
    dense = torch.tensor([[10, 11, 12], [20, 21, 22]])
    tensor = torch.nested.narrow(
        dense, 1, torch.tensor([0, 1]), torch.tensor([2, 1]), layout=torch.jagged
    )
    assert sequences(read_jagged(tensor)) == [[10, 11], [21]]


def test_int32_boundaries():
    tensor = torch.nested.nested_tensor_from_jagged(
        torch.arange(5), offsets=torch.tensor([0, 3, 5], dtype=torch.int32)
    )
    jagged = read_jagged(tensor)
    assert jagged.starts.dtype == jagged.lengths.dtype == "int64"
    assert sequences(jagged) == [[0, 1, 2], [3, 4]]


def test_is_jagged():
    rows = [torch.arange(3), torch.arange(2)]
    assert is_jagged(nested(rows))
    assert is_jagged(narrowed(rows, [1, 0]))
    assert not is_jagged(rows[0])
    assert not is_jagged(strided(rows))
    assert not is_jagged(rows)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, 6), r"routes must be a jagged .* a dense tensor of shape \(2, 6\)"),
        ([[1, 2], [3]], "routes must be a jagged NestedTensor .* found a list"),
        (None, "found a NoneType"),
        (
            strided([torch.zeros(3), torch.zeros(2)]),
            "routes must be a jagged NestedTensor",
        ),
        (
            nested([torch.zeros(3, 2), torch.zeros(4, 2)]).transpose(1, 2),
            "routes must be ragged in dimension 1, found dimension 2",
        ),
    ],
)
def test_what_is_no_jagged_tensor(tensor, message):
    with pytest.raises(TypeError, match=message):
        read_jagged(tensor, "routes")
