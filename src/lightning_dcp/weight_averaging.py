"""Lightning's weight averaging, SWA and EMA, of weights that many ranks share."""

from __future__ import annotations

from typing import Any, override

from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dcp.engine import AveragedWeights
from lightning_dcp.strategy import DynamicCPStrategy


class WeightAveraging(callbacks.WeightAveraging):
    """Lightning's ``WeightAveraging``, with its arguments and hooks, for ``DynamicCPStrategy``.

    Averages are float32 and sharded as the optimizer's states are: four bytes a weight, divided
    among the DPxCP pool. Validation runs with them, and the model has them when training ends.
    A checkpoint has the averages, whole, as its ``state_dict``, and the weights as
    ``current_model_state``; training resumes exactly, in any layout of ranks. Before the first
    update there is no average: validation and the end of training then use the weights themselves.
    """

    _average_model: AveragedWeights | None  # type: ignore[assignment]  # Lightning has a copy

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Not Lightning's, which copies the module: see `on_fit_start`.
        if not isinstance(trainer.strategy, DynamicCPStrategy):
            raise TypeError(
                f"{type(self).__name__} of lightning_dcp needs Trainer(strategy="
                f"DynamicCPStrategy(...)), found {type(trainer.strategy).__name__}; Lightning's "
                "own works there."
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, DynamicCPStrategy)
        self._average_model = AveragedWeights(
            strategy.optimizer_of_fit,
            pl_module,
            strategy.context,
            device=self._device,
            use_buffers=self._use_buffers,
            **self._kwargs,
        )

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The optimizer, whose weights it averages, ends with the fit.
        self._average_model = None

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        averages = self._average_model
        if averages is None or not averages.num_averaged:
            return
        strategy = trainer.strategy
        in_use = averages.in_use
        states = {in_use: checkpoint["state_dict"]}
        if in_use:
            # What was gathered of the optimizer are the averages, too.
            averages.swap()
            checkpoint["optimizer_states"] = [strategy.optimizer_state(trainer.optimizers[0])]
            states[False] = strategy.lightning_module_state_dict()
            exact = averages.whole()
            averages.swap()
        else:
            exact = averages.whole()
            averages.swap()
            states[True] = strategy.lightning_module_state_dict()
            averages.swap()
        checkpoint["state_dict"], checkpoint["current_model_state"] = states[True], states[False]
        # bfloat16 weights are the averages rounded.
        checkpoint["averaging_state"] = {"n_averaged": averages.num_averaged, "averages": exact}

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        averages = self._average_model
        state = checkpoint.get("averaging_state")
        if averages is None:
            return
        if state is None:
            rank_zero_warn(
                f"The checkpoint has no averages: {type(self).__name__} starts with its weights."
            )
            return
        # One of Lightning's own callback has no others.
        averages.load(state.get("averages", checkpoint["state_dict"]), int(state["n_averaged"]))
        trainer.strategy.load_model_state_dict({"state_dict": checkpoint["current_model_state"]})

    @override
    def _swap_models(self, pl_module: LightningModule) -> None:
        if self._average_model is not None and self._average_model.num_averaged:
            self._average_model.swap()

    @override
    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        self._swap_models(pl_module)


class EMAWeightAveraging(WeightAveraging, callbacks.EMAWeightAveraging):
    """Lightning's ``EMAWeightAveraging``, with its arguments: as :class:`WeightAveraging`."""
