"""Packing: jagged batches to micro-batches, and local rows back. Torch, no Megatron-Core."""

from lightning_dcp.packing.batch import IGNORE_INDEX, ROUTES, GlobalBatch, read_global_batch
from lightning_dcp.packing.jagged import Jagged, is_jagged, read_jagged
from lightning_dcp.packing.layout import PackLayout
from lightning_dcp.packing.micro_batch import (
    Ahead,
    MicroBatch,
    PackedSequences,
    pack_micro_batch,
)
from lightning_dcp.packing.unpack import UnpackedSamples, to_jagged, unpack_rows

__all__ = [
    "IGNORE_INDEX",
    "ROUTES",
    "Ahead",
    "GlobalBatch",
    "Jagged",
    "MicroBatch",
    "PackLayout",
    "PackedSequences",
    "UnpackedSamples",
    "is_jagged",
    "pack_micro_batch",
    "read_global_batch",
    "read_jagged",
    "to_jagged",
    "unpack_rows",
]
