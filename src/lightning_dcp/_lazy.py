"""Packages whose names are imported when they are asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its ``__name__``.
        modules: Name to the module that defines it, relative to the package.
    """

    def get(name: str) -> Any:
        if name in modules:
            value = getattr(import_module(f"{package}.{modules[name]}"), name)
            setattr(sys.modules[package], name, value)  # The next look-up does not come here.
            return value
        # `import lightning_dcp; lightning_dcp.planning` works without an import of its own.
        # Tools ask for names such as __wrapped__; those are not worth a search of the disk.
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
