"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def waited_for(happened: Callable[[], bool], seconds: float) -> bool:
    """Whether something happened within so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
