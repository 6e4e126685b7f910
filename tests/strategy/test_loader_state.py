"""A loader with a state goes on, in the middle of an epoch, where a checkpoint left it."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback

import trainers
from distributed import run_distributed
from lightning_dcp import LRSchedule


class Stateful:
    """Batches of its own, a few tokens each, from where its state says."""

    def __init__(self, num: int) -> None:
        self.given = 0
        self.num = num

    def __iter__(self):
        while self.given < self.num:
            self.given += 1
            yield trainers.jagged(trainers.random_batch([9, 4, self.given + 1], self.given))
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Sized(Stateful):
    """With a length, so that Lightning asks for each batch when its step is due."""

    def __len__(self) -> int:
        return self.num


class Early(Sized):
    """Like a DataLoader with workers, which is asked a step early."""

    num_workers = 1


class Record(Callback):
    """The batches' lengths and losses, and a checkpoint in the middle of the epoch."""

    def __init__(self, save_to: str | None = None) -> None:
        self.save_to = save_to
        self.seen: list[tuple[tuple[int, ...], float, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((tuple(module.last_step.plan.lengths), module.last_step.loss.item(), rate))
        if self.save_to and trainer.global_step == 3:
            trainer.save_checkpoint(self.save_to)


def interrupted_and_not(folder: str):
    found = {}
    for loader in (Stateful, Sized, Early):
        for kind in ("constant", "cosine"):
            path = f"{folder}/{loader.__name__}-{kind}.ckpt"
            whole, rest = Record(path), Record()
            for record, ckpt_path in ((whole, None), (rest, path)):
                trainers.trainer(max_epochs=-1, max_steps=8, callbacks=[record]).fit(
                    trainers.module(lr_schedule=LRSchedule(kind=kind)),
                    loader(6),
                    ckpt_path=ckpt_path,
                    weights_only=False,
                )
            found[loader.__name__, kind] = whole.seen, rest.seen
    return found


def test_a_run_that_goes_on_gets_the_batches_that_are_left(tmp_path: Path):
    for found in run_distributed(interrupted_and_not, 2, str(tmp_path)):
        assert len(found) == 6
        for case, (whole, rest) in found.items():
            # Six batches of an epoch, and two of the next.
            assert [lengths[-1] for lengths, *_ in whole] == [2, 3, 4, 5, 6, 7, 2, 3], case
            assert rest == whole[3:], case
