"""What a test must leave as it found it, in pytest's process and in the workers of tests."""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
from dataclasses import dataclass
from typing import Any

# Megatron-Core, Lightning and the first import of torch set these: put back without a word.
_OF_OTHERS = ("NVTE_", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "TORCHINDUCTOR_", "PYTORCH_")


def load() -> float:
    """How many times longer something may take on this machine now."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class State:
    """The state of a process that tests could change for those after them."""

    environment: dict[str, str]
    folder: str
    threads: set[int | None]
    random: tuple[Any, ...]
    filters: list[Any]

    @classmethod
    def now(cls) -> State:
        """What holds at the moment."""
        return cls(_environment(), os.getcwd(), _threads(), _random(), list(warnings.filters))

    def restore(self) -> list[str]:
        """Puts everything back; what should have been put back by the test itself is named."""
        left = [*_of_torch()]
        environment = _environment()
        changed = [
            name
            for name in {*environment, *self.environment}
            if environment.get(name) != self.environment.get(name)
        ]
        for name in changed:
            if not name.startswith(_OF_OTHERS):
                left.append(f"environment variable {name}={environment.get(name)}")
            os.environ.pop(name, None)
            if name in self.environment:
                os.environ[name] = self.environment[name]
        if os.getcwd() != self.folder:
            left.append(f"working directory {os.getcwd()}")
            os.chdir(self.folder)
        for one in _live():
            if one.ident not in self.threads:
                # A pool that was shut down ends its thread a moment later.
                one.join(2.0 * load())
                left += [f"thread {one.name}"] if one.is_alive() else []
        # Seeds and filters are put back without a word: to seed is no fault.
        _set_random(self.random)
        warnings.filters[:] = self.filters
        warnings._filters_mutated()
        return left


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _live() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.is_alive() and not one.daemon]


def _threads() -> set[int | None]:
    return {one.ident for one in _live()}


def _of_torch() -> list[str]:
    """Process groups, parallel state, CPU mode and the default dtype; all are put back."""
    # Only what is loaded can have been left: most tests need no torch.
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    left = []
    cpu_mode = sys.modules.get("lightning_dcp.parallel.cpu_mode")
    if cpu_mode is not None and cpu_mode.cpu_mode_is_active():
        left.append("CPU mode")
        cpu_mode.disable_cpu_mode()
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        left.append("Megatron-Core's parallel state")
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        left.append("the default process group")
        torch.distributed.destroy_process_group()
    if torch.get_default_dtype() != torch.float32:
        left.append(f"default dtype {torch.get_default_dtype()}")
        torch.set_default_dtype(torch.float32)
    if not torch.is_grad_enabled():
        left.append("gradients switched off")
        torch.set_grad_enabled(True)
    return left


def _random() -> tuple[Any, ...]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (
        random.getstate(),
        numpy.random.get_state() if numpy else None,
        torch.get_rng_state() if torch else None,
    )


def _set_random(state: tuple[Any, ...]) -> None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    random.setstate(state[0])
    if numpy and state[1] is not None:
        numpy.random.set_state(state[1])
    if torch and state[2] is not None:
        torch.set_rng_state(state[2])
