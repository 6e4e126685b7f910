"""What a wrong input gets: an error that names it and both sides of the arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dcp.loss import IGNORE_INDEX, check_labels, linear_cross_entropy


def loss(**changes: Any) -> Any:
    inputs: dict[str, Any] = {
        "hidden": torch.zeros(4, 3),
        "weight": torch.zeros(6, 3),
        "labels": torch.tensor([0, IGNORE_INDEX, 5, 2]),
    }
    return linear_cross_entropy(**(inputs | changes))


def test_the_inputs_that_the_others_change_are_fine() -> None:
    torch.testing.assert_close(loss(), 3 * torch.tensor(6.0).log())


@pytest.mark.parametrize("label", [6, -1, -99, 10**9])
def test_label_outside_the_vocabulary(label: int) -> None:
    labels = torch.tensor([0, IGNORE_INDEX, label, 2])
    with pytest.raises(ValueError, match=rf"labels\[2\] is {label}, outside .*\(0 to 5\)"):
        loss(labels=labels)
    # The row may hold it if it is masked.
    assert loss(labels=labels, loss_mask=torch.tensor([1, 1, 0, 1])).isfinite()


def test_label_in_the_padding_of_the_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"labels\[2\] is 5, outside .*\(0 to 4\)"):
        loss(vocab_size=5)
    with pytest.raises(ValueError, match="1 of 2 labels"):
        check_labels(torch.tensor([4, 5]), vocab_size=5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperature_that_is_not_above_zero(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature=.*above 0"):
        loss(temperature=temperature)
    per_row = torch.tensor([1.0, 1.0, temperature, 1.0])
    with pytest.raises(ValueError, match=r"temperature\[2\] is .*above 0"):
        loss(temperature=per_row)


@pytest.mark.parametrize("name", ["labels", "loss_mask", "temperature"])
@pytest.mark.parametrize("length", [0, 1, 3, 5])
def test_another_length(name: str, length: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} is \[{length}\], but hidden has 4 rows"):
        loss(**{name: torch.ones(length, dtype=torch.long)})


def test_a_mask_is_no_weight() -> None:
    with pytest.raises(ValueError, match=r"loss_mask\[1\] is 0.5.*reduction='none'"):
        loss(loss_mask=torch.tensor([1.0, 0.5, 0.0, 1.0]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight": torch.zeros(6, 2)}, ValueError, r"\[4, 3\] and weight is \[6, 2\]"),
        ({"hidden": torch.zeros(1, 4, 3)}, ValueError, r"hidden is \[1, 4, 3\]"),
        ({"weight": torch.zeros(6, 3).half()}, TypeError, "torch.float32 .* torch.float16"),
        ({"labels": torch.zeros(4)}, TypeError, "labels is torch.float32"),
        ({"vocab_size": 0}, ValueError, "vocab_size is 0"),
        ({"vocab_size": 7}, ValueError, r"vocab_size is 7, but the weight has 1 \* 6 = 6"),
        ({"reduction": "mean"}, ValueError, "reduction is 'mean'"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing is 1.0"),
        ({"z_loss": -0.1}, ValueError, "z_loss=-0.1 must be finite"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows=0 must be 1 or more"),
        ({"return_entropy": True}, ValueError, "reduction='none'"),
    ],
)
def test_other_options(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loss(**changes)
