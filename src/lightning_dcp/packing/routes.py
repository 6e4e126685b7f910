"""Router replay's data: which experts each layer sent each token to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lightning_dcp.config.model import ModelConfig
from lightning_dcp.packing.batch import GlobalBatch
from lightning_dcp.packing.jagged import Jagged
from lightning_dcp.packing.micro_batch import MicroBatch

ROUTES = "routed_experts"
"""Key of the batch and of predictions: jagged ``[num_samples, length*, MoE layers, top-k]``."""

_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class RouteShape:
    """What the routes of a model look like.

    Attributes:
        num_layers: MoE layers of the whole model.
        topk: Experts that a layer sends a token to.
        num_experts: Ids are below it.
    """

    num_layers: int
    topk: int
    num_experts: int

    @classmethod
    def of(cls, config: ModelConfig) -> Self | None:
        """Of a model whose routers replay; None of any other."""
        if config.moe is None or not config.moe.router_replay:
            return None
        return cls(config.num_layers, config.moe.topk, config.moe.num_experts)

    @property
    def dtype(self) -> torch.dtype:
        """What an expert is stored in: uint8, or int16 where there are more than 256."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def from_bytes(self, collected: Any) -> Tensor:
        """Jagged ``[num_samples, length*, layers, top-k]`` experts of jagged bytes."""
        experts: Tensor = torch.nested.nested_tensor_from_jagged(
            collected.values().view(self.dtype), offsets=collected.offsets()
        )
        return experts


@dataclass
class MicroBatchRoutes:
    """What the routers take from a micro-batch and leave with it.

    Attributes:
        replayed: ``[rows, MoE layers of the whole model, top-k]``: experts that were chosen before;
            None where every router chooses.
        has_route: ``[rows]`` bool: rows that ``replayed`` says something about; in others routers
            choose.
        recorded: Where routers put the experts that they used, by MoE layer, ``[rows that this rank
            routes, top-k]``; None where nothing is recorded.
        dtype: Of what is recorded.
    """

    # Here and not on the routers: whatever runs in between, in a pipeline or while layers are
    # recomputed, a router sees that of the micro-batch that it is working on.
    replayed: Tensor | None = None
    has_route: Tensor | None = None
    recorded: dict[int, Tensor] | None = None
    dtype: torch.dtype = torch.int16

    @classmethod
    def of(
        cls,
        micro_batch: MicroBatch,
        batch: GlobalBatch,
        shape: RouteShape | None,
        *,
        record: bool = False,
    ) -> Self:
        """Those of a micro-batch of ``batch`` on its device; none for a model without replay.

        Rows without a route are padding, and the last token of a sample whose routes end before it.
        """
        if shape is None:
            return cls()
        routes = cls(recorded={} if record else None, dtype=shape.dtype)
        stored = batch.extras.get(ROUTES)
        if isinstance(stored, Jagged):
            layout = micro_batch.layout
            num_routes = stored.lengths[list(micro_batch.sample_ids)][layout.sequence_of_row]
            # Padding lies past the end of its sequence, and so past its routes.
            routes.replayed = micro_batch.extras[ROUTES]
            routes.has_route = torch.from_numpy(layout.positions < num_routes).to(
                routes.replayed.device, non_blocking=True
            )
        return routes


def check_routes(
    batch: GlobalBatch, shape: RouteShape | None, *, part: tuple[int, int] = (0, 1)
) -> None:
    """Refuses routes that a model cannot replay; a batch without any passes.

    Repeated experts are looked for in one ``part`` ``(index, number)`` of so many of the batch,
    which ranks that hold the same batch share among them.

    Raises:
        ValueError: Routes for a model that replays none, or with other layers, another top-k,
            experts that there are not, or one expert twice for a token; it names the sample.
        TypeError: Not a jagged tensor of integers.
    """
    routes = batch.extras.get(ROUTES)
    if routes is None:
        return
    if shape is None:
        raise ValueError(
            f"The batch has '{ROUTES}' and the model replays no routes. Set router_replay=True in "
            "ModelConfig(moe=MoEConfig(...)); a dense model (moe=None) has no routers, so leave "
            "the key out of its batches. DynamicCPModule(replay_routes=False) ignores it."
        )
    if not isinstance(routes, Jagged):
        raise TypeError(
            f"'{ROUTES}' must be a jagged NestedTensor [num_samples, length*, layers, top-k], "
            f"found a dense one of shape {list(routes.shape)}."
        )
    if routes.values.dtype not in _DTYPES:
        raise TypeError(
            f"'{ROUTES}' must hold integers, found {routes.values.dtype}. {shape.dtype} is the "
            f"smallest type for {shape.num_experts} experts."
        )
    if list(routes.values.shape[1:]) != [shape.num_layers, shape.topk]:
        raise ValueError(
            f"'{ROUTES}' of sample 0 has {list(routes.values.shape[1:])} values a token; the model "
            f"has {shape.num_layers} MoE layers and moe.topk={shape.topk}: "
            f"[{shape.num_layers}, {shape.topk}]. They must come from the same model."
        )
    # On a device the check would wait for it at every step.
    if routes.values.device.type == "cpu" and routes.values.numel():
        _check_experts(routes, shape, part)


def _check_experts(routes: Jagged, shape: RouteShape, part: tuple[int, int]) -> None:
    values = routes.values
    low, high = (int(bound) for bound in torch.aminmax(values))
    if low < 0 or high >= shape.num_experts:
        # int32: a small type wraps the number that it is compared with, 256 to 0.
        experts = values.int()
        _refuse(
            routes,
            (experts < 0) | (experts >= shape.num_experts),
            "an expert that there is not",
            f"moe.num_experts={shape.num_experts} have ids 0 to {shape.num_experts - 1}",
        )
    # The ranks hold the same batch: each looks at a part, and an error on one is one on all.
    index, number = part
    size = -(-len(values) // number)
    first = index * size
    mine = values[first : first + size]
    repeated = torch.zeros(mine.shape[:-1], dtype=torch.bool)
    # Every pair of a token's experts: top-k is small.
    for one in range(1, shape.topk):
        for other in range(one):
            repeated |= mine[..., one] == mine[..., other]
    if repeated.any():
        every = torch.zeros(values.shape[:-1], dtype=torch.bool)
        every[first : first + size] = repeated
        _refuse(routes, every[..., None], "one expert twice", "a token goes to different ones")


def _refuse(routes: Jagged, bad: Tensor, what: str, why: str) -> None:
    found = routes.first_where(bad)
    if found is not None:
        sample, token = found
        row = int(routes.starts[sample]) + token
        layer = int(bad[row].any(-1).nonzero()[0, 0])
        raise ValueError(
            f"'{ROUTES}' of sample {sample} names {what} at token {token}, MoE layer {layer}: "
            f"{routes.values[row, layer].tolist()}; {why}."
        )
