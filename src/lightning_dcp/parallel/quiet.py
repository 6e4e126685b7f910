"""Keeps Megatron-Core's notices about itself out of a user's output."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_megatron() -> Iterator[None]:
    """Holds back Megatron-Core's warnings while it is set up; errors pass.

    They concern its own development (GPTModel is to become HybridModel, layouts are better computed
    by the caller) and name nothing that a user of this package could change.
    """
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.")
            yield
    finally:
        logger.setLevel(level)
