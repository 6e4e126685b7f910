"""What a run in other processes made, brought back to the main process of a notebook."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any, override

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher,
    _WorkerOutput,
)
from lightning.pytorch.trainer.states import TrainerFn


class ResultsLauncher(_MultiProcessingLauncher):
    """Starts the ranks of a machine by ``fork`` or ``spawn``; the main process only waits for them.

    Lightning's brings back rank 0's part of the weights, for a model that the main process does not
    have, and no predictions. This one brings the whole weights and rank 0's predictions, by files:
    the main process reads its queue when the others have ended, and more than fits into a pipe
    would keep them from that.
    """

    @override
    def launch(
        self, function: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        results = super().launch(function, *args, trainer=trainer, **kwargs)
        if isinstance(results, _InFile):
            results = results.take()
        return results

    @override
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        # A rank starts no others. Lightning's predict gives nothing where there is a launcher of
        # this kind.
        self._strategy._launcher = None
        super()._wrapping_function(*args, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        is_fit = trainer.state.fn == TrainerFn.FITTING
        # A collective: all ranks come here.
        weights = self._strategy.lightning_module_state_dict() if is_fit else None
        if self._strategy.local_rank != 0:
            return None
        extra = self.get_extra_results(trainer)
        if is_fit:
            # And how far the fit has come: what is saved afterwards says so.
            loop = trainer.fit_loop.state_dict()
            extra["fit"] = _InFile({"weights": weights, "loop": loop})
        if trainer.state.fn == TrainerFn.PREDICTING:
            results = _InFile(results)
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return _WorkerOutput(best, None, trainer.state, results, extra)

    @override
    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        if "fit" not in extra:
            return
        fit = extra["fit"].take()
        module: Any = trainer.lightning_module
        trainer.fit_loop.load_state_dict(fit["loop"])
        # The old weights go first, and stay gone on a machine that has not got the whole: the next
        # run's rank 0 hands them out.
        module.model = None
        module.load_state_dict(fit["weights"], strict=False)


class _InFile:
    """An object that another process of this machine takes from a file."""

    def __init__(self, value: Any) -> None:
        self._folder = tempfile.mkdtemp(prefix="lightning-dcp-")
        torch.save(value, os.path.join(self._folder, "value.pt"))

    def take(self) -> Any:
        """The object, once; the file is gone then."""
        # Our own: predictions may hold anything.
        value = torch.load(os.path.join(self._folder, "value.pt"), weights_only=False)
        shutil.rmtree(self._folder)
        return value
