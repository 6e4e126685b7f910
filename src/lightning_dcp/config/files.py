"""Files that are whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a file beside ``path`` to write, which takes its place when the block ends.

    Nobody sees half of a file: one that is there stays until the new one is complete, and an error
    in the block leaves it as it was. The folder is made if need be.

    Args:
        path: The file; ``~`` is the user's folder.

    Raises:
        ValueError: The folder cannot be written.
    """
    file = Path(path).expanduser()
    # Beside the file, since a rename is atomic within one file system only.
    # The process id: ranks and workers that write the same file do not meet in one.
    scratch = file.with_name(f".{os.getpid()}-{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield scratch
            os.replace(scratch, file)
        finally:
            scratch.unlink(missing_ok=True)
    # Those of the block too, such as a full disk: commands tell a ValueError in a line.
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
