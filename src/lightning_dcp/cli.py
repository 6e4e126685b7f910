"""The ``lightning-dcp`` command."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningCLI

from lightning_dcp.module import DynamicCPModule


class DynamicCPCLI(LightningCLI):
    """LightningCLI with a DynamicCPModule (or a subclass) and any DataModule."""


def main(args: list[str] | None = None) -> None:
    """Runs ``lightning-dcp``.

    Args:
        args: The command line, without the command's name; that of the process by default.
    """
    # The strings under the fields of our config dataclasses are their help texts.
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    DynamicCPCLI(**cli_options(), args=args)


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


if __name__ == "__main__":
    main()
