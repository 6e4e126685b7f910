"""How the processes of a run start, and how they end: all of them, with the cause named once."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, override

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import (
    MisconfigurationException,
    SIGTERMException,
    _TunerExitException,
)
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_dcp.engine import OtherRankError, Signals
from lightning_dcp.parallel import PATIENCE, FaultWatch, end_processes, say
from lightning_dcp.results import ResultsLauncher

# In the environment of the processes that rank 0 starts: its process id.
_PARENT = "LIGHTNING_DCP_PARENT"
# Exit code of a run that SIGTERM ended, as a shell would give it: the run did not finish.
_TERMINATED = 128 + signal.SIGTERM


class OtherRankFailed(SystemExit):
    """Ends this process without a traceback: another rank failed, and has said why."""


class RunGuard:
    """Runs what the Trainer does in a process, and ends it together with the others.

    Args:
        watch: Sees what becomes of the other ranks.
        signals: What this process was sent.
        started_elsewhere: Whether another process started all ranks, and tells how they ended.
    """

    def __init__(self, watch: FaultWatch, signals: Signals, *, started_elsewhere: bool) -> None:
        self.watch = watch
        self.signals = signals
        self.started_elsewhere = started_elsewhere

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        trainer: Trainer,
    ) -> Any:
        """Calls a function of the Trainer in this process, one of a run's."""
        self.watch.begin()
        vars(trainer).pop("save_checkpoint", None)  # That of a run which failed.
        connector = _Signals(trainer, self.watch)
        # One that came in the last batch of a fit stops what the script does next.
        connector.signals.pending = self.signals.pending
        self.signals = connector.signals
        trainer._signal_connector = connector
        # Lightning asks rank 0 alone whether it was sent SIGTERM, with a collective a step.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]
        try:
            with _sigterm_handled_by(_terminate):
                return function(*args, **options)
        except _TunerExitException:
            raise  # Lightning's way to stop early, on all ranks.
        except BaseException as error:
            fault = self.watch.failed(error)
            if connector.is_running:
                _save_only_together(trainer, self.watch, silent=fault is not None)
            else:
                # Neither weights nor optimizer: a checkpoint would be an error that hides this one.
                for callback in trainer.checkpoint_callbacks:
                    _skip_on_exception(callback)
            if fault is None:
                # On one machine the rank at fault prints it, where everybody sees it.
                follows = isinstance(error, OtherRankError) and trainer.num_nodes == 1
                if follows or trainer.local_rank:
                    _print_unless(error, lambda: follows or self.watch.is_told_by_first())
                raise
            if fault.lost and fault.rank == trainer.global_rank:
                say(f"the run ends: {fault.text}")
            self.watch.say_elsewhere(fault)
            if self.started_elsewhere:
                # It is to see first the end of the rank that is at fault.
                self.watch.hurry.wait(PATIENCE)
            raise OtherRankFailed(1) from None


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for the other ranks of this machine, or finds them started."""

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **options: Any,
    ) -> Any:
        assert trainer is not None
        strategy: Any = trainer.strategy
        # The first that a Trainer does with a module, in each process that a user started.
        strategy.check_before_start(trainer, args)
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        parent = os.environ.pop(_PARENT, "")
        if not environment.creates_processes_externally:
            os.environ[_PARENT] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[_PARENT]
            atexit.register(self._end_children)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        guard: RunGuard | None = strategy.guard
        if guard is None or not guard.watch.watches_family:
            # In place of Lightning's observer, which kills this process too, without a word.
            is_child = parent == str(os.getppid())
            watch = FaultWatch(self.procs, parent=os.getppid() if is_child else None)
            signals = guard.signals if guard else Signals()
            strategy.guard = RunGuard(watch, signals, started_elsewhere=not watch.watches_family)
        return strategy.guard.run(function, args, options, trainer)

    def _end_children(self) -> None:
        # Python keeps the exception that it printed at the end of a script.
        failed = hasattr(sys, "last_exc") or any(process.poll() for process in self.procs)
        end_processes(self.procs, PATIENCE if failed else None)


class ForkLauncher(ResultsLauncher):
    """Forks or spawns all ranks, and waits for them."""

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **options: Any,
    ) -> Any:
        assert trainer is not None
        strategy: Any = trainer.strategy
        strategy.check_before_start(trainer, args)
        try:
            with _sigterm_handled_by(lambda signum, frame: self.kill(signum)):
                return super().launch(function, *args, trainer=trainer, **options)
        except BaseException as error:
            for callback in trainer.checkpoint_callbacks:
                _skip_on_exception(callback)  # Was called where the model is, in the processes.
            if isinstance(error, ProcessExitedException) and error.exit_code == _TERMINATED:
                raise SIGTERMException(_TERMINATED) from None
            raise
        finally:
            # An interrupted notebook would keep them.
            self.kill(signal.SIGKILL)

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *more: Any,
    ) -> None:
        assert trainer is not None
        guarded = partial(self._run_in_child, trainer, function)
        super()._wrapping_function(process_idx, trainer, guarded, args, kwargs, *more)

    def _run_in_child(
        self, trainer: Trainer, function: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        strategy: Any = trainer.strategy
        # torch tells of the process that it sees end first, and ends the others then: that is to be
        # the one at fault, which has a traceback, also where a busy machine keeps it.
        watch = FaultWatch(parent=os.getppid(), patience=5 * PATIENCE)
        strategy.guard = RunGuard(watch, Signals(), started_elsewhere=True)
        try:
            return strategy.guard.run(function, args, options, trainer)
        except BaseException as error:
            # What Lightning does for scripts, where this is the Trainer's process.
            _interrupt(trainer, error)
            trainer._teardown()
            if isinstance(error, KeyboardInterrupt):
                # torch would end this process with 0.
                raise SystemExit(128 + signal.SIGINT) from error
            raise


class _Signals(_SignalConnector):
    """Keeps what Lightning does on a signal until all ranks can do it at the same batch."""

    def __init__(self, trainer: Trainer, watch: FaultWatch) -> None:
        super().__init__(trainer)
        self.signals = Signals(act=self._act)
        self.is_running = False
        self._watch = watch

    @override
    def register_signal_handlers(self) -> None:
        if signal.getsignal(signal.SIGTERM) is _terminate:
            self._register_signal(signal.SIGTERM, signal.SIG_DFL)
        super().register_signal_handlers()
        self.is_running = True

    @override
    def _sigterm_notifier_fn(self, signum: int, _: FrameType | None) -> None:
        self.signals.pending = signum
        self._watch.hurry.set()

    @override
    def _slurm_sigusr_handler_fn(self, signum: int, _: FrameType | None) -> None:
        self.signals.pending = self.signals.pending or signum

    def _act(self, signum: int) -> None:
        if self.signals.pending and self._watch.is_first("signal"):
            name, rank = signal.Signals(signum).name, self.trainer.global_rank
            say(f"rank {rank} received {name}: all ranks act on it before this batch.")
        self.signals.pending = 0
        if signum == signal.SIGTERM:
            self.received_sigterm = True
            raise SIGTERMException(_TERMINATED)
        super()._slurm_sigusr_handler_fn(signum, None)  # type: ignore[arg-type]


def launcher_of(strategy: DDPStrategy, start_method: str) -> ScriptLauncher | ForkLauncher:
    """The launcher of a start method.

    Raises:
        MisconfigurationException: It needs a script, and this is an interactive session.
    """
    if start_method != "popen":
        return ForkLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]
    if _IS_INTERACTIVE:
        # Lightning would name its own strategies.
        raise MisconfigurationException(
            "start_method='popen' runs a script again for each rank, and an interactive session "
            "has none. Use DynamicCPStrategy(start_method='fork') or "
            "Trainer(strategy='dynamic_cp_notebook'), or run your code as a script."
        )
    assert strategy.cluster_environment is not None
    return ScriptLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)


@contextmanager
def meeting_point_in_errors(strategy: DDPStrategy) -> Iterator[None]:
    """Says where the ranks were to meet, if they do not.

    Raises:
        RuntimeError: They did not meet.
    """
    try:
        yield
    except dist.DistError as error:
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        raise RuntimeError(
            f"Rank {strategy.global_rank} of {strategy.world_size} could not meet the others at "
            f"MASTER_ADDR={address}, MASTER_PORT={port}, with num_nodes={strategy.num_nodes} and "
            f"{strategy.num_processes} processes on this one (NODE_RANK={strategy.node_rank}): "
            "give every machine the address of the first and a free port of it, and start all of "
            f"them. ({str(error).splitlines()[0]})"
        ) from error


def _nothing() -> None:
    pass


def _terminate(signum: int, frame: FrameType | None) -> None:
    """SIGTERM before the first batch: there is nothing to save."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    say(f"rank {rank} received SIGTERM before the first batch.")
    raise SIGTERMException(_TERMINATED)


