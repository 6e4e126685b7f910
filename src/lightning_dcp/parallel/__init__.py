"""Ranks, process groups and CPU mode: the only folder that touches Megatron's parallel state."""

from lightning_dcp._megatron import quiet_megatron
from lightning_dcp.config.parallel import ParallelSizes
from lightning_dcp.parallel.context import ParallelContext, setup_parallel
from lightning_dcp.parallel.cpu_mode import cpu_mode_is_active, disable_cpu_mode, enable_cpu_mode
from lightning_dcp.parallel.groups import DynamicCPGroups, cp_sizes_of_pool
from lightning_dcp.parallel.packed_params import (
    BatchTotals,
    BoundSequences,
    bind_micro_batch,
    install_cp_hooks,
)
from lightning_dcp.parallel.routes import BoundRoutes

__all__ = [
    "BatchTotals",
    "BoundRoutes",
    "BoundSequences",
    "DynamicCPGroups",
    "ParallelContext",
    "ParallelSizes",
    "bind_micro_batch",
    "cp_sizes_of_pool",
    "cpu_mode_is_active",
    "disable_cpu_mode",
    "enable_cpu_mode",
    "install_cp_hooks",
    "quiet_megatron",
    "setup_parallel",
]
