"""Routes of a global batch to the routers of each micro-batch, and recorded ones back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.model import ROUTES, RouteShape
from lightning_dcp.packing import GlobalBatch, Jagged, MicroBatch
from lightning_dcp.parallel import BoundRoutes, ParallelContext

RecordedRoutes = list[tuple[BoundRoutes, int]]
"""Of each micro-batch that counts, in order, what routers leave and its rows on this CP rank."""


def routes_of(
    micro_batch: MicroBatch, batch: GlobalBatch, shape: RouteShape | None, *, record: bool = False
) -> BoundRoutes:
    """What the routers replay and record of a micro-batch.

    Rows without a route are padding, and the last token of a sample whose routes end before it.

    Args:
        micro_batch: Packed, on its device.
        batch: The global batch that it is of.
        shape: What the model's routes look like; None if it neither replays nor records.
        record: Whether routers leave the experts that they use.
    """
    if shape is None:
        return BoundRoutes()
    routes = BoundRoutes(recorded={} if record else None, dtype=shape.dtype)
    stored = batch.extras.get(ROUTES)
    if isinstance(stored, Jagged):
        layout = micro_batch.layout
        num_routes = stored.lengths[list(micro_batch.sample_ids)][layout.sequence_of_row]
        routes.given = micro_batch.extras[ROUTES]
        routes.has_route = torch.from_numpy(layout.positions < num_routes).to(
            routes.given.device, non_blocking=True
        )
    return routes


def recorded_routes(
    routes: BoundRoutes, num_rows: int, shape: RouteShape, context: ParallelContext
) -> Tensor:
    """The experts that all layers used for a micro-batch's rows; a collective of its TP and PP.

    Args:
        routes: What the routers of this rank recorded.
        num_rows: Rows of this CP rank.
        shape: What the model's routes look like.
        context: The parallel state.

    Returns:
        ``[rows, layers, bytes]`` uint8: ``as_routes`` makes experts of it. Bytes, since not every
        backend sends int16.

    Raises:
        RuntimeError: Routers recorded nothing: they are not those that ``build_gpt_model`` makes.
    """
    sizes = context.sizes
    assert routes.recorded is not None
    expected = shape.num_layers // sizes.pipeline_model_parallel_size
    if len(routes.recorded) != expected:
        raise RuntimeError(
            f"{len(routes.recorded)} routers recorded routes, and {expected} of the model's "
            f"{shape.num_layers} MoE layers are on this rank. Build the model with "
            "MoEConfig(router_replay=True) and call install_cp_hooks on it."
        )
    tp_size = sizes.tensor_model_parallel_size if sizes.sequence_parallel else 1
    num_own = num_rows // tp_size
    own = torch.zeros(
        num_own, shape.num_layers, shape.topk, dtype=shape.dtype, device=context.device
    )
    for layer, experts in routes.recorded.items():
        own[:, layer] = experts
    as_bytes = own.view(torch.uint8)
    if tp_size > 1:
        parts = [torch.empty_like(as_bytes) for _ in range(tp_size)]
        dist.all_gather(parts, as_bytes, group=context.pg_collection.tp)
        as_bytes = torch.cat(parts)
    if sizes.pipeline_model_parallel_size > 1:
        # Of each layer all stages but one have zeros.
        dist.all_reduce(as_bytes, group=context.pg_collection.pp)
    return as_bytes


def as_routes(collected: Any, shape: RouteShape) -> Tensor:
    """Jagged ``[num_samples, length*, layers, top-k]`` experts of jagged bytes."""
    routes: Tensor = torch.nested.nested_tensor_from_jagged(
        collected.values().view(shape.dtype), offsets=collected.offsets()
    )
    return routes
