"""Packing: jagged batches to micro-batches, and local rows back. Torch, no Megatron-Core."""

from lightning_dcp.packing.batch import IGNORE_INDEX, GlobalBatch, read_global_batch
from lightning_dcp.packing.jagged import Jagged, is_jagged, read_jagged
from lightning_dcp.packing.layout import PackLayout
from lightning_dcp.packing.micro_batch import MicroBatch, MTPTargets
from lightning_dcp.packing.pack import pack_micro_batch
from lightning_dcp.packing.routes import ROUTES, MicroBatchRoutes, RouteShape, check_routes
from lightning_dcp.packing.unpack import UnpackedSamples, to_jagged, unpack_rows

__all__ = [
    "IGNORE_INDEX",
    "ROUTES",
    "GlobalBatch",
    "Jagged",
    "MTPTargets",
    "MicroBatch",
    "MicroBatchRoutes",
    "PackLayout",
    "RouteShape",
    "UnpackedSamples",
    "check_routes",
    "is_jagged",
    "pack_micro_batch",
    "read_global_batch",
    "read_jagged",
    "to_jagged",
    "unpack_rows",
]
