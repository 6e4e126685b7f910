"""A running average of the weights, in float32 and sharded as the optimizer's states are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.engine.checkpoint.shards import shards_of
from lightning_dcp.engine.checkpoint.whole import gather_over_pool, gather_whole
from lightning_dcp.engine.optimizer import MegatronOptimizer
from lightning_dcp.model.global_names import WholeNames, split_for_tp
from lightning_dcp.parallel import ParallelContext


class AveragedWeights:
    """Averages of the optimizer's master weights, each rank's part of them, and of buffers.

    Of masters and not of the model's weights: a step of an average is less than bfloat16 resolves.

    Args:
        optimizer: Whose weights.
        module: That has them.
        context: The parallel state.
        device: Where the averages are; None for where the weights are.
        use_buffers: Whether buffers of floats that a state dict has are averaged too.
        avg_fn: Gives the new average, of (average, weight, averaged so far); elementwise.
        multi_avg_fn: The same for lists, in place.

    Attributes:
        num_averaged: Updates so far. Before the first there is no average.
        in_use: Whether the model has the averages now, and this object the weights.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        module: torch.nn.Module,
        context: ParallelContext,
        *,
        device: torch.device | int | None = None,
        use_buffers: bool = True,
        avg_fn: Callable[..., Tensor] | None = None,
        multi_avg_fn: Callable[..., None] | None = None,
    ) -> None:
        self._optimizer, self._module, self._context = optimizer, module, context
        self._device, self._use_buffers = device, use_buffers
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._averages: dict[str, Tensor] = {}
        self.num_averaged = 0
        self.in_use = False

    def _buffers(self) -> dict[str, Tensor]:
        if not self._use_buffers:
            return {}
        # Not by a state dict, which has the names of the whole model: a stage's are others.
        return {
            f"{path}.{name}" if path else name: buffer
            for path, part in self._module.named_modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
            and buffer.is_floating_point()
            and name not in part._non_persistent_buffers_set
        }

    def _weights(self) -> dict[str, Tensor]:
        """This rank's part of what is averaged, by local name: the very tensors."""
        shards = shards_of(self._optimizer, self._module)
        masters = {name: shard.main for name, _, shard in shards if shard is not None}
        return masters | self._buffers()

    @torch.no_grad()
    def update_parameters(self, module: torch.nn.Module) -> None:
        """Takes the weights of now into the average; the first time they are the average."""
        weights = {name: weight.detach() for name, weight in self._weights().items()}
        moved = {name: weight.to(self._device or weight.device) for name, weight in weights.items()}
        if not self.num_averaged:
            self._averages = {name: weight.clone() for name, weight in moved.items()}
        elif self._multi_avg_fn is not None:
            averages = [self._averages[name] for name in moved]
            self._multi_avg_fn(averages, list(moved.values()), torch.tensor(self.num_averaged))
        else:
            for name, weight in moved.items():
                average = self._averages[name]
                average.copy_(
                    average + (weight - average) / (self.num_averaged + 1)
                    if self._avg_fn is None
                    else self._avg_fn(average, weight, torch.tensor(self.num_averaged))
                )
        self.num_averaged += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Gives the model the averages, or its weights back, without a loss; a collective."""
        for name, weight in self._weights().items():
            kept = weight.clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(kept)
        self._optimizer.push_weights()
        self.in_use = not self.in_use

    def whole(self) -> dict[str, Tensor]:
        """The averages whole, by their names in the whole model, on global rank 0; a collective."""
        mine = {name: self._averages[name] for name in self._buffers()}
        for name, parameter, shard in shards_of(self._optimizer, self._module):
            average = None if shard is None else self._averages[name].to(parameter.device)
            whole = gather_over_pool(average, parameter, shard, self._context)
            if whole is not None:
                mine[name] = whole
        return gather_whole(mine, self._module, self._context)

    def load(self, whole: Mapping[str, Any], num_averaged: int) -> None:
        """Takes this rank's part of what :meth:`whole` gave, in any layout of ranks."""
        names = WholeNames(self._module)
        for name, buffer in self._buffers().items():
            self._averages[name] = whole[names(name)].to(self._device or buffer.device).clone()
        for name, parameter, shard in shards_of(self._optimizer, self._module):
            if shard is not None:
                own = split_for_tp(whole[names(name, parameter)], parameter, self._context)
                part = shard.part_of(own).clone()
                self._averages[name] = part.to(self._device or part.device)
        self.num_averaged = num_averaged
