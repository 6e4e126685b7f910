"""The vocabulary split over 2 and 3 ranks equals the whole on one, on every rank alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from loss_reference import IGNORED, Inputs, gradients, make_inputs, reference

from distributed import WorkerError, run_distributed
from lightning_dcp.loss import linear_cross_entropy

CASES: list[dict[str, Any]] = [
    {},
    {"vocab_size": 31},
    # Less than one rank's rows: the last rank holds padding only.
    {"vocab_size": 11, "label_smoothing": 0.1},
    {"temperature": 0.6, "label_smoothing": 0.2, "z_loss": 0.01, "vocab_size": 29},
]


def _inputs(options: dict[str, Any]) -> Inputs:
    return make_inputs(rows=19, vocab=36, real=options.get("vocab_size"))


def _shard(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    weight = inputs.weight.chunk(dist.get_world_size())[dist.get_rank()]
    return Inputs(inputs.hidden, weight, inputs.labels).to(dtype)


def _run(reduction: Any, dtype: torch.dtype) -> list[dict[str, np.ndarray]]:
    results = []
    for options in CASES:
        local = _shard(_inputs(options), dtype)
        entropy = torch.zeros(())
        found = linear_cross_entropy(
            *vars(local).values(),
            reduction=reduction,
            return_entropy=reduction == "none",
            tp_group=dist.group.WORLD,
            chunk_rows=4,
            **options,
        )
        if reduction == "none":
            found, entropy = found
        found, entropy = found.sum(), entropy.sum()
        of_hidden, of_weight = gradients(2 * found + 0.5 * entropy, local)
        values = {"loss": found, "entropy": entropy, "hidden": of_hidden, "weight": of_weight}
        results.append({key: one.detach().double().numpy() for key, one in values.items()})
    return results


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equals_the_whole_vocabulary(ranks: int, reduction: str) -> None:
    by_rank = run_distributed(_run, ranks, reduction, torch.float64)
    for case, options in enumerate(CASES):
        inputs = _inputs(options)
        losses, entropies = reference(inputs, **options)
        loss = losses.sum()
        entropy = entropies.sum() if reduction == "none" else torch.zeros(())
        of_hidden, of_weight = gradients(2 * loss + 0.5 * entropy, inputs)
        found = [results[case] for results in by_rank]
        weight = np.concatenate([one["weight"] for one in found])
        np.testing.assert_allclose(weight, of_weight.numpy(), rtol=1e-9, atol=1e-11)
        for one in found:
            np.testing.assert_allclose(one["loss"], loss.item())
            np.testing.assert_allclose(one["entropy"], entropy.item())
            np.testing.assert_allclose(one["hidden"], of_hidden.numpy(), rtol=1e-9, atol=1e-11)


def test_all_ranks_get_the_same_bits_in_bfloat16() -> None:
    by_rank = run_distributed(_run, 3, "sum", torch.bfloat16)
    for case, options in enumerate(CASES):
        exact = _inputs(options).to(torch.bfloat16).to(torch.float64)
        expected = reference(exact, **options)[0].sum()
        of_hidden, _ = gradients(2 * expected, exact)
        first, *others = (results[case] for results in by_rank)
        np.testing.assert_allclose(first["loss"], expected.item(), rtol=1e-2)
        scale = of_hidden.abs().max().item()
        np.testing.assert_allclose(first["hidden"], of_hidden.numpy(), atol=2e-2 * scale)
        for other in others:
            for key in ("loss", "hidden"):
                np.testing.assert_array_equal(first[key], other[key])


def _count_collectives() -> tuple[int, int]:
    local = _shard(_inputs({}), torch.float32)
    counts = {"all_gather_single": 0, "all_reduce": 0}

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    linear_cross_entropy(*vars(local).values(), tp_group=dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            patch.setattr(dist, name, counted(name))
        labels = torch.zeros_like(local.labels)
        linear_cross_entropy(
            local.hidden, local.weight, labels, tp_group=dist.group.WORLD, chunk_rows=5
        ).backward()
    return counts["all_gather_single"], counts["all_reduce"]


def test_one_collective_a_chunk_and_one_for_the_hidden_gradient() -> None:
    assert run_distributed(_count_collectives, 2) == [(4, 1), (4, 1)]


def _no_target() -> list[float]:
    local = _shard(_inputs({}), torch.float32)
    labels = torch.full_like(local.labels, IGNORED)
    loss = linear_cross_entropy(local.hidden, local.weight, labels, tp_group=dist.group.WORLD)
    of_hidden, of_weight = gradients(loss, local)
    return [loss.item(), of_hidden.abs().sum().item(), of_weight.abs().sum().item()]


def test_no_target_gives_exact_zeros() -> None:
    assert run_distributed(_no_target, 2) == [[0.0] * 3] * 2


def _different_sizes() -> str:
    local = 4 + dist.get_rank()
    with pytest.raises(ValueError, match=r"weight has \[4, 5\] rows on the ranks of tp_group"):
        linear_cross_entropy(
            torch.zeros(2, 3),
            torch.zeros(local, 3),
            torch.zeros(2, dtype=torch.long),
            tp_group=dist.group.WORLD,
        )
    return "raised"


def test_different_sizes_are_refused_on_every_rank() -> None:
    assert run_distributed(_different_sizes, 2) == ["raised"] * 2


def _vocab_size_too_large() -> None:
    linear_cross_entropy(
        torch.zeros(2, 3),
        torch.zeros(4, 3),
        torch.zeros(2, dtype=torch.long),
        tp_group=dist.group.WORLD,
        vocab_size=9,
    )


def test_vocab_size_counts_all_ranks() -> None:
    with pytest.raises(WorkerError, match=r"vocab_size is 9, but the weight has 2 \* 4 = 8 rows"):
        run_distributed(_vocab_size_too_large, 2)
