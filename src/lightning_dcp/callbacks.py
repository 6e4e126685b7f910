"""What a run tells while it trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, override

import torch
from lightning.fabric.utilities.throughput import Throughput, get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
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


def num_samples(batch: Mapping[str, Any]) -> int:
    """Sequences of a jagged global batch."""
    return int(batch["input_ids"].size(0))


def num_tokens(batch: Mapping[str, Any]) -> int:
    """Tokens of a jagged global batch."""
    return int(batch["input_ids"].values().numel())


class ThroughputMonitor(callbacks.ThroughputMonitor):
    """Lightning's ``ThroughputMonitor`` for global batches, which every rank has whole.

    Samples, tokens and batches a second count each global batch once; those of a device are that
    over the number of devices. FLOPs are the module's ``flops_per_batch``, and the utilisation
    (``mfu``) is of the peak of the type that it computes in.

    Args:
        batch_size_fn: Samples of a batch.
        length_fn: Tokens of a batch.
        kwargs: As Lightning's, ``window_size`` say.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] = num_samples,
        length_fn: Callable[[Any], int] | None = num_tokens,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size_fn, length_fn, **kwargs)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        dtype = getattr(trainer.precision_plugin, "dtype", torch.float32)
        self.available_flops = get_available_flops(trainer.strategy.root_device, dtype)
        for running_stage in self._throughputs:
            self._throughputs[running_stage] = _OfWholeBatches(
                available_flops=self.available_flops,
                world_size=trainer.world_size,
                **self.kwargs,
            )


class _OfWholeBatches(Throughput):
    """Counts what all ranks do together, where Lightning's counts what one of them does."""

    @override
    def compute(self) -> dict[str, int | float]:
        metrics = super().compute()
        for name in ("batches_per_sec", "samples_per_sec", "items_per_sec"):
            of_device = f"device{self.separator}{name}"
            if of_device in metrics:
                whole = metrics[of_device]
                metrics[of_device] = whole / self.world_size
                if self.world_size > 1:
                    metrics[name] = whole
        return metrics


@rank_zero_only
def _print(trainer: Trainer, line: str) -> None:
    bar = trainer.progress_bar_callback
    if bar is None:
        print(line, flush=True)
    else:
        # A plain print would cut through the bar.
        bar.print(line)
