"""Log-probabilities at given ids: values and both gradients equal log-softmax and a gather."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from loss_reference import IGNORED, Inputs, gradients, make_inputs

from distributed import run_distributed
from lightning_dcp.loss import linear_log_probs_at

CASES: list[dict[str, Any]] = [
    {},
    {"vocab_size": 31, "temperature": 0.7},
    {"vocab_size": 11, "chunk_rows": 4},
]


def make(options: dict[str, Any], k: int = 3) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """Inputs, ids [rows, k] that repeat within rows, and random gradients [rows, k]."""
    real = options.get("vocab_size", 36)
    inputs = make_inputs(rows=19, vocab=36, real=real)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(real, (19, k), generator=generator)
    ids[:, -1] = ids[:, 0]
    return inputs, ids, torch.randn(19, k, generator=generator, dtype=torch.float64)


def expected(inputs: Inputs, ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    logits = (inputs.hidden @ inputs.weight.T)[:, : options.get("vocab_size")]
    found = (logits / options.get("temperature", 1.0)).log_softmax(1).gather(1, ids)
    return torch.where((inputs.labels != IGNORED)[:, None], found, 0)


def run(dtype: torch.dtype) -> list[dict[str, np.ndarray]]:
    results = []
    for options in CASES:
        inputs, ids, of_values = make(options)
        weight = inputs.weight.chunk(dist.get_world_size())[dist.get_rank()]
        local = Inputs(inputs.hidden, weight, inputs.labels).to(dtype)
        mask = local.labels != IGNORED
        found = linear_log_probs_at(
            local.hidden,
            local.weight,
            ids.masked_fill(~mask[:, None], 10**6),
            loss_mask=mask,
            tp_group=dist.group.WORLD if dist.get_world_size() > 1 else None,
            **options,
        )
        of_hidden, of_weight = gradients((found * of_values).sum(), local)
        values = {"values": found, "hidden": of_hidden, "weight": of_weight}
        results.append({key: one.detach().double().numpy() for key, one in values.items()})
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equals_a_gather_of_log_softmax(ranks: int) -> None:
    by_rank = run_distributed(run, ranks, torch.float64)
    for case, options in enumerate(CASES):
        inputs, ids, of_values = make(options)
        wanted = expected(inputs, ids, options)
        of_hidden, of_weight = gradients((wanted * of_values).sum(), inputs)
        found = [results[case] for results in by_rank]
        close = {"rtol": 1e-9, "atol": 1e-11}
        weight = np.concatenate([one["weight"] for one in found])
        np.testing.assert_allclose(weight, of_weight.numpy(), **close)
        for one in found:
            np.testing.assert_allclose(one["values"], wanted.detach().numpy(), **close)
            np.testing.assert_allclose(one["hidden"], of_hidden.numpy(), **close)


def test_bfloat16_is_as_good_as_an_unchunked_one() -> None:
    (found,) = run_distributed(run, 1, torch.bfloat16)
    for options, one in zip(CASES, found, strict=True):
        inputs, ids, _ = make(options)
        exact = inputs.to(torch.bfloat16).to(torch.float64)
        wanted = expected(exact, ids, options).detach()
        plain = expected(inputs.to(torch.bfloat16), ids, options).double()
        error = np.abs(one["values"] - wanted.numpy()).max()
        assert error <= float((plain - wanted).abs().max().detach())


def test_no_row_that_counts_gives_zeros_and_no_gradient() -> None:
    inputs, ids, _ = make({})
    mask = torch.zeros(19, dtype=torch.bool)
    found = linear_log_probs_at(inputs.hidden, inputs.weight, ids, loss_mask=mask)
    of_hidden, of_weight = gradients(found.sum(), inputs)
    for value in (found, of_hidden, of_weight):
        assert not value.any()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(19, dtype=torch.int64), r"ids is \[19\]"),
        (torch.zeros(18, 2, dtype=torch.int64), r"ids is \[18, 2\]"),
        (torch.full((19, 2), 36), r"ids\[0, 0\] is 36"),
        (torch.full((19, 2), -100), r"ids\[0, 0\] is -100"),
    ],
)
def test_ids_that_do_not_fit(ids: torch.Tensor, message: str) -> None:
    inputs, _, _ = make({})
    with pytest.raises(ValueError, match=message):
        linear_log_probs_at(inputs.hidden, inputs.weight, ids)
