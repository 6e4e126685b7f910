"""Imports Megatron-Core once, without its notices.

At import it says which optional packages it does not find, a page of it, once a process. What that
means for a run is in the README. This module is imported before any other that needs Megatron-Core.
"""

from __future__ import annotations

import logging
import warnings
from importlib import import_module


def _import_quietly(*names: str) -> None:
    torch_extensions = logging.getLogger("torch.utils.cpp_extension")
    level = torch_extensions.level
    torch_extensions.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in names:
                import_module(name)
    finally:
        torch_extensions.setLevel(level)


_import_quietly("megatron.core.optimizer", "megatron.core.models.gpt.gpt_layer_specs")

# Torch tells its own developers, once per process and data worker, how to rename a function.
logging.getLogger("torch.fx._symbolic_trace").addFilter(
    lambda record: not record.getMessage().startswith("is_fx_tracing")
)
