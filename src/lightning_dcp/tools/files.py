"""Files that are whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: str, write: Callable[[Path], object]) -> None:
    """Has a file written beside ``path`` and renamed, so that nobody sees half of it.

    Args:
        path: The file; its folder is made if need be.
        write: Writes the file that it is given; the name ends like that of ``path``.

    Raises:
        ValueError: The folder cannot be written.
    """
    file = Path(path).expanduser()
    scratch = file.with_name(f".{os.getpid()}-{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(scratch)
        os.replace(scratch, file)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)
