"""Keeps Megatron-Core's notices about itself out of a user's output.

Importing this module imports Megatron-Core without them: at import it says which optional packages
it does not find, a page of it, once a process. What that means for a run is in docs/install.md.
The packages that need Megatron-Core import this module first.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def _only_errors_of(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet_megatron() -> Iterator[None]:
    """Holds back Megatron-Core's warnings while it is set up; errors pass.

    They concern its own development (GPTModel is to become HybridModel, layouts are better computed
    by the caller) and name nothing that a user of this package could change.
    """
    with _only_errors_of("megatron.core"):
        warnings.filterwarnings("ignore", module=r"megatron\.")
        yield


with _only_errors_of("torch.utils.cpp_extension"):
    warnings.simplefilter("ignore")
    for _name in ("megatron.core.optimizer", "megatron.core.models.gpt.gpt_layer_specs"):
        import_module(_name)

# Torch tells its own developers, once per process and data worker, how to rename a function.
logging.getLogger("torch.fx._symbolic_trace").addFilter(
    lambda record: not record.getMessage().startswith("is_fx_tracing")
)
