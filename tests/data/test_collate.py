import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.data import collate_jagged


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_every_sample_comes_back_and_all_keys_share_one_offsets_tensor(lengths):
    samples = [
        {
            "input_ids": torch.arange(length) + 100 * index,
            "labels": torch.arange(length) - 1,
            "loss_mask": torch.ones(length, dtype=torch.bool),
            "routes": torch.full((length, 2, 3), index, dtype=torch.int32),
            "temperature": 0.5 + index,
            "sample_id": torch.tensor(index),
        }
        for index, length in enumerate(lengths)
    ]
    batch = collate_jagged(samples)
    ids = batch["input_ids"]
    assert ids.is_nested
    assert ids.layout == torch.jagged
    assert ids.dtype == torch.int64
    assert ids.is_contiguous()
    assert ids.offsets().diff().tolist() == lengths
    for key in ("labels", "loss_mask", "routes"):
        assert batch[key].offsets() is ids.offsets()
    assert batch["loss_mask"].dtype == torch.bool
    assert batch["routes"].shape[2:] == (2, 3)
    assert batch["temperature"].tolist() == [0.5 + index for index in range(len(lengths))]
    assert batch["sample_id"].tolist() == list(range(len(lengths)))
    for key in ("input_ids", "labels", "loss_mask", "routes"):
        for row, sample in zip(batch[key].unbind(), samples, strict=True):
            assert torch.equal(row, sample[key])


def test_keys_of_one_batch_can_be_used_in_arithmetic():
    batch = collate_jagged(
        [{"input_ids": [1, 2], "labels": [2, 3]}, {"input_ids": [4], "labels": [5]}]
    )
    assert (batch["labels"] - batch["input_ids"]).values().tolist() == [1, 1, 1]


def test_lists_and_numpy_arrays_become_int64():
    batch = collate_jagged([{"input_ids": np.array([1, 2], dtype=np.uint16)}, {"input_ids": [3]}])
    assert batch["input_ids"].values().tolist() == [1, 2, 3]
    assert batch["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "empty list"),
        (
            [{"input_ids": torch.ones(2).long()}, {"input_ids": torch.ones(0).long()}],
            "sample 1 is empty",
        ),
        ([{"labels": [1]}], "sample 0 has no input_ids, only"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], "sample 1 has the keys"),
        ([{"input_ids": [[1, 2]]}], r"input_ids has the shape \[1, 2\]"),
        (
            [{"input_ids": [1, 2], "loss_mask": [1]}],
            "sample 0: loss_mask has 1 rows for 2 input_ids",
        ),
        (
            [{"input_ids": [1], "k": torch.ones(1, 2)}, {"input_ids": [1], "k": torch.ones(1, 3)}],
            r"sample 1: k has the shape \[1, 3\], in sample 0 it has \[1, 2\]",
        ),
        (
            [{"input_ids": [1], "t": 1.0}, {"input_ids": [1], "t": [1.0]}],
            "sample 1: t has the shape",
        ),
    ],
)
def test_refuses(samples, message):
    with pytest.raises(ValueError, match=message):
        collate_jagged(samples)


@pytest.mark.parametrize("key", ["input_ids", "labels"])
def test_refuses_ids_that_are_no_integers(key):
    sample = {"input_ids": torch.ones(2).long(), "labels": torch.ones(2).long(), key: torch.ones(2)}
    with pytest.raises(TypeError, match=f"sample 0: {key} must be integers, found torch.float32"):
        collate_jagged([sample])


def test_routes_may_lack_those_of_a_samples_last_token():
    samples = [
        {"input_ids": [1, 2, 3], "routed_experts": torch.ones(2, 1, 2, dtype=torch.uint8)},
        {"input_ids": [4], "routed_experts": torch.ones(1, 1, 2, dtype=torch.uint8)},
    ]
    batch = collate_jagged(samples)
    assert batch["routed_experts"].offsets().diff().tolist() == [2, 1]
    assert batch["routed_experts"].dtype == torch.uint8
    assert batch["input_ids"].offsets().diff().tolist() == [3, 1]
    with pytest.raises(ValueError, match="sample 0: routed_experts has 2 rows for 3 input_ids"):
        collate_jagged(samples, may_lack_last=())
