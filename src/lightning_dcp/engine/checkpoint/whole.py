"""Whole weights and optimizer states from sharded ones, and back, for any number of ranks.

A checkpoint holds every tensor whole, by the parameter's name in the whole model: it can be read
without this package, and resumed on another number of ranks, DPxCP, tensor, expert or pipeline
parallel. Rank 0 holds all of it on the host while it is saved. All functions here are collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.engine.agreement import raise_refusals
from lightning_dcp.engine.checkpoint import CheckpointFormat
from lightning_dcp.engine.checkpoint.shards import Shard, shards_of
from lightning_dcp.engine.optimizer import MegatronOptimizer
from lightning_dcp.model.global_names import (
    EXTRA_STATE,
    WholeNames,
    is_copy,
    merge_over_tp,
    split_for_tp,
    whole_shape,
)
from lightning_dcp.model.whole import WholeModel
from lightning_dcp.parallel import ParallelContext

_FORMAT = "lightning_dcp.optimizer.v1"


def full_model_state(module: torch.nn.Module, context: ParallelContext) -> dict[str, Tensor]:
    """The state dict of the whole model, on the host.

    Returns:
        On global rank 0 the whole state dict, elsewhere an empty one.
    """
    # Parameters and not their data: they know how they are split.
    state = module.state_dict(keep_vars=True)
    mine = {name: (value, value) for name, value in state.items() if not name.endswith(EXTRA_STATE)}
    return _bring_to_first(mine, context)


def gather_whole(
    tensors: Mapping[str, Tensor], module: torch.nn.Module, context: ParallelContext
) -> dict[str, Tensor]:
    """Tensors of all ranks, tensor-parallel shards put together, by their names in the whole model.

    Args:
        tensors: This rank's, by the names that parameters and buffers have in ``module``, and of
            their shapes: weights, gradients, moments.
        module: What the names are of.
        context: The parallel state.

    Returns:
        On global rank 0 all of them, on the host; elsewhere an empty dict.
    """
    # With duplicates, as a state dict has them: a tied weight is there under both its names.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = WholeNames(module)
    mine = {}
    for name, tensor in tensors.items():
        parameter = parameters.get(name, tensor)
        if not is_copy(name, parameter):
            mine[names(name)] = (tensor, parameter)
    return _bring_to_first(mine, context)


def _bring_to_first(
    mine: Mapping[str, tuple[Tensor, Tensor]], context: ParallelContext
) -> dict[str, Tensor]:
    """What the ranks hold between them, on global rank 0; each tensor is sent once, by its owner.

    The owner is the first rank that has it. ``mine`` has, by name in the whole model, a
    tensor and the parameter that it is split like.
    """
    facts = {
        name: (whole_shape(like, context), tensor.dtype) for name, (tensor, like) in mine.items()
    }
    of_ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, facts, group=context.host_group)
    # Backwards, so that the first rank is the one that stays.
    owners = {name: rank for rank in reversed(range(len(of_ranks))) for name in of_ranks[rank]}
    rank, tp_size = dist.get_rank(), context.sizes.tensor_model_parallel_size
    whole = {}
    # Sorted: all ranks go through the sends and receives in one order. One tensor after the other,
    # and on the hosts of owners alone: whole ones together may not fit on a device or elsewhere.
    for name, owner in sorted(owners.items()):
        # Its tensor-parallel ranks, innermost in the order of ranks, put it together; those that
        # have it, since expert parallelism spans them too.
        if name in mine and rank // tp_size == owner // tp_size:
            tensor = merge_over_tp(*mine[name], context).detach()
        if rank == owner == 0:
            # On the CPU it is the live weight itself, which trains on while a file is written.
            whole[name] = tensor.cpu().clone() if tensor.device.type == "cpu" else tensor.cpu()
        elif rank == 0:
            shape, dtype = of_ranks[owner][name]
            whole[name] = torch.empty(shape, dtype=dtype)
            dist.recv(whole[name], src=owner, group=context.host_group)
        elif rank == owner:
            # gloo refuses tensors that are not contiguous.
            dist.send(tensor.cpu().contiguous(), dst=0, group=context.host_group)
    return whole


def load_full_model_state(
    module: torch.nn.Module,
    state: Mapping[str, Tensor],
    context: ParallelContext,
    *,
    strict: bool = True,
) -> None:
    """Loads this rank's part of a whole state dict.

    Args:
        module: The model, or a module that has it.
        state: By names in the whole model, on every rank; or on rank 0 alone, which hands it out.
        context: The parallel state.
        strict: Whether all that the model has must be there, and nothing else.

    Raises:
        RuntimeError: Keys or shapes differ (torch's own error), on this rank.
        ValueError: They do on another.
    """
    mine = module.state_dict(keep_vars=True)
    has_it = [False] * dist.get_world_size()
    dist.all_gather_object(has_it, bool(state), group=context.host_group)
    if has_it[0] and not all(has_it):
        state = _hand_out(state, mine, context)
    error: RuntimeError | None = None
    try:
        local = {name: state[name] for name in state.keys() - mine.keys()}
        for name in mine.keys() & state.keys():
            wanted = whole_shape(mine[name], context)
            if state[name].shape != wanted:
                raise RuntimeError(
                    f"size mismatch for {name}: the weights have {list(state[name].shape)}, the "
                    f"model has {list(wanted)}."
                )
            local[name] = split_for_tp(state[name], mine[name], context)
        module.load_state_dict(local, strict=strict)
    except RuntimeError as refused:
        # Kept till all ranks have met: another's part may be right.
        error = refused
    raise_refusals(error, context.host_group, "could not load the weights")


def load_kept_weights(
    model: torch.nn.Module, kept: WholeModel | None, context: ParallelContext
) -> bool:
    """Loads the weights that wait for a run, of every rank or of rank 0 alone; a collective.

    Returns:
        Whether there were any.
    """
    has_any = [False] * dist.get_world_size()
    dist.all_gather_object(has_any, kept is not None, group=context.host_group)
    if any(has_any):
        load_full_model_state(model, {} if kept is None else kept.state_dict(), context)
    return any(has_any)


def _hand_out(
    state: Mapping[str, Tensor], mine: Mapping[str, Tensor], context: ParallelContext
) -> dict[str, Tensor]:
    """Rank 0's tensors, one after the other; what no rank has a place for goes to all."""
    facts = [{name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}]
    dist.broadcast_object_list(facts, src=0, group=context.host_group)
    of_all_ranks = _union(set(mine), context)
    kept = {}
    for name, (shape, dtype) in facts[0].items():
        tensor = state[name] if dist.get_rank() == 0 else torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor.contiguous(), src=0, group=context.host_group)
        if name in mine or name not in of_all_ranks:
            kept[name] = tensor
    return kept


