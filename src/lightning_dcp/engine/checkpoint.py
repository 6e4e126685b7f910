"""Whole weights and optimizer states from sharded ones, and back, for any number of ranks.

A checkpoint holds every tensor whole, by the parameter's name: it can be read without this package,
and resumed on another number of DPxCP or tensor-parallel ranks. Rank 0 holds all of it on the host
while it is saved. All functions here are collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from lightning_dcp.engine.optimizer import MegatronOptimizer
from lightning_dcp.parallel import ParallelContext

_FORMAT = "lightning_dcp.optimizer.v1"
_EXTRA_STATE = "_extra_state"


def full_model_state(module: torch.nn.Module, context: ParallelContext) -> dict[str, Tensor]:
    """The state dict of ``module`` with tensor-parallel shards put together, on the host.

    Returns:
        On global rank 0 the whole state dict, elsewhere an empty one.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    whole = {}
    for name, tensor in module.state_dict().items():
        if name.endswith(_EXTRA_STATE):
            continue
        merged = _merge_over_tp(tensor, parameters.get(name), context)
        if dist.get_rank() == 0:
            whole[name] = merged.detach().cpu().clone()
    return whole


def load_full_model_state(
    module: torch.nn.Module,
    state: Mapping[str, Tensor],
    context: ParallelContext,
    *,
    strict: bool = True,
) -> None:
    """Loads this rank's part of a whole state dict.

    Raises:
        RuntimeError: Keys or shapes differ (torch's own error).
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    local: dict[str, Any] = {
        name: _split_for_tp(tensor, parameters.get(name), context) for name, tensor in state.items()
    }
    for name, value in module.state_dict().items():
        if name.endswith(_EXTRA_STATE):
            local.setdefault(name, value)
    module.load_state_dict(local, strict=strict)


def full_optimizer_state(
    optimizer: MegatronOptimizer, module: torch.nn.Module, context: ParallelContext
) -> dict[str, Any]:
    """The optimizer's states with DPxCP and tensor-parallel shards put together, on the host.

    Returns:
        On global rank 0 a dict of the groups' settings, the step, and for each parameter's name its
        float32 master weight (``param``) and moments; elsewhere an empty dict.
    """
    shards = list(_shards(optimizer, module))
    keys = _all_keys(shards)
    step = _step_number(shards, optimizer, context)
    states = {
        name: {
            key: whole
            for key in keys
            if (whole := _gather_state(key, parameter, shard, context)) is not None
        }
        for name, parameter, shard in shards
    }
    if dist.get_rank() != 0:
        return {}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"format": _FORMAT, "step": step, "param_groups": groups, "state": states}


def load_full_optimizer_state(
    optimizer: MegatronOptimizer,
    module: torch.nn.Module,
    state: Mapping[str, Any],
    context: ParallelContext,
) -> None:
    """Loads this rank's part of what :func:`full_optimizer_state` gave.

    Raises:
        ValueError: Not such a state, or of another model or optimizer; the message says which.
    """
    _check_state(optimizer, module, state)
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(saved)
    for name, parameter, shard in _shards(optimizer, module):
        if shard is None:
            continue
        whole = state["state"][name]
        shard.load({key: _split_for_tp(whole[key], parameter, context) for key in whole})
        shard.set_step(state["step"])


def _check_state(
    optimizer: MegatronOptimizer, module: torch.nn.Module, state: Mapping[str, Any]
) -> None:
    if state.get("format") != _FORMAT:
        raise ValueError(
            "The checkpoint's optimizer state was not written by DynamicCPStrategy (found format "
            f"{state.get('format')!r}, expected {_FORMAT!r}). Load the weights alone, with "
            "trainer.fit(module) after loading them in configure_model."
        )
    expected = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if expected != set(state["state"]):
        missing, extra = expected - set(state["state"]), set(state["state"]) - expected
        raise ValueError(
            "The checkpoint's optimizer state is of another model: it lacks "
            f"{sorted(missing)[:3] or 'nothing'} and has {sorted(extra)[:3] or 'nothing'} more."
        )
    if len(optimizer.param_groups) != len(state["param_groups"]):
        raise ValueError(
            f"The optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint "
            f"{len(state['param_groups'])}. Use the optimizer that the checkpoint was made with."
        )


class _Shard:
    """This rank's part of one parameter's master weight and moments.

    Attributes:
        main: The float32 weight that the optimizer updates: flat where states are sharded.
        first: Where ``main`` starts in the flattened parameter.
        is_partial: Whether other DPxCP ranks hold other parts.
    """

    def __init__(self, owner: Any, parameter: Tensor) -> None:
        self._inner = owner.optimizer
        self.is_partial = isinstance(owner, DistributedOptimizer)
        self.first = 0
        if self.is_partial:
            group, order = owner.model_param_group_index_map[parameter]
            self.main = self._inner.param_groups[group]["params"][order]
            self.first = owner._get_model_param_range_map(parameter)["param"].start
        else:
            self.main = getattr(parameter, "main_param", parameter)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The master weight as ``param``, and the moments."""
        moments = self._inner.state.get(self.main, {})
        return {"param": self.main} | {
            key: value
            for key, value in moments.items()
            if isinstance(value, Tensor) and value.shape == self.main.shape
        }

    @property
    def step(self) -> int:
        """Updates so far; 0 before the first."""
        return int(self._inner.state.get(self.main, {}).get("step", 0))

    def set_step(self, step: int) -> None:
        """Torch's Adam counts in each state, TransformerEngine's in the group (saved with it)."""
        if step and isinstance(self._inner, torch.optim.Adam):
            self._inner.state[self.main]["step"] = torch.tensor(float(step))

    @torch.no_grad()
    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Takes this shard's part of the whole tensors."""
        for key, tensor in whole.items():
            part = tensor.flatten()[self.first : self.first + self.main.numel()]
            part = part.view_as(self.main).to(self.main.device, self.main.dtype)
            if key == "param":
                self.main.copy_(part)
            else:
                self._inner.state[self.main][key] = part.clone()


