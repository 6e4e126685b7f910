"""Sums and means of whole sequences are those of the uncut ones, on every rank of a CP group."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed import run_distributed
from lightning_dcp.objectives import once_per_group, sequence_means, sequence_sums
from lightning_dcp.packing import pack_micro_batch, read_global_batch
from lightning_dcp.parallel import ParallelSizes, bind_micro_batch, setup_parallel

# Under CP 4 the short ones leave ranks without a token; the third never has a target.
LENGTHS = [21, 2, 1, 16, 9]
# Which sequences have targets: all, one on a single rank, none.
KEPT = {"all": [1, 1, 1, 1, 1], "one": [0, 1, 0, 0, 0], "none": [0, 0, 0, 0, 0]}


def made(kept: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Values and masks by sequence."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    masks = [
        torch.arange(n) % 4 != 3 if has_target else torch.zeros(n, dtype=torch.bool)
        for n, has_target in zip(LENGTHS, KEPT[kept], strict=True)
    ]
    return values, masks


def loss_of(sums: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Something that is linear in none of the sequences and mixes them."""
    return torch.logsumexp(sums, 0) * torch.tanh(means).sum() + (sums[0] - sums[3]).square()


def expected(kept: str, form: str) -> tuple[torch.Tensor, ...]:
    values, masks = made(kept)
    values = [one.requires_grad_() for one in values]
    targets = [one[1:][mask[1:]] for one, mask in zip(values, masks, strict=True)]
    sums = torch.stack([one.sum() for one in targets])
    means = torch.stack([one.sum() / max(len(one), 1) for one in targets])
    if form == "sequences":
        loss = loss_of(sums, means)
    else:
        loss = sum((one.sin() * mean).sum() for one, mean in zip(targets, means, strict=True))
    loss.backward()
    return sums, means, loss, torch.cat([one.grad for one in values])


def reduced(tp: int, kept: str, form: str) -> list[np.ndarray]:
    """Sums, means, the sum of all ranks' losses and of their gradients, of one pack on the pool."""
    world = dist.get_world_size()
    context = setup_parallel(ParallelSizes(world_size=world, tensor_model_parallel_size=tp))
    values, masks = made(kept)
    read = read_global_batch(
        {
            "input_ids": torch.nested.nested_tensor(
                [torch.arange(n) for n in LENGTHS], layout=torch.jagged
            ),
            "loss_mask": torch.nested.nested_tensor(masks, layout=torch.jagged),
            "values": torch.nested.nested_tensor(values, layout=torch.jagged),
        }
    )
    whole = read.extras["values"].values.clone().requires_grad_()
    read.extras["values"] = dataclasses.replace(read.extras["values"], values=whole)
    try:
        micro_batch = pack_micro_batch(
            read,
            range(len(LENGTHS)),
            cp_size=world // tp,
            cp_rank=context.pool_rank,
            tp_size=tp,
            target_extras=["values"],
        )
        micro_batch = bind_micro_batch(micro_batch, context.cp_groups)
        rows = micro_batch.target_extras["values"]
        sums, means = sequence_sums(rows, micro_batch), sequence_means(rows, micro_batch)
        if form == "sequences":
            loss = once_per_group(loss_of(sums, means), micro_batch)
        else:
            # Each row's loss takes the mean of its whole sequence, as in GSPO.
            sequence = torch.from_numpy(micro_batch.layout.sequence_of_row)
            loss = torch.where(micro_batch.loss_mask, rows.sin() * means[sequence], 0).sum()
        loss.backward()
        total = loss.detach().clone()
        for one in (total, whole.grad):
            dist.all_reduce(one, group=context.pg_collection.dp_cp)
    finally:
        context.destroy()
    return [one.detach().numpy() for one in (sums, means, total, whole.grad)]


@pytest.mark.parametrize("form", ["sequences", "rows"])
@pytest.mark.parametrize(
    ("world", "tp", "kept"),
    [(1, 1, "all"), (2, 1, "all"), (4, 1, "all"), (4, 2, "all"), (4, 1, "one"), (4, 1, "none")],
)
def test_sums_means_and_gradients_are_those_of_uncut_sequences(world, tp, kept, form):
    ranks = run_distributed(reduced, world, tp, kept, form)
    for found in ranks:
        for one, wanted in zip(found, expected(kept, form), strict=True):
            np.testing.assert_allclose(one, wanted.detach().numpy(), rtol=1e-12, atol=1e-12)
        # Not nearly: ranks must take the same decisions.
        for one, first in zip(found[:2], ranks[0][:2], strict=True):
            np.testing.assert_array_equal(one, first)


def test_sums_of_float32_rows_are_exact_to_float64():
    length = 20_000
    batch = read_global_batch(
        {"input_ids": torch.nested.nested_tensor([torch.zeros(length).long()], layout=torch.jagged)}
    )
    micro_batch = pack_micro_batch(batch, [0])
    rows = torch.full((length,), -2.1)
    wanted = float(rows[0].double()) * (length - 1)
    assert float(sequence_sums(rows, micro_batch)) == pytest.approx(wanted, rel=1e-13)


def test_values_that_are_not_one_a_row_and_a_micro_batch_without_its_group():
    batch = read_global_batch(
        {"input_ids": torch.nested.nested_tensor([torch.arange(8)], layout=torch.jagged)}
    )
    with pytest.raises(ValueError, match=r"shape \[8, 2\] for 8 rows"):
        sequence_sums(torch.zeros(8, 2), pack_micro_batch(batch, [0]))
    cut = pack_micro_batch(batch, [0], cp_size=2)
    with pytest.raises(ValueError, match="CP group of 2 ranks that it does not have yet"):
        sequence_means(torch.zeros(4), cut)
