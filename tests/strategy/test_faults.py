"""Runs end together: exceptions, signals and killed or hanging ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_dcp.launchers
import trainers
from distributed import run_distributed
from hygiene import load
from lightning_dcp import DynamicCPStrategy

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "faults.py"


class At(Callback):
    """Does something on one rank, or on all, at the second call of a hook."""

    def __init__(self, hook, action, rank):
        self.calls, self.action, self.rank = 0, action, rank
        setattr(self, hook, self._called)

    def _called(self, trainer, *_, **__):
        self.calls += 1
        if self.calls == 2 and self.rank in (trainer.global_rank, None):
            self.action()


def fail():
    raise ValueError("hurt on purpose")


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def run(hook, action, rank, folder, *, strategy=None, stage="fit", checkpoints=None):
    """How the run ends on this rank, its step then, and the files that it leaves."""
    if checkpoints is None:
        checkpoints = [
            OnExceptionCheckpoint(folder),
            ModelCheckpoint(
                folder, "{step}", save_on_exception=True, every_n_epochs=0, monitor=None
            ),
        ]
    trainer = trainers.trainer(
        strategy=strategy,
        callbacks=[At(hook, action, rank), *checkpoints],
        enable_checkpointing=True,
        val_check_interval=2,
        max_epochs=2,
    )
    data = trainers.batches(5, num_val=3)
    try:
        getattr(trainer, stage)(trainers.module(), data)
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    else:
        ended = "finished"
    return ended, trainer.global_step, sorted(os.listdir(folder))


LAYOUTS = {
    "cp": {},
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.lightning("callback", "OnExceptionCheckpoint", "works")
@pytest.mark.lightning("callback", "ModelCheckpoint(save_on_exception=)", "works")
@pytest.mark.lightning("hook", "on_exception", "works")
def test_what_all_ranks_raise_is_raised_and_saved(layout, tmp_path):
    ends = run_distributed(
        run, 2, "on_train_batch_end", fail, None, str(tmp_path), strategy=LAYOUTS[layout]
    )
    for ended, step, files in ends:
        assert ended == "ValueError: hurt on purpose"
        assert step == 2
        assert files == ["on_exception.ckpt", "step=2.ckpt"]
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] == 2
    run_distributed(resume, 2, str(tmp_path / "on_exception.ckpt"), LAYOUTS[layout])


def resume(path, strategy):
    trainer = trainers.trainer(strategy=strategy, max_steps=4)
    trainer.fit(trainers.module(), trainers.batches(5), ckpt_path=path)
    assert trainer.global_step == 4


@pytest.mark.parametrize(
    ("hook", "stage", "step"),
    [
        ("on_train_batch_end", "fit", 2),
        ("on_before_optimizer_step", "fit", 2),
        ("on_validation_batch_end", "fit", 2),
        ("on_save_checkpoint", "fit", 2),
        ("on_validation_batch_start", "validate", 0),
        ("on_predict_batch_end", "predict", 0),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.lightning("callback", "OnExceptionCheckpoint", "works")
def test_sigterm_to_one_rank_stops_all_at_the_same_batch(hook, stage, step, rank, tmp_path):
    saving = [
        ModelCheckpoint(tmp_path / "steps", every_n_train_steps=1, save_top_k=-1),
        OnExceptionCheckpoint(str(tmp_path)),
    ]
    ends = run_distributed(
        run, 2, hook, terminate, rank, str(tmp_path), stage=stage, checkpoints=saving
    )
    code = 128 + signal.SIGTERM
    assert {(ended, at) for ended, at, _ in ends} == {(f"SIGTERMException: {code}", step)}
    assert (tmp_path / "on_exception.ckpt").exists()


def test_slurm_requeues_at_a_batch_with_a_checkpoint_of_all_ranks(tmp_path):
    calls = run_distributed(requeue, 2, str(tmp_path))
    assert calls == [1, 1]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == 2


def requeue(folder):
    class Slurm(SLURMEnvironment):
        """Asks the workers' variables, and has no ``scontrol``."""

        def world_size(self):
            return int(os.environ["WORLD_SIZE"])

        def global_rank(self):
            return int(os.environ["RANK"])

        local_rank = global_rank

        def node_rank(self):
            return 0

    called = []

    def scontrol(command, **_):
        called.append(command)
        return 0

    connector = "lightning.pytorch.trainer.connectors.signal_connector"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{connector}.call", scontrol)
        patch.setenv("SLURM_JOB_ID", "1")
        trainer = trainers.trainer(
            callbacks=[At("on_train_batch_end", send_usr1, 1)],
            plugins=[Slurm()],
            default_root_dir=folder,
        )
        trainer.fit(trainers.module(), trainers.batches(3))
    assert trainer.global_step == 3
    return 1


