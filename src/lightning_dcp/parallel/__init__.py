"""Ranks, process groups and CPU mode: the only folder that touches Megatron's parallel state."""

from lightning_dcp._megatron import quiet_megatron
from lightning_dcp.config.parallel import ParallelSizes
from lightning_dcp.parallel.context import ParallelContext, parallel_state_of, setup_parallel
from lightning_dcp.parallel.cp_hooks import check_cp_hooks, install_cp_hooks
from lightning_dcp.parallel.cpu_mode import cpu_mode_is_active, disable_cpu_mode, enable_cpu_mode
from lightning_dcp.parallel.faults import PATIENCE, FaultWatch, end_processes, say
from lightning_dcp.parallel.groups import DynamicCPGroups
from lightning_dcp.parallel.packed_params import (
    BatchTotals,
    BoundPackedSeqParams,
    bind_micro_batch,
)

__all__ = [
    "PATIENCE",
    "BatchTotals",
    "BoundPackedSeqParams",
    "DynamicCPGroups",
    "FaultWatch",
    "ParallelContext",
    "ParallelSizes",
    "bind_micro_batch",
    "check_cp_hooks",
    "cpu_mode_is_active",
    "disable_cpu_mode",
    "enable_cpu_mode",
    "end_processes",
    "install_cp_hooks",
    "parallel_state_of",
    "quiet_megatron",
    "say",
    "setup_parallel",
]
