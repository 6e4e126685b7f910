"""Makes ``Trainer(strategy="dynamic_cp")`` known to Lightning, without an import of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, override

_STRATEGIES = "lightning.pytorch.strategies"
START_METHODS = {"dynamic_cp": "popen", "dynamic_cp_notebook": "fork"}


def register_strategies() -> None:
    """Registers the names now if Lightning is imported, else as soon as it is."""
    if _STRATEGIES in sys.modules:
        _register(sys.modules[_STRATEGIES])
    else:
        # In front: the search ends with the first finder that knows the module.
        sys.meta_path.insert(0, _StrategiesFinder())


def _register(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    for name, start_method in START_METHODS.items():
        # Lightning refuses a name that is registered twice.
        if name not in registry:
            registry.register(
                name,
                _strategy,
                description=f"Dynamic context parallelism, started by {start_method}",
                # By name the cap cannot be given: it follows from the DataModule.
                max_seqlen_per_dp_cp_rank="auto",
                start_method=start_method,
            )


def _strategy(**options: Any) -> Any:
    # Lightning calls what is registered when a Trainer asks for it: Megatron-Core can wait.
    from lightning_dcp.strategy import DynamicCPStrategy

    return DynamicCPStrategy(**options)


class _StrategiesFinder(MetaPathFinder):
    """Leaves finding Lightning's strategies to the other finders, and registers ours after them."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _STRATEGIES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader, self)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, inner: Loader, finder: MetaPathFinder) -> None:
        self._inner = inner
        self._finder = finder

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        # The module is to look as if we had not been here: resources are read through its loader.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        # Only now: asking for a spec (find_spec) is no import.
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _register(module)
