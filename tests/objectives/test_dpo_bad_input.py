"""Pairs that are none are an error that names the samples, before the step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import trainers
from lightning_dcp import DPO, SFT, DynamicCPStrategy
from lightning_dcp.packing import pack_micro_batch, read_global_batch


def batch_of(**changes):
    """Four samples of two pairs; a change to None takes a key away."""
    rows = [torch.arange(n) for n in (3, 1, 4, 2)]
    ids = torch.nested.nested_tensor(rows, layout=torch.jagged)
    batch = {
        "input_ids": ids,
        "pair_id": torch.tensor([7, -3, 7, -3]),
        "is_chosen": torch.tensor([True, False, False, True]),
        "reference_log_probs": torch.nested.nested_tensor_from_jagged(
            torch.zeros(10), ids.offsets()
        ),
        **changes,
    }
    return read_global_batch({key: value for key, value in batch.items() if value is not None})


def test_pairs_are_taken():
    DPO().check(batch_of(), vocab_size=5)
    DPO(reference_free=True).check(batch_of(reference_log_probs=None), vocab_size=5)
    DPO(reference_per="sample").check(batch_of(reference_log_probs=torch.zeros(4)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"pair_id": (7, -3, 7, 5)}, "'pair_id'=-3 is that of 1 samples of the batch, sample 1;"),
        ({"pair_id": (7, 7, 7, 5)}, "'pair_id'=5 is that of 1 samples of the batch, sample 3;"),
        ({"pair_id": (7, 7, 7, 7)}, "'pair_id'=7 is that of 4 samples of the batch, samples 0, 1"),
        (
            {"is_chosen": (True, False, True, True)},
            "'is_chosen' is True for both samples of the pair 'pair_id'=7, samples 0, 2;",
        ),
        (
            {"is_chosen": (False, False, True, False)},
            "'is_chosen' is False for both samples of the pair 'pair_id'=-3, samples 1, 3;",
        ),
    ],
)
def test_ids_that_are_not_those_of_pairs(batch, message):
    with pytest.raises(ValueError, match="'pair_id'") as caught:
        DPO().check(batch_of(**{key: torch.tensor(value) for key, value in batch.items()}))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pair_id": None}, ValueError, "DPO needs 'pair_id' in every batch: a dense tensor"),
        ({"is_chosen": None}, ValueError, "DPO needs 'is_chosen' in every batch"),
        ({"reference_log_probs": None}, ValueError, "DPO needs 'reference_log_probs' in every"),
        ({"reference_log_probs": torch.zeros(4)}, ValueError, "found it dense"),
        ({"pair_id": torch.zeros(4)}, TypeError, "integers; found torch.float32"),
        ({"pair_id": torch.zeros(4).bool()}, TypeError, "integers; found torch.bool"),
        ({"is_chosen": torch.tensor([1, 0, 0, 1])}, TypeError, "bool; found torch.int64"),
        ({"is_chosen": torch.zeros(4, 1).bool()}, ValueError, r"of shape \[4, 1\]"),
    ],
)
def test_keys_that_are_missing_or_of_another_kind(changes, error, message):
    with pytest.raises(error, match=message):
        DPO().check(batch_of(**changes))


def test_a_reference_a_sample_where_one_a_token_is_wanted_names_the_form():
    with pytest.raises(ValueError, match="found it jagged with one value a token"):
        DPO(reference_per="sample").check(batch_of())


@pytest.mark.parametrize("samples", [[0, 1], [0, 1, 2], [1]])
def test_a_micro_batch_that_tears_a_pair(samples):
    micro_batch = pack_micro_batch(batch_of(), samples, target_extras=["reference_log_probs"])
    outputs = SimpleNamespace(log_probs=lambda: torch.zeros(len(micro_batch.labels)))
    with pytest.raises(ValueError, match="keep_together='pair_id'") as caught:
        DPO()(outputs, micro_batch)
    assert f"samples {samples} does not hold both" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPO(beta=0.0), "beta=0.0"),
        (lambda: DPO(beta=float("nan")), "beta=nan"),
        (lambda: DPO(label_smoothing=0.5), "label_smoothing=0.5 must be below 0.5"),
        (lambda: DPO(label_smoothing=-0.1), "label_smoothing=-0.1"),
        (lambda: DPO(reference_per="sequence"), "reference_per='sequence'"),
    ],
)
def test_options_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("objective", "key"), [(DPO(pair_id="pair"), "pair"), (SFT(), None)], ids=["dpo", "sft"]
)
def test_the_module_asks_for_plans_that_keep_pairs_together(objective, key):
    strategy = DynamicCPStrategy(8)
    asked = []
    strategy._engine = SimpleNamespace(prepare=lambda batch, **options: asked.append(options))
    module = trainers.module(objective=objective)
    module._trainer = SimpleNamespace(strategy=strategy)
    module._prepare({})
    assert asked[0].get("keep_together") == key
