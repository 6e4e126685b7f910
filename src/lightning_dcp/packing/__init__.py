"""Packing: jagged batches to micro-batches, and local rows back. Torch, no Megatron-Core."""

from lightning_dcp.packing.batch import IGNORE_INDEX as IGNORE_INDEX
from lightning_dcp.packing.batch import GlobalBatch as GlobalBatch
from lightning_dcp.packing.batch import read_global_batch as read_global_batch
from lightning_dcp.packing.jagged import Jagged as Jagged
from lightning_dcp.packing.jagged import is_jagged as is_jagged
from lightning_dcp.packing.jagged import read_jagged as read_jagged
from lightning_dcp.packing.layout import PackLayout as PackLayout
from lightning_dcp.packing.micro_batch import MicroBatch as MicroBatch
from lightning_dcp.packing.micro_batch import MTPTargets as MTPTargets
from lightning_dcp.packing.pack import pack_micro_batch as pack_micro_batch
from lightning_dcp.packing.routes import ROUTES as ROUTES
from lightning_dcp.packing.routes import MicroBatchRoutes as MicroBatchRoutes
from lightning_dcp.packing.routes import RouteShape as RouteShape
from lightning_dcp.packing.routes import check_routes as check_routes
from lightning_dcp.packing.unpack import UnpackedSamples as UnpackedSamples
from lightning_dcp.packing.unpack import to_jagged as to_jagged
from lightning_dcp.packing.unpack import unpack_rows as unpack_rows
