"""LightningCLI for a DynamicCPModule: ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import subprocess
import time
import warnings
from collections.abc import Sequence
from typing import Any, override

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_warn

import lightning_dcp
from lightning_dcp.module import DynamicCPModule
from lightning_dcp.tools.mistakes import PATIENCE, shared_with_other_processes, told_once

# Written for the developers of Megatron-Core and of Lightning, whose calls they are about.
_NOTICES = (
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


class DynamicCPCLI(LightningCLI):
    """LightningCLI with a DynamicCPModule (or a subclass) and any DataModule."""

    def predict(self, return_predictions: bool | None = None, **options: Any) -> None:
        """Runs ``predict`` and keeps nothing: a PredictionWriter stores it batch by batch."""
        trainer: Any = self.trainer  # mypy does not see the callbacks that Lightning sets on it.
        if not any(isinstance(one, BasePredictionWriter) for one in trainer.callbacks):
            rank_zero_warn(
                "Nothing stores the predictions: give trainer.callbacks a "
                "lightning_dcp.PredictionWriter."
            )
        # None, the default, means True to Lightning.
        trainer.predict(return_predictions=bool(return_predictions), **options)

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        with shared_with_other_processes():
            try:
                with told_once(subcommand):
                    super()._run_subcommand(subcommand)
            except BaseException:
                self._end_other_processes()
                raise

    def _end_other_processes(self) -> None:
        """Waits for the processes that this one started, then ends those that hang."""
        started: list[subprocess.Popen[bytes]] = getattr(
            self.trainer.strategy.launcher, "procs", []
        )
        processes = started.copy()
        # Lightning's observer shares the list: it would kill this process for a child's status.
        started.clear()
        deadline = time.monotonic() + PATIENCE
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def run_lightning(args: Sequence[str] | None) -> None:
    """Runs one of Lightning's commands.

    Args:
        args: The command line; None for that of the process, which is the one that is run again for
            the other ranks.
    """
    for name in lightning_dcp.__all__:
        getattr(lightning_dcp, name)  # jsonargparse knows the subclasses that are imported.
    for notice in _NOTICES:
        warnings.filterwarnings("ignore", message=notice, category=FutureWarning)
    DynamicCPCLI(**cli_options(), args=None if args is None else list(args))


def cli_options() -> dict[str, Any]:
    """What the command gives LightningCLI."""
    return {
        "model_class": DynamicCPModule,
        "datamodule_class": pl.LightningDataModule,
        "subclass_mode_model": True,
        "subclass_mode_data": True,
        "seed_everything_default": 0,
        # The module makes its optimizer itself, on the strategy's model.
        "auto_configure_optimizers": False,
        # Else a second run into the same folder fails on the first one's config.yaml.
        "save_config_kwargs": {"overwrite": True},
        "parser_kwargs": {"description": "Dynamic context parallelism for PyTorch Lightning."},
    }
