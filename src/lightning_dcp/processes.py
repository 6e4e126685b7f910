"""What Lightning asks of any strategy with several processes: ranks, launchers, collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, override

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor


class ProcessStrategy(ParallelStrategy):
    """Processes on one device each that share one process group.

    Args:
        timeout: Of the process groups.
        process_group_backend: ``nccl`` or ``gloo``; by the device when None.
        start_method: How the processes of a machine are started.
        options: Lightning's own arguments of a strategy.
    """

    # Lightning looks for this flag on strategies that it does not know: without it, samplers and
    # `self.log(sync_dist=True)` would act as if there were one process.
    is_distributed = True

    def __init__(
        self,
        *,
        timeout: timedelta | None,
        process_group_backend: Literal["nccl", "gloo"] | None,
        start_method: Literal["popen", "fork", "spawn"],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_nodes = 1
        self._timeout = timeout
        self._process_group_backend = process_group_backend
        self._start_method = start_method

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    def set_world_ranks(self) -> None:
        """Tells the environment and Lightning's rank-zero helpers who this process is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for helper in (rank_zero_only, utils_rank_zero_only):
            setattr(helper, "rank", self.global_rank)  # noqa: B010  (mypy sees functions)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            # It starts nothing where torchrun or a scheduler did, but checks what they started.
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        reset_seed()
        device = self.root_device
        assert self.cluster_environment is not None
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend or _get_default_process_group_backend_for_device(device),
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )

    @override
    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        on_gpu = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[self.root_device.index] if on_gpu else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    @override
    def teardown(self) -> None:
        # Not ParallelStrategy's, which moves the model and the optimizer to the CPU: Megatron-Core
        # has laid weights and gradients out in buffers of its own.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
