"""What Megatron-Core needs to run where there is no CUDA device, all of it and only there.

Megatron-Core names the CUDA device outright: tensors are made with ``device="cuda"``, buffers on
``torch.cuda.current_device()``, and the distributed optimizer asks whether ``Tensor.type()`` is
``"torch.cuda.FloatTensor"``. :func:`enable_cpu_mode` answers all of these with the CPU, so that the
same classes run under gloo; :func:`disable_cpu_mode` puts everything back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class CudaNamesOnCpu(TorchFunctionMode):
    """Turns a ``device`` that names CUDA into the CPU, and ``Tensor.type()`` into CUDA's name."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        # `tensor.to("cuda")` names the device by position.
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _NoStream:
    """Stands for a CUDA stream or event: the CPU runs everything in order already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        return _NoStream() if event is None else event

    def query(self) -> bool:
        return True


class _NoForkTracker:
    """A random-state tracker for a run without dropout: there is no CUDA state to fork."""

    reset = set_states = add = _nothing

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What the token dispatcher reads on the host: split sizes become lists of numbers there."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _replacements() -> list[tuple[Any, str, Any]]:
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    return [
        # A device and no number, which would mean one of CUDA's where it ends up as `device=`.
        (torch.cuda, "current_device", lambda *args: _CPU),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "current_stream", _NoStream),
        (torch.cuda, "Stream", _NoStream),
        (torch.cuda, "Event", _NoStream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        # Recomputation saves and restores CUDA's random states: it gets those of the CPU.
        (torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        (megatron_random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (
            megatron_random,
            "_set_cuda_rng_state",
            lambda state, *args, **kw: torch.set_rng_state(state),
        ),
        # It leaves tensors of the CPU alone, and gloo wants lists of split sizes.
        (token_dispatcher, "maybe_move_tensor_to_cpu", _to_host),
        (megatron_random, "_CUDA_RNG_STATE_TRACKER", _NoForkTracker()),
        # Else Megatron-Core puts a tracker of its own in its place.
        (megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
    ]


_active: contextlib.ExitStack | None = None


def cpu_mode_is_active() -> bool:
    """Whether :func:`enable_cpu_mode` is in force in this process."""
    return _active is not None


def enable_cpu_mode() -> bool:
    """Makes Megatron-Core run on the CPU where there is no CUDA device; harmless when called twice.

    Returns whether CPU mode is in force now: where there is a device, nothing is touched.
    """
    global _active
    if _active is not None or torch.cuda.is_available():
        return _active is not None
    undo = contextlib.ExitStack()
    for owner, name, stand_in in _replacements():
        # What was inherited is not put back, but laid bare again.
        if name in vars(owner):
            undo.callback(setattr, owner, name, vars(owner)[name])
        else:
            undo.callback(delattr, owner, name)
        setattr(owner, name, stand_in)
    undo.enter_context(CudaNamesOnCpu())
    _active = undo
    return True


def disable_cpu_mode() -> None:
    """Undoes :func:`enable_cpu_mode`; harmless when it is not in force."""
    global _active
    if _active is not None:
        _active.close()
        _active = None
