"""Sets up Megatron-Core's parallel state and the dynamic CP groups, and tears them down."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch._C._distributed_c10d import HashStore

from lightning_dcp.config.parallel import ParallelSizes
from lightning_dcp.parallel.cpu_mode import disable_cpu_mode, enable_cpu_mode
from lightning_dcp.parallel.groups import DynamicCPGroups


@dataclass
class ParallelContext:
    """Everything of a run that knows about ranks: one object, handed down, no global state of ours.

    Attributes:
        sizes: The parallel sizes.
        cp_groups: This rank's CP groups, by size.
        pg_collection: Megatron-Core's process groups; its ``cp`` is the static CP group.
        cpu_mode: Whether Megatron-Core runs on the CPU here.
        host_group: All ranks, as a gloo group: for facts that live on the host, which travel
            without waiting for a device.
        destroyed: Whether it was torn down.
    """

    sizes: ParallelSizes
    cp_groups: DynamicCPGroups
    pg_collection: ProcessGroupCollection
    cpu_mode: bool
    host_group: dist.ProcessGroup
    destroyed: bool = False

    @property
    def pool_rank(self) -> int:
        """This process's index in its DPxCP pool."""
        return self.cp_groups.rank

    @property
    def tp_rank(self) -> int:
        """This process's index in its tensor-parallel group."""
        # They are innermost in Megatron-Core's order. Also when the groups are gone.
        return dist.get_rank() % self.sizes.tensor_model_parallel_size

    @property
    def pp_rank(self) -> int:
        """This process's pipeline stage."""
        return dist.get_rank(self.pg_collection.pp)

    @property
    def is_last_stage(self) -> bool:
        """Whether this process ends the pipeline: it alone knows losses and outputs."""
        return self.pp_rank == self.sizes.pipeline_model_parallel_size - 1

    @property
    def collector(self) -> int:
        """The global rank that collects outputs: the first of the pipeline's last stage."""
        stages = self.sizes.pipeline_model_parallel_size
        # Stages are outermost in Megatron-Core's order of ranks, tp-cp-ep-dp-pp: blocks in a row.
        return self.sizes.world_size // stages * (stages - 1)

    def starts_model(self, virtual_stage: int | None = None) -> bool:
        """Whether this process's chunk has the embedding."""
        return self.pp_rank == 0 and not virtual_stage

    def ends_model(self, virtual_stage: int | None = None) -> bool:
        """Whether this process's chunk has the output layer."""
        last = self.sizes.virtual_pipeline_model_parallel_size - 1
        return self.is_last_stage and virtual_stage in (None, last)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device("cpu") if self.cpu_mode else torch.device(torch.cuda.current_device())

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group of this rank once, though some have several names."""
        named = [self.host_group, *vars(self.pg_collection).values()]
        named += [self.cp_groups[size] for size in self.cp_groups.sizes]
        # One is not in the collection.
        named.append(parallel_state.get_tensor_and_data_parallel_group(check_initialized=False))
        unique = {id(group): group for group in named if isinstance(group, dist.ProcessGroup)}
        return list(unique.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelContext:
        # A process has one parallel state: what is copied runs on the same.
        return self

    def destroy(self) -> None:
        """Tears down the groups, Megatron-Core's parallel state and CPU mode; harmless twice.

        A model built on this context can then no longer run.
        """
        if self.destroyed:
            return
        self.destroyed = True
        try:
            if dist.is_initialized():
                self._destroy_groups()
        finally:
            parallel_state.destroy_model_parallel()
            # It keeps some. Closed at last in a process that is forked from this one, which has
            # none of their threads, they would wait for them for ever.
            for name, value in list(vars(parallel_state).items()):
                if isinstance(value, dist.ProcessGroup):
                    setattr(parallel_state, name, None)
            disable_cpu_mode()
            # A cache over all instances, keyed by CP group: it would keep groups and sockets.
            RotaryEmbedding.forward.cache_clear()
            # Pipelines leave scales of shape [1], which the next run without them cannot use.
            MoEAuxLossAutoScaler.main_loss_backward_scale = None
            MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)

    def _destroy_groups(self) -> None:
        self.cp_groups.destroy()
        # Megatron-Core forgets its groups and leaves them open.
        for group in self.groups:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def setup_parallel(
    sizes: ParallelSizes,
    *,
    current: ParallelContext | None = None,
    timeout: timedelta | None = None,
) -> ParallelContext:
    """Sets up Megatron-Core's parallel state and the dynamic CP groups for ``sizes``.

    The default process group must exist. Where there is no CUDA device, CPU mode is switched on.
    Call ``destroy`` of the context at the end.

    Args:
        sizes: The parallel sizes.
        current: What an earlier call returned: given back as it is when it is still in force and
            has the same sizes, torn down when the sizes differ.
        timeout: Of the process groups.

    Raises:
        RuntimeError: There is no default process group, its size is not the one in ``sizes``, or
            somebody else has initialised Megatron-Core's parallel state.
    """
    if not dist.is_initialized():
        raise RuntimeError("setup_parallel needs torch.distributed.init_process_group first.")
    if dist.get_world_size() != sizes.world_size:
        raise RuntimeError(
            f"The process group has {dist.get_world_size()} ranks, the sizes are for "
            f"{sizes.world_size}."
        )
    if current is not None:
        if current.sizes == sizes and not current.destroyed:
            return current
        current.destroy()
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError(
            "Megatron-Core's parallel state is initialised already, and not by this run. Call "
            "megatron.core.parallel_state.destroy_model_parallel() before."
        )
    cpu_mode = enable_cpu_mode()
    try:
        # `new_group` is a collective of the world: all ranks make all groups in this one order,
        # members or not, and a rank that left one out would wait for ever in the next.
        _initialize_megatron(sizes, timeout)
        pool = dist.get_process_group_ranks(
            parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        groups = DynamicCPGroups.create(pool, timeout=timeout)
        collection = ProcessGroupCollection.use_mpu_process_groups()
        host_group = dist.new_group(backend="gloo", timeout=timeout, group_desc="HOST")
    except BaseException:
        # Interrupts as well: a half set-up would stand in the way of the next one.
        parallel_state.destroy_model_parallel()
        disable_cpu_mode()
        raise
    return ParallelContext(sizes, groups, collection, cpu_mode, host_group)


@contextmanager
def parallel_state_of(
    sizes: ParallelSizes, *, current: ParallelContext | None = None
) -> Iterator[ParallelContext]:
    """A parallel state for a while: what looks at a model, or saves it, between runs needs one.

    Args:
        sizes: The parallel sizes. Without processes that have met, those of this process alone.
        current: Given, and left as it is, when it is in force.

    Raises:
        RuntimeError: As :func:`setup_parallel`.
    """
    if current is not None and not current.destroyed:
        yield current
        return
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    try:
        context = setup_parallel(sizes)
        try:
            yield context
        finally:
            context.destroy()
    finally:
        if is_alone:
            dist.destroy_process_group()
            # A notebook's process, which is forked for the next run: see destroy. A model that was
            # built here has cycles.
            gc.collect()


def _initialize_megatron(sizes: ParallelSizes, timeout: timedelta | None) -> None:
    minutes = {"distributed_timeout_minutes": timeout.total_seconds() / 60} if timeout else {}
    virtual = sizes.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        # Any number, 1 too, asks Megatron-Core for more than one stage.
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        # Experts are whole on a rank: expert parallelism spans the tensor-parallel ranks as well.
        expert_tensor_parallel_size=1,
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        context_parallel_size=sizes.context_parallel_size,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        # It would make gloo twins of its groups; what lives on the host here has `host_group`.
        create_gloo_process_groups=False,
        **minutes,
    )