def full_optimizer_state(
    optimizer: MegatronOptimizer, module: torch.nn.Module, context: ParallelContext
) -> dict[str, Any]:
    """The optimizer's states, put together from the shards of all ranks, on the host.

    Returns:
        On global rank 0 a dict of the groups' settings, the step, and for each parameter's name in
        the whole model its float32 master weight (``param``) and moments; elsewhere an empty dict.
    """
    shards = list(shards_of(optimizer, module))
    # A rank without a part of some parameter still takes part in each of the collectives below.
    keys = _union({key for *_, shard in shards if shard for key in shard.tensors}, context)
    steps = [shard.step for *_, shard in shards if shard is not None]
    steps += [int(group.get("step") or 0) for group in optimizer.param_groups]
    # The most: a rank that holds no part of any parameter has counted nothing.
    step = torch.tensor(max(steps, default=0), device=context.device)
    # Over the world, whose group may be NCCL's: that is why it is on the device.
    dist.all_reduce(step, op=dist.ReduceOp.MAX)
    states: dict[str, dict[str, Tensor]] = {}
    # Sorted: a set has another order in each process, and each key is collectives.
    for key in sorted(keys):
        mine = {}
        for name, parameter, shard in shards:
            part = None if shard is None else shard.tensors.get(key)
            if (whole := gather_over_pool(part, parameter, shard, context)) is not None:
                mine[name] = whole
        for name, tensor in gather_whole(mine, module, context).items():
            states.setdefault(name, {})[key] = tensor
    if dist.get_rank() != 0:
        return {}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"format": _FORMAT, "step": int(step), "param_groups": groups, "state": states}


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
    error: ValueError | None = None
    expected = _whole_shapes(module, context)
    try:
        _check_state(expected, state)
    except ValueError as refused:
        error = refused
    raise_refusals(error, context.host_group, "could not load the optimizer's state")
    # Which groups a rank has depends on its layers and experts.
    of_kind = {_kind_of(group): group for group in reversed(state["param_groups"])}
    for group in optimizer.param_groups:
        # A kind that the saving ranks had none of keeps the settings of this run.
        group.update(of_kind.get(_kind_of(group), {}))
    names = WholeNames(module)
    for name, parameter, shard in shards_of(optimizer, module):
        if shard is None:
            continue
        whole = state["state"][names(name, parameter)]
        shard.load({key: split_for_tp(whole[key], parameter, context) for key in whole})
        shard.set_step(state["step"])


