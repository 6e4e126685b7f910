"""What a batch that cannot be trained on gets: an error that names the key, sample and number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packing_reference import narrowed, nested

from lightning_dcp.packing import read_global_batch

IDS = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]


def batch(**changes: Any) -> dict[str, Any]:
    return {"input_ids": nested(IDS)} | changes


def floats(*lengths: int) -> torch.Tensor:
    return nested([torch.zeros(length) for length in lengths])


def test_the_batch_that_the_others_change_is_fine():
    extras = {"routes": floats(3, 2), "weights": torch.zeros(2)}
    read = read_global_batch(batch(labels=nested(IDS), **extras), vocab_size=6)
    assert len(read) == 2
    assert read.lengths.tolist() == [3, 2]
    assert set(read.extras) == {"routes", "weights"}
    assert read.loss_mask is None


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (nested(IDS), TypeError, "A batch must be a dict with 'input_ids'"),
        ([nested(IDS)], TypeError, "A batch must be a dict with 'input_ids', found a list"),
        ({"text": 0, "ids": 1}, ValueError, r"no 'input_ids'; its keys are \['ids', 'text'\]"),
        (
            {"input_ids": torch.zeros(2, 3)},
            TypeError,
            r"input_ids must be a jagged NestedTensor .* a dense tensor of shape \(2, 3\)",
        ),
        ({"input_ids": [1, 2]}, TypeError, "input_ids must be a jagged .* found a list"),
        (
            {"input_ids": nested([torch.zeros(3, 2), torch.zeros(4, 2)]).transpose(1, 2)},
            TypeError,
            "input_ids must be ragged in dimension 1, found dimension 2",
        ),
        (
            {
                "input_ids": torch.nested.nested_tensor_from_jagged(
                    torch.zeros(0, dtype=torch.int64), offsets=torch.tensor([0])
                )
            },
            ValueError,
            "The batch is empty: 'input_ids' holds no sequence",
        ),
        (
            {"input_ids": nested([torch.arange(2), torch.arange(0), torch.arange(1)])},
            ValueError,
            r"Sample 1 of the batch is empty \(length 0\)",
        ),
    ],
)
def test_what_is_no_batch(value, error, message):
    with pytest.raises(error, match=message):
        read_global_batch(value)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("routes", [1, 2], TypeError, "'routes' must be a jagged .* found a list"),
        ("routes", "text", TypeError, "'routes' must be .* found a str"),
        ("routes", None, TypeError, "'routes' must be .* found a NoneType"),
        ("weights", torch.zeros(3), ValueError, r"'weights' .*shape \(3,\); .* has 2 rows"),
        ("weights", torch.tensor(1.0), ValueError, r"'weights' .*shape \(\); .* has 2 rows"),
        ("routes", floats(3), ValueError, "'routes' has 1 samples, 'input_ids' has 2"),
        (
            "routes",
            floats(3, 4),
            ValueError,
            "'routes' of sample 1 has 4 rows, its 'input_ids' 2 tokens",
        ),
        ("labels", floats(4, 2), ValueError, "'labels' of sample 0 has 4 rows"),
        ("loss_mask", floats(3, 1), ValueError, "'loss_mask' of sample 1 has 1 rows"),
        ("labels", torch.zeros(2), TypeError, "'labels' must be a jagged NestedTensor"),
        ("loss_mask", torch.zeros(2, 3), TypeError, "'loss_mask' must be a jagged NestedTensor"),
    ],
)
def test_a_key_that_does_not_fit_the_tokens(key, value, error, message):
    with pytest.raises(error, match=message):
        read_global_batch(batch(**{key: value}))


def test_a_narrowed_key_of_other_lengths_is_refused():
    # The dense storage is the same for both, so that offsets would look alike.
    dense = torch.arange(12).view(2, 6)
    zeros = torch.tensor([0, 0])
    ids = torch.nested.narrow(dense, 1, zeros, torch.tensor([3, 2]), layout=torch.jagged)
    routes = torch.nested.narrow(dense, 1, zeros, torch.tensor([3, 4]), layout=torch.jagged)
    with pytest.raises(ValueError, match="'routes' of sample 1 has 4 rows, its 'input_ids' 2"):
        read_global_batch({"input_ids": ids, "routes": routes})


@pytest.mark.parametrize("store", [nested, lambda rows: narrowed(rows, [1, 2])])
@pytest.mark.parametrize("bad", [-1, 6, 10**9])
def test_ids_outside_the_vocabulary(store, bad):
    ids = store([torch.tensor([1, 2, 3]), torch.tensor([4, bad])])
    message = rf"'input_ids' of sample 1 holds id {bad} at position 1; .* ids 0 to 5"
    with pytest.raises(ValueError, match=message):
        read_global_batch({"input_ids": ids}, vocab_size=6)
    # Without a vocabulary there is nothing to compare with.
    read_global_batch({"input_ids": ids})


def test_the_first_and_the_last_id_are_in_the_vocabulary():
    read_global_batch({"input_ids": nested([torch.tensor([0, 5])])}, vocab_size=6)


def test_what_lies_between_narrowed_sequences_is_not_checked():
    # `narrowed` fills the gaps with 77.
    read_global_batch({"input_ids": narrowed(IDS, [2, 1])}, vocab_size=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_ids_that_are_no_integers(dtype):
    with pytest.raises(TypeError, match=f"'input_ids' must hold integers, found {dtype}"):
        read_global_batch(batch(input_ids=nested([row.to(dtype) for row in IDS])), vocab_size=6)


def test_labels_may_be_ignored_but_not_outside_the_vocabulary():
    ignored = nested([torch.tensor([-100, 2, -100]), torch.tensor([4, -100])])
    read_global_batch(batch(labels=ignored), vocab_size=6)
    for bad in (-99, -1, 6):
        labels = nested([torch.tensor([-100, 2, 3]), torch.tensor([-100, bad])])
        message = f"'labels' of sample 1 holds id {bad} at position 1"
        with pytest.raises(ValueError, match=message):
            read_global_batch(batch(labels=labels), vocab_size=6)
    with pytest.raises(ValueError, match="'input_ids' of sample 0 holds id -100 at position 0"):
        read_global_batch({"input_ids": ignored}, vocab_size=6)


@pytest.mark.parametrize("weight", [0.5, 2.0, -1.0, float("nan")])
def test_a_loss_mask_selects_and_does_not_weigh(weight):
    mask = nested([torch.tensor([1.0, 0.0, weight]), torch.ones(2)])
    with pytest.raises(ValueError, match="'loss_mask' of sample 0 holds"):
        read_global_batch(batch(loss_mask=mask))


def test_a_loss_mask_of_integers_does_not_weigh_either():
    mask = nested([torch.tensor([1, 0, 2]), torch.tensor([1, 1])])
    with pytest.raises(ValueError, match="'loss_mask' of sample 0 holds 2"):
        read_global_batch(batch(loss_mask=mask))


def test_what_lies_between_sequences_is_no_mask():
    # Dense [[1., 1., 7.]], start 0, length 2: the 7 belongs to nobody.
    mask = torch.nested.narrow(
        torch.tensor([[1.0, 1.0, 7.0]]), 1, torch.tensor([0]), torch.tensor([2]), torch.jagged
    )
    ids = nested([torch.tensor([1, 2])])
    assert read_global_batch({"input_ids": ids, "loss_mask": mask}).loss_mask is not None


@pytest.mark.parametrize("key", ["input_ids", "labels", "loss_mask"])
def test_token_keys_hold_one_value_a_token(key):
    twice = nested([torch.ones(3, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)])
    with pytest.raises(ValueError, match=rf"'{key}' needs one value a token, found \(2,\)"):
        read_global_batch(batch(**{key: twice}))


def test_ids_are_integers_whether_or_not_the_vocabulary_is_known():
    with pytest.raises(TypeError, match=r"must hold integers, found torch\.float32"):
        read_global_batch({"input_ids": floats(3, 2)})
