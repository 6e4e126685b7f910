"""Hooks and Trainer arguments do what they do in a plain process of Lightning.

A run leaves a list of the hooks that were called, of callback, module and DataModule, in their
order. That of the strategy on two processes has to be that of a small plain module on one device.
"""

from __future__ import annotations

import difflib
import inspect
import os
import tempfile
import traceback
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.plugins.io import TorchCheckpointIO
from user_steps import build

import trainers
from distributed import run_distributed
from lightning_dcp import DynamicCPModule, DynamicCPStrategy


def hooks_of(*classes: type) -> list[str]:
    return [
        name
        for cls in classes
        for name, function in vars(cls).items()
        # `configure_sharded_model` is gone: Lightning refuses modules that have it.
        if inspect.isfunction(function)
        and not name.startswith("_")
        and name != "configure_sharded_model"
    ]


CALLBACK_HOOKS = hooks_of(Callback)
MODULE_HOOKS = [
    *hooks_of(ModelHooks, CheckpointHooks),
    *("training_step", "validation_step", "test_step", "predict_step"),
    *("configure_optimizers", "configure_callbacks", "lr_scheduler_step"),
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad"),
]
DATA_HOOKS = hooks_of(DataHooks)


def recording(base: type, owner: str, names: list[str]) -> type:
    """A subclass of ``base`` that notes each call of these methods in its list ``events``."""

    def noting(name: str) -> Any:
        method = getattr(base, name)

        # Not `functools.wraps`: Lightning looks through it, and finds nothing overridden.
        def note(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.events.append(f"{owner}.{name}")
            return method(self, *args, **kwargs)

        note.__signature__ = inspect.signature(method)
        return note

    return type(f"Recording{base.__name__}", (base,), {name: noting(name) for name in names})


class WithState(Callback):
    """Lightning loads the states of callbacks that have one."""

    def state_dict(self):
        return {"kept": 1}


class Plain(LightningModule):
    """Trains one number on nothing, by Lightning itself."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer.weight.sum()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer.weight.sum(), batch_size=1)

    def test_step(self, batch, batch_idx):
        pass

    def predict_step(self, batch, batch_idx):
        return 1

    def configure_model(self):
        """Lightning calls it of modules that have one."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def run(ours: bool, do: str, options: dict[str, Any], folder: str) -> tuple[list[str], int, int]:
    """The calls in a run with these Trainer options, its steps and its epochs."""
    events: list[str] = []
    module_class = recording(DynamicCPModule if ours else Plain, "module", MODULE_HOOKS)
    module = build(module_class) if ours else module_class()
    callback = recording(WithState, "callback", CALLBACK_HOOKS)()
    made = trainers.batches(4, 3)
    data = recording(trainers.Batches, "data", DATA_HOOKS)(made.train, made.val)
    for each in (module, callback, data):
        each.events = events
    options = {name: value() if callable(value) else value for name, value in options.items()}
    path = folder
    settings = {
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": path,
        "max_epochs": 2,
        **options,
    }
    if settings.pop("barebones", False):
        # It takes none of the others.
        settings = {"barebones": True, "max_epochs": 2}
    settings["callbacks"] = [callback, *settings.get("callbacks", [])]
    if ours:
        strategy = DynamicCPStrategy(max_seqlen_per_dp_cp_rank=96)
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, **settings)
    else:
        trainer = Trainer(accelerator="cpu", devices=1, **settings)
    try:
        if do == "resume":
            trainer.fit(module, data)
            trainer.save_checkpoint(f"{path}/end.ckpt")
            trainer.fit_loop.max_epochs = 3
            trainer.fit(module, data, ckpt_path=f"{path}/end.ckpt")
        else:
            getattr(trainer, do)(module, data)
    except KeyError:
        events.append("failed")
    return events, trainer.global_step, trainer.current_epoch


ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "logger": [{"logger": True}],
    "callbacks": [{"callbacks": lambda: [Timer(), LearningRateMonitor()], "logger": True}],
    "fast_dev_run": [{"fast_dev_run": True}, {"fast_dev_run": 2}],
    "max_epochs": [{"max_epochs": 1}],
    "min_epochs": [{"min_epochs": 2, "callbacks": lambda: [Stops()]}],
    "max_steps": [{"max_steps": 3}],
    "min_steps": [{"min_steps": 3, "callbacks": lambda: [Stops()]}],
    "max_time": [{"max_time": {"seconds": 0}}, {"max_time": {"hours": 1}}],
    "limit_train_batches": [{"limit_train_batches": 2}, {"limit_train_batches": 0.5}],
    "limit_val_batches": [{"limit_val_batches": 1}, {"limit_val_batches": 0}],
    "overfit_batches": [{"overfit_batches": 2}],
    "val_check_interval": [{"val_check_interval": 2}, {"val_check_interval": 0.5}],
    "check_val_every_n_epoch": [{"check_val_every_n_epoch": 2}],
    "num_sanity_val_steps": [{"num_sanity_val_steps": 2}, {"num_sanity_val_steps": -1}],
    "log_every_n_steps": [{"log_every_n_steps": 1, "logger": True}],
    "enable_checkpointing": [{"enable_checkpointing": True}],
    "enable_progress_bar": [{"enable_progress_bar": True}],
    "enable_model_summary": [{"enable_model_summary": True}],
    "gradient_clip_val": [{"gradient_clip_val": 0.1}],
    "gradient_clip_algorithm": [{"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}],
    "deterministic": [{"deterministic": True}, {"deterministic": "warn"}],
    "benchmark": [{"benchmark": True}],
    "inference_mode": [{"inference_mode": True}, {"inference_mode": False}],
    "use_distributed_sampler": [{"use_distributed_sampler": False}],
    "profiler": [{"profiler": "simple"}, {"profiler": "advanced"}],
    "detect_anomaly": [{"detect_anomaly": True}],
    "barebones": [{"barebones": True}],
    "plugins": [{"plugins": lambda: [TorchCheckpointIO()]}],
    "reload_dataloaders_every_n_epochs": [{"reload_dataloaders_every_n_epochs": 1}],
    "default_root_dir": [{}],
    "enable_autolog_hparams": [{"enable_autolog_hparams": False}],
    "model_registry": [{"model_registry": "organisation/models"}],
    "limit_test_batches": [{"limit_test_batches": 2}],
    "limit_predict_batches": [{"limit_predict_batches": 2}],
}
DOES = {"limit_test_batches": "test", "limit_predict_batches": "predict"}


class OwnBar(ProgressBar):
    """The base class leaves these two to its subclasses."""

    def disable(self):
        pass

    enable = disable


CALLBACKS: dict[str, Any] = {
    "Timer": lambda: Timer(duration={"hours": 1}),
    "EarlyStopping": lambda: EarlyStopping("train_loss", check_on_train_epoch_end=True),
    "LambdaCallback": lambda: LambdaCallback(on_train_start=lambda *_: None),
    "LearningRateMonitor": LearningRateMonitor,
    "ModelCheckpoint": lambda: ModelCheckpoint(monitor="val_loss", save_last=True),
    "Checkpoint": Checkpoint,
    "ModelSummary": lambda: ModelSummary(max_depth=2),
    "RichModelSummary": RichModelSummary,
    "RichProgressBar": RichProgressBar,
    "TQDMProgressBar": TQDMProgressBar,
    "ProgressBar": OwnBar,
    "DeviceStatsMonitor": lambda: DeviceStatsMonitor(cpu_stats=False),
    "OnExceptionCheckpoint": lambda: OnExceptionCheckpoint(tempfile.gettempdir(), "unused"),
    "BasePredictionWriter": lambda: BasePredictionWriter("epoch"),
}


def with_callback(name: str) -> dict[str, Any]:
    shown = {"enable_progress_bar": "ProgressBar" in name}
    kept = {"enable_checkpointing": "Checkpoint" in name}
    summed = {"enable_model_summary": "ModelSummary" in name}
    return {"callbacks": lambda: [CALLBACKS[name]()], "logger": True, **shown, **kept, **summed}


class Stops(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = True


class Fails(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1:
            raise KeyError("as it should")


RUNS = [("fit", {"num_sanity_val_steps": 1}), *((do, {}) for do in ("validate", "test", "predict"))]
RUNS += [("resume", {}), ("fit", {"callbacks": lambda: [Fails()]})]
CASES = {
    "hooks": RUNS,
    **{
        name: [(DOES.get(name, "fit"), options) for options in variants]
        for name, variants in ARGUMENTS.items()
    },
    **{name: [("fit", with_callback(name))] for name in CALLBACKS},
}


def calls(ours: bool, folder: str) -> dict[str, list[Any]]:
    """By case what was called in each of its runs, or the traceback of what it raised."""
    found: dict[str, list[Any]] = {}
    for name, runs in CASES.items():
        for index, (do, options) in enumerate(runs):
            # In the output of a worker that hangs.
            print(f"case {name} {index}", flush=True)
            try:
                one = run(ours, do, options, f"{folder}/{name}{index}")
            except Exception:
                one = traceback.format_exc()[-1500:]
            # What Trainers leave switched on.
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
            torch.use_deterministic_algorithms(False)
            torch.autograd.set_detect_anomaly(False)
            torch.backends.cudnn.benchmark = False
            found.setdefault(name, []).append(one)
    return found


# A checkpoint is loaded later than in plain Lightning, into shards that there must be; data is
# prepared by the first process of a machine alone.
ELSEWHERE = (".on_load_checkpoint", ".load_state_dict", ".prepare_data")


def in_order(one: Any) -> Any:
    """Without what is called at another time or place; a traceback as it is."""
    if isinstance(one, str):
        return one
    events, *counts = one
    return ([event for event in events if not event.endswith(ELSEWHERE)], *counts)


@pytest.fixture(scope="module")
def differences() -> tuple[dict[str, list[str]], set[str]]:
    """By case what differs from plain Lightning; and which hooks were called."""
    with tempfile.TemporaryDirectory() as folder:
        (plain,) = run_distributed(calls, 1, False, f"{folder}/plain", timeout=120.0)
        of_ranks = run_distributed(calls, 2, True, f"{folder}/ours", timeout=120.0)
    found: dict[str, list[str]] = {}
    for ours in of_ranks:
        for name, runs in plain.items():
            for wanted, got in zip(runs, ours[name], strict=True):
                wanted, got = in_order(wanted), in_order(got)
                if wanted == got and not isinstance(got, str):
                    continue
                texts = [
                    [one] if isinstance(one, str) else [str(one[1:]), *one[0]]
                    for one in (wanted, got)
                ]
                lines = difflib.unified_diff(*texts, "plain", "ours", n=3)
                found.setdefault(name, []).append("\n".join(list(lines)[:40]) or texts[0][0])
    return found, {event for events, *_ in of_ranks[0]["hooks"] for event in events}


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(
                name,
                marks=pytest.mark.lightning("Trainer argument", f"Trainer({name}=)", "works"),
            )
            for name in ARGUMENTS
        ),
        *(
            pytest.param(name, marks=pytest.mark.lightning("callback", name, "works"))
            for name in CALLBACKS
        ),
    ],
)
def test_a_run_makes_the_calls_of_plain_lightning(name, differences):
    found, _ = differences
    assert name not in found, "\n".join(found[name])


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(hook, marks=pytest.mark.lightning("hook", hook, "works"))
        for hook in sorted({*CALLBACK_HOOKS, *MODULE_HOOKS, *DATA_HOOKS})
    ],
)
def test_a_hook_is_called_as_by_plain_lightning(hook, differences):
    found, called = differences
    assert "hooks" not in found, "\n".join(found["hooks"])
    assert any(event.endswith(f".{hook}") for event in called)
