"""CPU mode: CUDA's names mean the CPU while it is on, and nothing is left of it afterwards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import _get_current_function_mode_stack

from lightning_dcp.parallel import cpu_mode_is_active, disable_cpu_mode, enable_cpu_mode

OWNERS = (torch.cuda, torch.Tensor, megatron_random)
# Made anew at every access.
VOLATILE = {"__dict__", "__doc__"}

no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU mode is for machines without a CUDA device"
)


@pytest.fixture(autouse=True)
def _off_again():
    assert not cpu_mode_is_active()
    yield
    disable_cpu_mode()


def attributes() -> dict[tuple[Any, str], Any]:
    """Every attribute of what CPU mode touches, whether it is patched or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            (owner, name): getattr(owner, name, None)
            for owner in OWNERS
            for name in dir(owner)
            if name not in VOLATILE
        }


def changed(before: dict[tuple[Any, str], Any], after: dict[tuple[Any, str], Any]) -> set[str]:
    assert set(before) == set(after)
    return {
        name
        for (owner, name), value in before.items()
        if after[owner, name] is not value and not _equal(after[owner, name], value)
    }


def _equal(one: Any, other: Any) -> bool:
    # Built-in class methods are bound anew at every access, and then equal.
    return callable(one) and type(one) is type(other) and bool(one == other)


@no_gpu
def test_everything_is_put_back():
    before, modes = attributes(), _get_current_function_mode_stack()
    assert changed(before, attributes()) == set()
    assert enable_cpu_mode()
    assert cpu_mode_is_active()
    assert {"current_device", "synchronize", "Stream", "cuda"} <= changed(before, attributes())
    disable_cpu_mode()
    assert not cpu_mode_is_active()
    assert changed(before, attributes()) == set()
    assert _get_current_function_mode_stack() == modes


@no_gpu
def test_cuda_is_refused_again_afterwards():
    def refused() -> str:
        with pytest.raises((RuntimeError, AssertionError)) as error:
            torch.zeros(1, device="cuda")
        return str(error.value)

    before = refused()
    enable_cpu_mode()
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    disable_cpu_mode()
    assert refused() == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


@no_gpu
def test_twice_is_harmless():
    before, modes = attributes(), _get_current_function_mode_stack()
    assert enable_cpu_mode()
    assert enable_cpu_mode()
    assert len(_get_current_function_mode_stack()) == len(modes) + 1
    disable_cpu_mode()
    disable_cpu_mode()
    assert changed(before, attributes()) == set()
    assert _get_current_function_mode_stack() == modes


def test_not_where_there_is_a_cuda_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before, modes = attributes(), _get_current_function_mode_stack()
    assert not enable_cpu_mode()
    assert not cpu_mode_is_active()
    assert changed(before, attributes()) == set()
    assert _get_current_function_mode_stack() == modes


@no_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda:0")])
def test_cuda_devices_mean_the_cpu(device):
    enable_cpu_mode()
    tensor = torch.arange(3.0)
    for made in (
        torch.zeros(3, device=device),
        torch.tensor([1.0], device=device),
        torch.empty_like(tensor, device=device),
        tensor.new_zeros(2, device=device),
        tensor.to(device),
        tensor.to(device, torch.float64),
        tensor.to(device=device),
        tensor.cuda(),
        torch.zeros(2, device=torch.cuda.current_device()),
    ):
        assert made.device.type == "cpu"
    assert tensor.to(device, torch.float64).dtype == torch.float64


@no_gpu
def test_other_devices_and_types_are_left_alone():
    enable_cpu_mode()
    tensor = torch.arange(3.0)
    assert torch.zeros(3, device="meta").device.type == "meta"
    assert tensor.to("meta").device.type == "meta"
    assert tensor.to(torch.float64).dtype == torch.float64
    assert tensor.type(torch.float64).dtype == torch.float64


@no_gpu
def test_tensors_name_their_type_as_on_a_gpu():
    # Megatron-Core's distributed optimizer compares with these names.
    enable_cpu_mode()
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"


@no_gpu
def test_streams_and_events_do_nothing():
    enable_cpu_mode()
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        event.record(stream)
        stream.wait_event(event)
    assert event.query()
    torch.cuda.synchronize()


@no_gpu
def test_random_states_are_those_of_the_cpu():
    enable_cpu_mode()
    with megatron_random.get_cuda_rng_tracker().fork():
        state = megatron_random._get_cuda_rng_state()
        first = torch.rand(3)
        megatron_random._set_cuda_rng_state(state)
        assert torch.equal(torch.rand(3), first)