@contextmanager
def _sigterm_handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles SIGTERM, unless the user does or this is a thread, which may not."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        # After an error in a batch it is still Lightning's, which a checkpoint is to outlive.
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _print_unless(error: BaseException, told: Callable[[], bool]) -> None:
    """Prints no traceback of ``error``, if nobody catches it, where another rank has told it."""
    others = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error or not told():
            others(kind, value, trace)

    sys.excepthook = hook


def _save_only_together(trainer: Trainer, watch: FaultWatch, *, silent: bool) -> None:
    """Lets callbacks write a checkpoint after an exception if all ranks take part, which it needs.

    ``silent`` if another rank has said why none is written.
    """
    save = trainer.save_checkpoint
    told = [silent]

    def tell() -> None:
        if not told[0]:
            say(
                f"no checkpoint is written: rank {trainer.global_rank} failed alone, and a "
                "checkpoint needs what all ranks hold."
            )
        told[0] = True

    def save_checkpoint(*args: Any, **options: Any) -> None:
        if watch.together():
            save(*args, **options)
        else:
            tell()

    trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
    for callback in trainer.checkpoint_callbacks:
        saves = isinstance(callback, ModelCheckpoint) and callback._should_save_on_exception(
            trainer
        )
        # It would say that it has written one.
        if saves and not watch.together():
            tell()
            _skip_on_exception(callback)


def _skip_on_exception(callback: Any) -> None:
    """Leaves out a callback's next ``on_exception``."""
    callback.on_exception = lambda *args: vars(callback).pop("on_exception")
