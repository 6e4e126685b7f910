"""LightningCLI for a DynamicCPModule: ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, override

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_warn

import lightning_dcp
from lightning_dcp._registration import START_METHODS
from lightning_dcp.module import DynamicCPModule
from lightning_dcp.tools.mistakes import PATIENCE, shared_with_other_processes, told_once
from lightning_dcp.tools.option_errors import short_errors

_STRATEGY = "lightning_dcp.DynamicCPStrategy"
# Written for the developers of Megatron-Core and of Lightning, whose calls they are about.
_NOTICES = (
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


class DynamicCPCLI(LightningCLI):
    """LightningCLI with a DynamicCPModule (or a subclass) and any DataModule."""

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        given = _strategy_by_class(sys.argv[1:] if args is None else args)
        command = next((arg for arg in given if arg in self.subcommands()), None)
        # The options are those of the command's own parser.
        known = parser if command is None else self._subcommand_parsers[command]
        with short_errors(known):
            self.config = parser.parse_args(given)

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self._get(self.config, "trainer")
        name = trainer.strategy
        # jsonargparse takes a class without options for a name, and Lightning knows no such name.
        if name == "DynamicCPStrategy" or (isinstance(name, str) and "." in name):
            trainer.strategy = Namespace(class_path=name if "." in name else _STRATEGY)
        path = self._get(self.config, "ckpt_path") or "last"
        # The others are words or addresses of Lightning's.
        if "." in path and "://" not in path and not os.path.exists(path):
            raise FileNotFoundError(f"--ckpt_path {path}: there is no such file")

    @override
    def instantiate_classes(self) -> None:
        with short_errors(self.parser):
            super().instantiate_classes()

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


def _strategy_by_class(args: Sequence[str]) -> list[str]:
    """The command line with ``dynamic_cp`` as the class that it names, if options follow for it."""
    option, given = "--trainer.strategy", list[str]()
    if not any(arg.startswith(f"{option}.") for arg in args):
        return list(args)
    for before, arg in pairwise(["", *args]):
        name = arg.removeprefix(f"{option}=")
        if name in START_METHODS and (before == option or arg != name):
            given.append(arg.removesuffix(name) + _STRATEGY)
            given.append(f"{option}.max_seqlen_per_dp_cp_rank=auto")
            given.append(f"{option}.start_method={START_METHODS[name]}")
        else:
            given.append(arg)
    return given


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
        "parser_kwargs": {
            "description": "Dynamic context parallelism for PyTorch Lightning.",
            "exit_on_error": False,
            "allow_abbrev": False,
        },
    }