def send_usr1():
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_fit_after_one_that_failed_on_all_ranks(tmp_path):
    weights = run_distributed(fit_twice, 2, str(tmp_path))
    for after_failure, fresh in weights:
        torch.testing.assert_close(after_failure, fresh, rtol=0, atol=0)


def fit_twice(folder):
    found = []
    for first in (True, False):
        if first:
            assert run("on_train_batch_end", fail, None, folder)[0].startswith("ValueError")
        module = trainers.module()
        trainers.trainer().fit(module, trainers.batches(2))
        found.append(torch.cat([p.detach().flatten() for p in module.model.parameters()]))
    return found


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("faults_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("launcher", "kind", "moment", "rank", "says"),
    [
        ("popen", "raise", "validation_step", 1, "ValueError: hurt on purpose"),
        ("popen", "SIGKILL", "on_train_batch_end", 1, "rank 1 "),
        ("popen", "SIGKILL", "on_train_batch_end", 0, "rank 0 ended without a word"),
        (
            "popen",
            "SIGTERM",
            "configure_model",
            1,
            "rank 1 received SIGTERM before the first batch",
        ),
        ("torchrun", "raise", "data", 1, "ValueError: hurt on purpose"),
        ("fork", "hang", "on_train_batch_end", 1, "rank 1 did not come to a collective"),
    ],
)
@pytest.mark.lightning("callback", "OnExceptionCheckpoint", "works")
@pytest.mark.lightning("callback", "ModelCheckpoint(save_on_exception=)", "works")
def test_processes_are_gone_and_the_cause_is_named_once(
    benchmark, launcher, kind, moment, rank, says
):
    end = benchmark.run(
        benchmark.Harm(launcher, "cp", kind, moment, rank), limit=120 * max(10, load())
    )
    assert end.code not in (0, None)
    assert end.left == 0
    assert end.seconds < benchmark.TIMEOUT + 60 * max(10, load())
    assert sum(says in line for line in end.output.splitlines()) == 1, end.output
    assert not end.saved


def what_a_run_leaves():
    trainer = trainers.trainer()
    trainer.fit(trainers.module(), trainers.batches(1))
    watch = trainer.strategy.guard.watch
    stores = watch._store, watch._store_of_thread
    return stores, [thread.name for thread in threading.enumerate()]


def test_a_run_that_is_over_leaves_no_thread_and_no_store():
    # A file store that is let go while its folder is removed stops the process for five minutes.
    for stores, threads in run_distributed(what_a_run_leaves, 2):
        assert stores == (None, None)
        assert "fault-watch" not in threads


def test_an_interactive_session_is_told_of_our_own_strategy(monkeypatch):
    monkeypatch.setattr(lightning_dcp.launchers, "_IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match=r"'fork'.*dynamic_cp_notebook"):
        trainers.Trainer(
            accelerator="cpu", devices=2, strategy=DynamicCPStrategy(max_seqlen_per_dp_cp_rank=8)
        )


@pytest.mark.lightning("Trainer argument", "Trainer(num_nodes=)", "works")
def test_an_address_where_nobody_is_names_it(monkeypatch):
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
        "NODE_RANK": "1",
        "LOCAL_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    trainer = trainers.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=DynamicCPStrategy(max_seqlen_per_dp_cp_rank=96, timeout=timedelta(seconds=2)),
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(RuntimeError, match=r"Rank 1 of 2 .*MASTER_ADDR=127.0.0.1, MASTER_PORT=9"):
        trainer.fit(trainers.module(), trainers.batches(1))


def devices_of_another_world():
    try:
        trainers.trainer(devices=3).fit(trainers.module(), trainers.batches(1))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.lightning("Trainer argument", "Trainer(devices=)", "works")
def test_devices_that_are_not_the_world_of_torchrun():
    for message in run_distributed(devices_of_another_world, 2):
        assert "`devices=3`" in message
        assert "world size (2)" in message