def _shards(
    optimizer: MegatronOptimizer, module: torch.nn.Module
) -> Iterator[tuple[str, Tensor, _Shard | None]]:
    """Every trained parameter by name; None where this rank holds no part of it."""
    owners = optimizer.inner.chained_optimizers
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        shard = None
        for owner in owners:
            sharded = isinstance(owner, DistributedOptimizer)
            if not sharded or parameter in owner.model_param_group_index_map:
                shard = _Shard(owner, parameter)
                break
        yield name, parameter, shard


def _all_keys(shards: list[tuple[str, Tensor, _Shard | None]]) -> list[str]:
    mine = {key for _, _, shard in shards if shard is not None for key in shard.tensors}
    everybodys: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybodys, mine)
    return sorted(set().union(*everybodys))


def _step_number(
    shards: list[tuple[str, Tensor, _Shard | None]],
    optimizer: MegatronOptimizer,
    context: ParallelContext,
) -> int:
    steps = [shard.step for _, _, shard in shards if shard is not None]
    steps += [int(group.get("step") or 0) for group in optimizer.param_groups]
    step = torch.tensor(max(steps, default=0), device=context.device)
    dist.all_reduce(step, op=dist.ReduceOp.MAX)
    return int(step)


def _gather_state(
    key: str, parameter: Tensor, shard: _Shard | None, context: ParallelContext
) -> Tensor | None:
    """One whole state tensor on global rank 0; None elsewhere, and where nobody has it."""
    mine = None if shard is None else shard.tensors.get(key)
    partial = torch.zeros(parameter.numel() + 1, dtype=torch.float32, device=parameter.device)
    if mine is not None and shard is not None:
        partial[shard.first : shard.first + mine.numel()] = mine.detach().flatten()
        partial[-1] = 1
    pool = context.pg_collection.dp_cp
    if shard is None or shard.is_partial:
        dist.all_reduce(partial, group=pool)
    if not partial[-1]:
        return None
    whole = _merge_over_tp(partial[:-1].view_as(parameter), parameter, context)
    return whole.cpu().clone() if dist.get_rank() == 0 else None


def _merge_over_tp(tensor: Tensor, parameter: Tensor | None, context: ParallelContext) -> Tensor:
    """The whole of a tensor that tensor parallelism splits like ``parameter``."""
    tp_size = context.sizes.tensor_model_parallel_size
    if tp_size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    shards = [torch.empty_like(tensor) for _ in range(tp_size)]
    dist.all_gather(shards, tensor.contiguous(), group=context.pg_collection.tp)
    dim, stride = _partition(parameter)
    # A gated MLP's first layer is split stride-wise: each rank holds its part of both halves.
    strides = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([strides[rank][i] for i in range(stride) for rank in range(tp_size)], dim)


def _split_for_tp(tensor: Tensor, parameter: Tensor | None, context: ParallelContext) -> Tensor:
    tp_size = context.sizes.tensor_model_parallel_size
    if tp_size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    dim, stride = _partition(parameter)
    return torch.cat(tensor.chunk(stride * tp_size, dim)[context.tp_rank :: tp_size], dim)


def _partition(parameter: Any) -> tuple[int, int]:
    return parameter.partition_dim, parameter.partition_stride
