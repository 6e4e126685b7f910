"""LightningCLI for a DynamicCPModule: ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.module import DynamicCPModule


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
