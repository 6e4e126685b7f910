"""Router replay: experts that were chosen before, in place of the router's own choice.

R2 replays what a log-probability pass of the same weights chose, R3 what the engine chose that
sampled the tokens. Either way a token's gradient goes through the experts that made its old
log-probability, so that the ratio of the two is not noise of a router that changed its mind.
The names are those of verl's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self, override

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from lightning_dcp.packing import MicroBatchRoutes, RouteShape
from lightning_dcp.parallel import ParallelContext, ParallelSizes


class PackedRouterReplay(RouterReplay):
    """Megatron-Core's replay of one router, where only some rows have a route to replay.

    Attributes:
        has_route: ``[rows]`` bool: rows whose ``target_topk_idx`` counts; None without any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_route: Tensor | None = None

    @classmethod
    def in_place_of(cls, replay: RouterReplay) -> Self:
        """A router's own in place of Megatron-Core's; both leave the list of the process."""
        # Megatron-Core keeps the replay objects of all routers ever made in that list, and sets
        # their targets by position in it: after a second model was built they are those of the
        # first, which the list keeps alive. Ours leaves with its router, and takes routes from the
        # micro-batch at hand.
        own = cls()
        for listed in (replay, own):
            RouterReplay.global_router_replay_instances.remove(listed)
        return own

    def replay(self, target: Tensor, has_route: Tensor) -> None:
        """Sets the experts ``[rows, top-k]`` of the next forward pass, for some ``[rows]``."""
        # int64: `gather` takes none of the small types that routes are stored in.
        self.target_topk_idx, self.has_route = target.long(), has_route

    @override
    def clear_indices(self) -> None:
        super().clear_indices()
        self.has_route = None

    @override
    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts of each row, ``[rows, top-k]``: replayed ones where there are any."""
        assert default_compute_topk is not None
        # The router's own choice is needed in any case: for rows without a route.
        values, experts = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.target_topk_idx is not None and self.has_route is not None:
            experts = torch.where(self.has_route[:, None], self.target_topk_idx, experts)
            # By score, as the router itself orders them: sums then round alike.
            values, order = scores.gather(1, experts).topk(topk, dim=1)
            experts = experts.gather(1, order)
        self.record_indices(experts)
        return values, experts


def moe_layer_index(config: Any, layer_number: int) -> int:
    """Which of the model's MoE layers layer ``layer_number`` (from 1) is, from 0, of all stages."""
    # As Megatron-Core's `get_gpt_decoder_block_spec` reads the option.
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return sum(layer % frequency == 0 for layer in range(layer_number - 1))
    return sum(map(bool, frequency[: layer_number - 1]))


def check_routers(
    chunks: Iterable[torch.nn.Module], shape: RouteShape | None, sizes: ParallelSizes
) -> None:
    """Refuses a model of which some layer would not replay: its own choice would go unnoticed.

    Raises:
        ValueError: Fewer routers that replay than MoE layers in this rank's chunks, or more.
    """
    if shape is None:
        return
    found = sum(
        isinstance(router, TopKRouter)
        and isinstance(router.router_replay, PackedRouterReplay)
        and not router.is_mtp_layer
        for chunk in chunks
        for router in chunk.modules()
    )
    expected = _layers_of_stage(shape, sizes)
    if found != expected:
        raise ValueError(
            f"moe.router_replay=True: the model has {found} routers that replay on this rank, and "
            f"{expected} of its {shape.num_layers} MoE layers are there. Build it with "
            "build_gpt_model, or give each layer a PackedTopKRouter."
        )


def gather_recorded(
    routes: MicroBatchRoutes, num_rows: int, shape: RouteShape, context: ParallelContext
) -> Tensor:
    """The experts that all layers used for a micro-batch's rows; a collective of its TP and PP.

    Returns:
        ``[num_rows, layers, bytes]`` uint8 of this CP rank's rows, of which
        ``RouteShape.from_bytes`` makes experts. Bytes, since not every backend sends int16.

    Raises:
        RuntimeError: Routers recorded nothing: they are not those that ``build_gpt_model`` makes.
    """
    sizes = context.sizes
    assert routes.recorded is not None
    expected = _layers_of_stage(shape, sizes)
    if len(routes.recorded) != expected:
        raise RuntimeError(
            f"{len(routes.recorded)} routers recorded routes, and {expected} of the model's "
            f"{shape.num_layers} MoE layers are on this rank. Build the model with "
            "MoEConfig(router_replay=True) and call install_cp_hooks on it."
        )
    # Without sequence parallelism all tensor-parallel ranks route all rows, alike.
    tp_size = sizes.tensor_model_parallel_size if sizes.sequence_parallel else 1
    own = torch.zeros(
        num_rows // tp_size, shape.num_layers, shape.topk, dtype=shape.dtype, device=context.device
    )
    for layer, experts in routes.recorded.items():
        own[:, layer] = experts
    # First over TP, then over the pipeline: every rank of both groups comes by here alike.
    as_bytes = own.view(torch.uint8)
    if tp_size > 1:
        parts = [torch.empty_like(as_bytes) for _ in range(tp_size)]
        dist.all_gather(parts, as_bytes, group=context.pg_collection.tp)
        as_bytes = torch.cat(parts)
    if sizes.pipeline_model_parallel_size > 1:
        # Of each layer all stages but one have zeros.
        dist.all_reduce(as_bytes, group=context.pg_collection.pp)
    return as_bytes


def _layers_of_stage(shape: RouteShape, sizes: ParallelSizes) -> int:
    return shape.num_layers // sizes.pipeline_model_parallel_size
