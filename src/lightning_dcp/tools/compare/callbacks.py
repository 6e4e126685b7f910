"""Callbacks of the runs that ``compare`` starts: step times, and the checkpoint to start from."""

from __future__ import annotations

import json
import time
from typing import Any, override

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dcp.config.files import whole_file
from lightning_dcp.module import DynamicCPModule


class StepTimes(Callback):
    """Writes the time, tokens, loss and CP sizes of every training step to a JSON file.

    A step's time runs from the end of the step before, so that data, logging and other callbacks
    count; on a GPU the device is waited for, which this callback is alone in doing.

    Args:
        path: The file; written when training ends.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._records: list[dict[str, Any]] = []
        self._end = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._records = []
        self._end = _now()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # From the end of the step before: what the data loader takes is then part of a step.
        before, self._end = self._end, _now()
        if not isinstance(pl_module, DynamicCPModule) or pl_module.last_step is None:
            return
        step = pl_module.last_step
        report = step.plan.report
        assert report is not None  # The planner's own: it prices what it plans.
        self._records.append(
            {
                "step": trainer.global_step,
                "seconds": self._end - before,
                "predicted_seconds": report.predicted_seconds,
                "tokens": int(step.num_tokens),
                "sequence_tokens": step.plan.num_tokens,
                "loss": float(step.loss),
                "cp_sizes": step.plan.cp_sizes(),
            }
        )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # All ranks step together: one of them tells the time of all.
        if trainer.is_global_zero:
            with whole_file(self.path) as file:
                file.write_text(json.dumps(self._records))


class SaveAtEnd(Callback):
    """Saves a checkpoint when training ends, whatever else the Trainer saves."""

    def __init__(self, path: str) -> None:
        self.path = path

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _now() -> float:
    # Kernels go on running after the call that starts them.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
