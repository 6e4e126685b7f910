"""A user's mistake: one error of a few lines, once, however many processes there are."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_dcp.config.waiting import waited_for

TRACEBACK = "LIGHTNING_DCP_TRACEBACK"
"""Environment variable that brings tracebacks back; ``--traceback`` sets it."""
# Folder of rank 0 and the processes that it starts: a file for each error that was printed.
_TOLD = "LIGHTNING_DCP_TOLD"
_MISTAKES = (ValueError, TypeError, NotImplementedError, ImportError, FileNotFoundError)
# Seconds that rank 0 has to say what another rank found too, and for others to end by themselves.
PATIENCE = 3.0


@contextmanager
def told_once(command: str) -> Iterator[None]:
    """Ends the process with status 1 and a message if the user got something wrong.

    What all ranks raise, rank 0 prints alone; what one rank raises, it prints with its number. Any
    other exception passes, unless it follows from the mistake that another rank printed.

    Args:
        command: The command's name, for the message.

    Raises:
        SystemExit: There was a mistake. It has the message where no other process can be there.
    """
    try:
        yield
    except Exception as error:
        if os.environ.get(TRACEBACK, "0") not in ("", "0"):
            raise
        if not _is_mistake(error):
            # A broken connection is all that the others see of the rank that ended.
            if _TOLD in os.environ and waited_for(lambda: bool(_told()), 2 * PATIENCE):
                sys.exit(1)
            raise
        text = f"error: {error}\n(--traceback shows where)"
        # Not WORLD_SIZE: Lightning has taken it out of the environment by now.
        if _TOLD not in os.environ and not _rank():
            sys.exit(f"lightning-dcp {command}: {text}")
        _tell(command, text)
        sys.exit(1)


@contextmanager
def shared_with_other_processes() -> Iterator[None]:
    """Lets the processes that rank 0 is about to start know what was printed already."""
    if _rank() or _TOLD in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="lightning-dcp-", ignore_cleanup_errors=True) as folder:
        os.environ[_TOLD] = folder
        try:
            yield
        finally:
            del os.environ[_TOLD]


def _is_mistake(error: Exception) -> bool:
    # By name: this module is to be light, and the class is there only if Lightning is.
    lightning = any(cls.__name__ == "MisconfigurationException" for cls in type(error).__mro__)
    return lightning or isinstance(error, _MISTAKES)


def _rank() -> int:
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


def _tell(command: str, text: str) -> None:
    rank = _rank()
    # torchrun, which shares no folder, ends the others in this time after rank 0 has failed.
    if rank and waited_for(lambda: _file_of(text) in _told(), PATIENCE):
        return
    if _TOLD in os.environ:
        try:
            Path(os.environ[_TOLD], _file_of(text)).touch(exist_ok=False)  # Succeeds on one rank.
        except OSError:
            return
    where = f" (rank {rank})" if rank else ""
    print(f"lightning-dcp {command}{where}: {text}", file=sys.stderr, flush=True)


def _file_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _told() -> list[str]:
    folder = os.environ.get(_TOLD, "")
    return os.listdir(folder) if os.path.isdir(folder) else []
