"""This rank's parts of Megatron-Core's optimizer states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from lightning_dcp.engine.optimizer import MegatronOptimizer


class Shard:
    """This rank's part of one parameter's master weight and moments.

    Attributes:
        main: The float32 weight that the optimizer updates: flat where states are sharded.
        first: Where ``main`` starts in the flattened parameter.
        is_partial: Whether other DPxCP ranks hold other parts.
    """

    def __init__(self, owner: Any, parameter: Tensor, main: Tensor) -> None:
        self.main = main
        self._inner = owner.optimizer
        self.is_partial = isinstance(owner, DistributedOptimizer)
        # Megatron-Core cuts its flat buffer, so that a part starts anywhere in a parameter.
        self.first = (
            owner._get_model_param_range_map(parameter)["param"].start if self.is_partial else 0
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The master weight as ``param``, and the moments."""
        moments = self._inner.state.get(self.main, {})
        return {"param": self.main} | {
            key: value
            for key, value in moments.items()
            # Torch's Adam keeps its step as a tensor among them.
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

    def part_of(self, tensor: Tensor) -> Tensor:
        """This shard's part of a tensor of the parameter's shape; a view where it can be."""
        part = tensor.flatten()[self.first : self.first + self.main.numel()]
        return part.view_as(self.main).to(self.main.device, self.main.dtype)

    @torch.no_grad()
    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Takes this shard's part of the whole tensors."""
        for key, tensor in whole.items():
            part = self.part_of(tensor)
            if key == "param":
                self.main.copy_(part)
            else:
                # Cloned: a view would keep the whole tensor alive.
                self._inner.state[self.main][key] = part.clone()


def shards_of(
    optimizer: MegatronOptimizer, module: torch.nn.Module
) -> Iterator[tuple[str, Tensor, Shard | None]]:
    """Every trained parameter by name; None where this rank holds no part of it."""
    for name, parameter in module.named_parameters():
        # Frozen for a time it has its states still.
        if not hasattr(parameter, "main_grad"):
            continue
        found = optimizer.master_of(parameter)
        yield name, parameter, None if found is None else Shard(found[0], parameter, found[1])
