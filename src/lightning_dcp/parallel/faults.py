"""What one rank cannot see of another: that it failed, is gone, or hangs.

A rank that fails says so in the store of the process group before it ends. A thread of every other
rank reads it there, and ends a process whose own thread waits in a collective that nobody will
join. Nothing here is a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from lightning_dcp.config.waiting import waited_for

_POLL = 0.5
PATIENCE = 4.0
"""Seconds that a process has to end by itself after another rank failed."""
_LAST = 60.0
"""Seconds for the callbacks and the teardown of a rank that failed, if the others did not."""
_LOST = ("gloo", "Gloo", "NCCL", "Connection", "Socket", "ProcessGroup")


@dataclass(frozen=True)
class Fault:
    """Why a run ends.

    Attributes:
        rank: The rank that said it.
        host: Its machine.
        text: What happened, in a line.
        lost: Whether that rank only lost the connection, so that the cause lies with another.
    """

    rank: int
    host: str
    text: str
    lost: bool = False


class FaultWatch:
    """Tells the other ranks of a fault, and ends this process after one of theirs.

    Args:
        children: Ranks 1 and up of this machine, where this process started them.
        parent: The process that started this one, if it is to end with it.
        patience: Seconds that this process may go on after another rank failed.
    """

    def __init__(
        self,
        children: list[subprocess.Popen[bytes]] | None = None,
        parent: int | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._children = [] if children is None else children
        self._parent = parent
        self._patience = patience
        self.hurry = threading.Event()
        self._stopped = threading.Event()
        self.begin()
        self._thread = threading.Thread(target=self._watch, name="fault-watch", daemon=True)
        self._thread.start()
        # Not left to the end of Python, which aborts where a thread is in the store's C++ then.
        atexit.register(self._stop)

    def begin(self) -> None:
        """A run starts, in the calling thread; nothing of an earlier one is left."""
        self._store: Store | None = None
        self._store_of_thread: Store | None = None
        self._rank, self._world = 0, 1
        self._failed, self._over = threading.Event(), threading.Event()
        self._is_together: bool | None = None
        self._is_told_by_first = False
        self._speaks = self._speaks_for_first = False
        self.hurry.clear()
        self._runner = threading.get_ident()

    def attach(self, rank: int, world_size: int, *, local_rank: int, node_rank: int) -> None:
        """Uses the store of the default process group from now on."""
        self._speaks = local_rank == 0
        self._speaks_for_first = local_rank == (1 if node_rank == 0 else 0)
        store: Any = _get_default_store()
        # A run after a failed one must not find what that one left; counted by rank, in the store.
        run = store.add(f"lightning_dcp/runs/{rank}", 1)
        prefix = f"lightning_dcp/faults/{run}"
        self._rank, self._world = rank, world_size
        # A connection for each thread: one that waits for a key would make the other wait too.
        self._store = PrefixStore(prefix, store.clone())
        self._store_of_thread = PrefixStore(prefix, store.clone())

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE)

    def is_first(self, name: str) -> bool:
        """Whether no other rank has asked for this name in this run."""
        return self._store is None or self._store.add(name, 1) == 1

    @property
    def watches_family(self) -> bool:
        """Whether it sees processes that belong together, after a run as well."""
        return bool(self._children) or self._parent is not None

    def close(self) -> None:
        """The run is over on this rank."""
        self._over.set()
        if not self.watches_family:
            atexit.unregister(self._stop)
            self._stop()
        # Now, and not when Python gets to it: a file store whose folder is removed at that moment
        # keeps the whole process for its timeout, and ends it then.
        self._store_of_thread = None
        if not self._failed.is_set():
            self._store = None

    # -- this rank failed ------------------------------------------------------------------------

    def failed(self, error: BaseException) -> Fault | None:
        """Tells the others that ``error`` ended the run here.

        Returns:
            The fault of another rank if ``error`` only follows from it; None if it is this one's
            own, or nobody can say.
        """
        self._failed.set()
        store = self._store
        if store is None or self._world == 1:
            return None
        try:
            return self._tell(store, error)
        except dist.DistError:
            # Rank 0 held the store.
            return self._first_is_gone() if self._rank else None

    def _tell(self, store: Store, error: BaseException) -> Fault | None:
        store.set(f"present/{self._rank}", "")
        lost = lost_connection(error)
        # The rank at fault tells it before it closes a connection.
        if lost and (fault := self._read_fault(store, 2 * _POLL)):
            store.set(f"end/{self._rank}", "follows another")
            return fault
        store.set(f"end/{self._rank}", f"{position(error)}\n{summary(error)}")
        mine = Fault(self._rank, socket.gethostname(), summary(error), lost)
        first = store.add("faults", 1) == 1
        if first:
            store.set("fault", json.dumps(asdict(mine)))
        if not lost:
            return None
        if not first:
            return self._read_fault(store, PATIENCE)
        return replace(mine, text=self._roll_call(store, mine.text))

    def together(self) -> bool:
        """Whether all ranks failed in the same place; waits a moment for them."""
        if self._is_together is None:
            self._is_together = self._world == 1 or self._failed_alike()
        return self._is_together

    def _failed_alike(self) -> bool:
        store, keys = self._store, [f"end/{rank}" for rank in range(self._world)]
        try:
            if store is None:
                return False
            # Who waits in a collective will not come to where this rank failed.
            waited_for(lambda: store.check(keys) or store.check(["blocked"]), PATIENCE)
            if not store.check(keys):
                return False
            ends = [value.decode().splitlines() for value in store.multi_get(keys)]
        except dist.DistError:
            return False
        self._is_told_by_first = ends[0] == ends[self._rank]
        return len({where for where, *_ in ends}) == 1

    def is_told_by_first(self) -> bool:
        """Whether all ranks failed in the same place, this one with the words of rank 0."""
        return self.together() and self._is_told_by_first

    def _read_fault(self, store: Store, seconds: float) -> Fault | None:
        if not waited_for(lambda: store.check(["fault"]), seconds):
            return None
        return Fault(**json.loads(store.get("fault")))

    def _roll_call(self, store: Store, otherwise: str) -> str:
        """Who is at fault where the ranks only saw that a connection broke or timed out."""
        keys = [f"present/{rank}" for rank in range(self._world)]
        # Their threads answer for those that run.
        waited_for(lambda: store.check(keys), 6 * _POLL)
        gone = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if gone:
            return (
                f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} ended without a "
                "word: killed from outside, as by the kernel when memory runs out"
            )
        stacks = {rank: store.get(key).decode() for rank, key in enumerate(keys)}
        for rank, stack in stacks.items():
            # Who waits in a collective is no cause; who is elsewhere did not join it.
            if stack and not in_collective(stack):
                return f"rank {rank} did not come to a collective of the others; it is at\n{stack}"
        return otherwise

    # -- another rank failed -----------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL):
            try:
                fault = self._look()
            except dist.DistError:
                # Rank 0 held the store, and may have finished before this rank.
                self._store_of_thread = None
                continue
            if fault is not None:
                self._end_process(fault)

    def _look(self) -> Fault | None:
        store = self._store_of_thread
        if store is not None and store.check(["fault"]):
            if not waited_for(self._ends_by_itself, 2 * _POLL):
                stack = self._stack()
                store.set(f"present/{self._rank}", stack)
                if in_collective(stack):
                    store.set("blocked", "")
            return self._read_fault(store, 0)
        if self._parent_is_gone():
            return self._first_is_gone()
        # The children are the ranks after this one, the machine's first.
        for rank, child in enumerate(list(self._children), self._rank + 1):
            if child.poll():
                return self._of_child(rank, child)
        return None

    def _first_is_gone(self) -> Fault:
        text = "rank 0 ended without a word, so that the run ends"
        # All ranks see it; one of each machine says it.
        if self._speaks_for_first:
            self._speaks_for_first = False
            say(text)
        return Fault(0, socket.gethostname(), text)

    def _parent_is_gone(self) -> bool:
        return self._parent is not None and os.getppid() != self._parent

    def _family_is_broken(self) -> bool:
        return self._parent_is_gone() or any(child.poll() for child in self._children)

    def _of_child(self, rank: int, child: subprocess.Popen[bytes]) -> Fault | None:
        fault = Fault(rank, socket.gethostname(), ended_by(rank, child))
        store = self._store_of_thread
        if store is not None:
            if store.add("faults", 1) != 1:
                return None  # It said so itself: read in the next round.
            store.set("fault", json.dumps(asdict(fault)))
        # What ended with a code has printed why.
        if child.returncode < 0:
            say(fault.text)
        return fault

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._runner)
        return "".join(traceback.format_stack(frame)[-4:]) if frame else ""

    def _end_process(self, fault: Fault) -> None:
        """Ends this process, unless it does so by itself."""
        failed, over = self._failed, self._over
        waited_for(self._ends_by_itself, self._patience)
        if failed.is_set():
            # Not hurried: a checkpoint that all ranks write together may take its time.
            if self.together():
                return
            waited_for(lambda: over.is_set() or self._stopped.is_set(), _LAST)
        if over.is_set() and (not self._family_is_broken() or self._stopped.wait(PATIENCE)):
            return
        self.say_elsewhere(fault)
        end_processes(self._children)
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(1)

    def say_elsewhere(self, fault: Fault) -> None:
        """Says it once on each machine that is not the one of the rank that printed it."""
        if self._speaks and fault.host != socket.gethostname():
            say(f"the run ends: {fault.text} (rank {fault.rank} on {fault.host})")

    def _ends_by_itself(self) -> bool:
        return any(event.is_set() for event in (self._failed, self._over, self._stopped))


def say(text: str) -> None:
    """A line about the end of the run, on stderr."""
    print(f"lightning-dcp: {text}", file=sys.stderr, flush=True)


def end_processes(
    processes: list[subprocess.Popen[bytes]], patience: float | None = PATIENCE
) -> None:
    """Waits for processes that this one started, for seconds or for good; kills what is left."""
    deadline = None if patience is None else time.monotonic() + patience
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()


def ended_by(rank: int, process: subprocess.Popen[bytes]) -> str:
    """How a process ended that should not have."""
    code = process.returncode
    if code >= 0:
        return f"rank {rank} (process {process.pid}) ended with exit code {code}"
    name = signal.Signals(-code).name
    memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"rank {rank} (process {process.pid}) was ended by {name}{memory}"


def lost_connection(error: BaseException) -> bool:
    """Whether an error is a collective's whose other ranks are gone, or that ran out of time."""
    # Told by its text: gloo raises a plain RuntimeError.
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(word in str(error) for word in _LOST)
    )


def summary(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def in_collective(stack: str) -> bool:
    """Whether a stack, as ``traceback`` formats it, ends in a wait for other ranks."""
    *_, where, line = stack.splitlines() or ["", ""]
    return "/torch/distributed/" in where or "wait()" in line


def position(error: BaseException) -> str:
    """Where an exception was raised: equal on ranks that raised the same at the same place.

    Where ranks compare their batches is one place, though the rank at fault raises from another
    line of it.
    """
    places: list[str] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_qualname
        if name in ("DynamicCPEngine.prepare", "PlanningLoader.__iter__"):
            return "|".join([*places, name])
        places.append(f"{name}:{line}")
    return "|".join([*places, type(error).__name__])
