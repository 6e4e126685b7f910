"""The ``lightning-dcp`` command: our own commands by name, everything else is LightningCLI's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from jsonargparse import set_parsing_settings
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.commands import COMMANDS
from lightning_dcp.module import DynamicCPModule

_OF_LIGHTNING = {
    "fit": "train a model",
    "validate": "evaluate a model on validation data",
    "test": "evaluate a model on test data",
    "predict": "log-probabilities and entropies of a data set, in its order",
}


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
        trainer.predict(return_predictions=bool(return_predictions), **options)


def main(args: Sequence[str] | None = None) -> None:
    """Runs ``lightning-dcp``.

    Args:
        args: The command line, without the command's name; that of the process by default.
    """
    given = list(sys.argv[1:] if args is None else args)
    # The strings under the fields of our config dataclasses are their help texts.
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    if given and given[0] in COMMANDS:
        COMMANDS[given[0]].run(given[1:])
    elif given in (["-h"], ["--help"]):
        print(_help())
    else:
        DynamicCPCLI(**cli_options(), args=given)


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
        "save_config_kwargs": {"overwrite": True},
        "parser_kwargs": {"description": "Dynamic context parallelism for PyTorch Lightning."},
    }


def _help() -> str:
    summaries = _OF_LIGHTNING | {name: command.summary for name, command in COMMANDS.items()}
    width = max(map(len, summaries))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in summaries.items()]
    return (
        "usage: lightning-dcp COMMAND [options]\n\n"
        "Dynamic context parallelism for PyTorch Lightning.\n\ncommands:\n"
        + "\n".join(lines)
        + "\n\nlightning-dcp COMMAND --help lists a command's options; each can be in a YAML file "
        "that --config names."
    )


if __name__ == "__main__":
    main()
