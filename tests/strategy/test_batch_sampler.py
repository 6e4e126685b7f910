"""A DataLoader with a batch sampler of one's own gives the batches that this one chose."""

from __future__ import annotations

from lightning.pytorch import Callback
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import trainers
from distributed import run_distributed

SAMPLES = [[1] * (1 + number) for number in range(6)]


class Chosen:
    """Indices of each batch, as no class of torch chooses them."""

    def __iter__(self):
        yield [5, 0]
        yield [1, 2, 3]

    def __len__(self) -> int:
        return 2


class Lengths(Callback):
    """The lengths of every batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(tuple(module.last_step.plan.lengths))

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, *index):
        self.seen.append((len(batch["input_ids"]),))


def lengths_of_batches():
    found = []
    for sampler in (BatchSampler(SequentialSampler(SAMPLES), 4, drop_last=False), Chosen()):
        record = Lengths()
        loader = DataLoader(SAMPLES, batch_sampler=sampler, collate_fn=trainers.jagged)
        trainer = trainers.trainer(callbacks=[record], use_distributed_sampler=True)
        trainer.fit(trainers.module(), loader, loader)
        found.append(record.seen)
    return found


def test_a_batch_sampler_is_left_alone():
    for of_torch, chosen in run_distributed(lengths_of_batches, 2):
        assert of_torch == [(1, 2, 3, 4), (5, 6), (4,), (2,)]
        assert chosen == [(6, 1), (2, 3, 4), (2,), (3,)]
