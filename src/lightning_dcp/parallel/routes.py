"""The routes of a running micro-batch, between the engine and the routers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class BoundRoutes:
    """What the routers take from a micro-batch and leave with it.

    They hang on the micro-batch and not on the routers: whatever runs in between, in a pipeline or
    while layers are recomputed, a router sees those of the micro-batch that it is working on.

    Attributes:
        given: ``[rows, MoE layers of the whole model, top-k]``: experts that were chosen before;
            None where every router chooses.
        has_route: ``[rows]`` bool: rows that ``given`` says something about; in others routers
            choose.
        recorded: Where routers put the experts that they used, by MoE layer, ``[rows that this rank
            routes, top-k]``; None where nothing is recorded.
        dtype: Of what is recorded.
    """

    given: Tensor | None = None
    has_route: Tensor | None = None
    recorded: dict[int, Tensor] | None = None
    dtype: torch.dtype = torch.int16
