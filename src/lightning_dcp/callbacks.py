"""What a run tells while it trains."""

from __future__ import annotations

from collections import deque
from typing import Any, override

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.module import DynamicCPModule


class StepReport(Callback):
    """Prints a line a step: loss, tokens, micro-batches and the CP sizes in use.

    At the end it prints the mean loss of the first and of the last steps.

    Args:
        every_n_steps: Print every this many steps.
        num_compared: How many first and last steps are compared at the end.
    """

    def __init__(self, every_n_steps: int = 1, num_compared: int = 5) -> None:
        self.every_n_steps = check_at_least("every_n_steps", every_n_steps)
        check_at_least("num_compared", num_compared)
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=num_compared)
        self._num_steps = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A Trainer may fit more than once.
        self._first, self._num_steps = [], 0
        self._last.clear()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not isinstance(pl_module, DynamicCPModule) or pl_module.last_step is None:
            return
        step = pl_module.last_step
        loss = float(step.loss)
        self._num_steps += 1
        self._last.append(loss)
        if len(self._first) < (self._last.maxlen or 0):
            self._first.append(loss)
        if trainer.global_step % self.every_n_steps == 0:
            sizes = ", ".join(f"{size} (x{num})" for size, num in step.plan.cp_sizes().items())
            _print(
                trainer,
                f"step {trainer.global_step} | loss {loss:.4f} | {int(step.num_tokens):,} "
                f"{pl_module.objective.counts} | "
                f"{len(step.plan.steps)} micro-batches | CP sizes {sizes}",
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Windows that overlap would compare steps with themselves.
        if self._num_steps < 2 * len(self._first) or not self._first:
            return
        first, last = (sum(losses) / len(losses) for losses in (self._first, self._last))
        # The progress bar is closed by now and would print nothing.
        rank_zero_only(print)(
            f"mean loss of the first {len(self._first)} steps {first:.4f}, of the last "
            f"{len(self._last)} steps {last:.4f}",
            flush=True,
        )


@rank_zero_only
def _print(trainer: Trainer, line: str) -> None:
    bar = trainer.progress_bar_callback
    if bar is None:
        print(line, flush=True)
    else:
        # A plain print would cut through the bar.
        bar.print(line)