def _kind_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in ("wd_mult", "lr_mult", "is_expert_parallel"))


def _whole_shapes(module: torch.nn.Module, context: ParallelContext) -> dict[str, torch.Size]:
    """The shape of every trained weight of the whole model; a collective."""
    names = WholeNames(module)
    mine = {
        names(name): whole_shape(parameter, context)
        for name, parameter in module.named_parameters()
        if hasattr(parameter, "main_grad") and not is_copy(name, parameter)
    }
    return dict(_union(set(mine.items()), context))


def _check_state(expected: Mapping[str, torch.Size], state: Mapping[str, Any]) -> None:
    if state.get("format") != _FORMAT:
        raise ValueError(
            "The checkpoint's optimizer state was not written by DynamicCPStrategy (found format "
            f"{state.get('format')!r}, expected {_FORMAT!r}). Start from its weights alone: "
            "DynamicCPModule(weights=...) without ckpt_path."
        )
    states = state.get("state", {})
    if expected.keys() != states.keys():
        missing, extra = expected.keys() - states.keys(), states.keys() - expected.keys()
        raise ValueError(
            "The checkpoint's optimizer state is of another model: it lacks "
            f"{sorted(missing)[:3] or 'nothing'} and has {sorted(extra)[:3] or 'nothing'} more."
        )
    keys = set().union(*states.values())
    for name, tensors in states.items():
        if tensors.keys() != keys:
            raise ValueError(
                f"The checkpoint's optimizer state is damaged: {name} has {sorted(tensors)}, "
                f"others have {sorted(keys)}."
            )
        for key, tensor in tensors.items():
            if tensor.shape != expected[name]:
                raise ValueError(
                    f"The checkpoint's optimizer state does not fit: '{key}' of {name} has shape "
                    f"{list(tensor.shape)}, the model's weight {list(expected[name])}."
                )


def _union(mine: set[Any], context: ParallelContext) -> set[Any]:
    """What any rank has; a collective."""
    of_ranks: list[set[Any]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, mine, group=context.host_group)
    return set().union(*of_ranks)


def gather_over_pool(
    mine: Tensor | None, parameter: Tensor, shard: Shard | None, context: ParallelContext
) -> Tensor | None:
    """A state of this rank's whole parameter, from the ranks that share it; None if none has it.

    Args:
        mine: The state of this rank's ``shard``; None without one.
        parameter: What it is a state of.
        shard: This rank's part of the parameter.
        context: The parallel state.
    """
    # Zeros but for this rank's part: a sum joins parts of any length, wherever they lie.
    partial = torch.zeros(parameter.numel() + 1, dtype=torch.float32, device=parameter.device)
    if mine is not None and shard is not None:
        partial[shard.first : shard.first + mine.numel()] = mine.detach().flatten()
        partial[-1] = 1  # somebody has it: a state of zeros is one, too
    # Experts have replicas of their own, which Megatron-Core marks.
    is_expert = not getattr(parameter, "allreduce", True)
    groups = context.pg_collection
    if shard is None or shard.is_partial:
        dist.all_reduce(partial, group=groups.expt_dp if is_expert else groups.dp_cp)
    return partial[:-1].view_as(parameter) if partial[-1] else None


WHOLE = CheckpointFormat(
    model_state=full_model_state,
    load_model_state=load_full_model_state,
    optimizer_state=full_optimizer_state,
    load_optimizer_state=load_full_optimizer_state,
)
"""Every tensor whole, by its name in the whole model, in one file that rank 0 writes."""
