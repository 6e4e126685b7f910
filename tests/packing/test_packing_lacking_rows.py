"""A key that lacks the last token's value, as a sampler's routes do, packs as 0 there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_reference import Case, cases

from lightning_dcp.packing import read_global_batch


def stored(rows):
    """Jagged, also where no sample has any row."""
    lengths = torch.tensor([len(row) for row in rows])
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


@settings(deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_rows_follow_their_tokens_and_those_without_a_value_have_zeros(case: Case, random):
    tokens = case.tokens()
    lacking = [random.random() < 0.5 for _ in tokens]
    values = [
        torch.stack((torch.arange(1, len(ids) + 1), ids), 1)[: len(ids) - lacks].to(torch.int16)
        for ids, lacks in zip(tokens, lacking, strict=True)
    ]
    batch = read_global_batch(
        {"input_ids": case.jagged(tokens), "values": stored(values)}, may_lack_last=["values"]
    )
    for rank, micro_batch in enumerate(case.pack(batch)):
        found = micro_batch.extras["values"]
        assert found.dtype == torch.int16
        for row, (sample, position) in zip(found.tolist(), case.rows(rank), strict=True):
            has = position < len(values[sample])
            assert row == (values[sample][position].tolist() if has else [0, 0])


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_any_other_length_names_the_sample(rows):
    ids = stored([torch.tensor([5]), torch.tensor([1, 2, 3])])
    values = stored([torch.zeros(1), torch.zeros(rows)])
    allowed = ["values"]
    if rows == 2:
        read_global_batch({"input_ids": ids, "values": values}, may_lack_last=allowed)
        allowed = []
    with pytest.raises(ValueError, match=f"'values' of sample 1 has {rows} rows.* 3 tokens"):
        read_global_batch({"input_ids": ids, "values": values}, may_lack_last=allowed)
