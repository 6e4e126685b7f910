"""``fit`` for ``compare``: the training steps alone; run with ``python -m``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, override

from jsonargparse import set_parsing_settings
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ProgressBar,
)
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor

from lightning_dcp.tools.lightning_cli import DynamicCPCLI, cli_options
from lightning_dcp.tools.mistakes import told_once

# They would save, stop or report during the steps that are timed, or ask for a logger.
_LEFT_OUT = (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ProgressBar,
    ThroughputMonitor,
)


class MeasuredCLI(DynamicCPCLI):
    """LightningCLI that trains without logger, checkpoints, progress bar and early stopping."""

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given: Callback | Sequence[Callback] = (
            self._get(self.config_init, "trainer.callbacks") or []
        )
        callbacks = [given] if isinstance(given, Callback) else list(given)
        silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        kept = [one for one in callbacks if not isinstance(one, _LEFT_OUT)]
        return super().instantiate_trainer(**(kwargs | silent | {"callbacks": kept}))


def main() -> None:
    """Runs it with the command line of the process."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    with told_once("fit"):
        MeasuredCLI(**cli_options())


if __name__ == "__main__":
    main()
