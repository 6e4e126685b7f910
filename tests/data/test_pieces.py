import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.data.pieces import cut_documents

LENGTHS = [0, 1, 2, 9, 10, 11, 12, 30, 31]  # max_length 10, min_length 2


def cut(lengths, **options):
    lengths = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    return cut_documents(ends - lengths, ends, **{"max_length": 10, "min_length": 2} | options)


@pytest.mark.parametrize(
    ("policy", "samples", "expected"),
    [
        ("split", [2, 9, 10, 10, 10, 2, 10, 10, 10, 10, 10, 10], {"split": 4}),
        ("truncate", [2, 9, 10, 10, 10, 10, 10], {"truncated": 4}),
        ("drop", [2, 9, 10], {"dropped_long": 4}),
    ],
)
def test_policies_with_exact_counts(policy, samples, expected):
    pieces = cut(LENGTHS, long_documents=policy, replaced_bytes=5)
    assert (pieces.ends - pieces.starts).tolist() == samples
    counts = {
        "documents": 9,
        "samples": len(samples),
        "tokens": sum(samples),
        "split": 0,
        "truncated": 0,
        "dropped_long": 0,
        "dropped_short": 2,
        "dropped_tokens": sum(LENGTHS) - sum(samples),
        "replaced_bytes": 5,
    }
    assert vars(pieces.counts) == counts | expected


def test_counts_read_as_a_sentence():
    assert str(cut([1, 25, 1000], long_documents="drop").counts) == (
        "0 samples with 0 tokens from 3 documents, 2 documents dropped as too long,"
        " 1 documents dropped as too short or empty, 1,026 tokens in no sample"
    )


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=12),
    max_length=st.integers(1, 12),
    min_length=st.integers(1, 12),
    policy=st.sampled_from(["split", "truncate", "drop"]),
)
def test_same_as_cutting_document_by_document(lengths, max_length, min_length, policy):
    min_length = min(min_length, max_length)
    expected, start = [], 0
    for length in lengths:
        if length >= min_length:
            starts = range(0, length, max_length) if policy == "split" else [0]
            for offset in starts:
                piece = min(max_length, length - offset)
                if piece >= min_length and not (policy == "drop" and length > max_length):
                    expected.append((start + offset, start + offset + piece))
        start += length
    pieces = cut(lengths, max_length=max_length, min_length=min_length, long_documents=policy)
    assert list(zip(pieces.starts.tolist(), pieces.ends.tolist(), strict=True)) == expected
    assert pieces.counts.tokens + pieces.counts.dropped_tokens == sum(lengths)
