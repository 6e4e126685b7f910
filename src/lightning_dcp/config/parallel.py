"""The parallel sizes of a run, checked against each other, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_dcp.config.checks import check_at_least

Execution = Literal["lockstep", "free_running"]
"""Who waits for whom: a step for all of its ranks, or only the members of a group."""


def cp_sizes_of_pool(num_ranks: int) -> tuple[int, ...]:
    """The CP sizes that a pool offers, ascending: powers of two below its size, and its size."""
    # Below num_ranks: a pool that is a power of two comes once.
    powers = [1 << k for k in range((num_ranks - 1).bit_length())]
    return (*powers, num_ranks)


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """The parallel sizes of a run; what cannot work is refused when it is made.

    Attributes:
        world_size: Number of processes of the run.
        tensor_model_parallel_size: Ranks that share each layer's weights (TP).
        pipeline_model_parallel_size: Pipeline stages (PP).
        virtual_pipeline_model_parallel_size: Model chunks that each stage runs in turn (VPP).
        expert_model_parallel_size: Ranks that share the experts (EP), among those of one stage.
        context_parallel_size: CP size of a static run, and Megatron-Core's own CP groups.
        sequence_parallel: Whether TP ranks share the rows between their matrix products as well.

    Raises:
        TypeError: A size that is not an int, or ``sequence_parallel`` that is not a bool.
        ValueError: A size below 1, sizes that do not divide the world size, virtual stages without
            a pipeline, or sequence parallelism without tensor parallelism.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    context_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "sequence_parallel":
                if not isinstance(value, bool):
                    raise TypeError(f"{name} must be True or False, found {value!r}.")
                continue
            check_at_least(name, value)
        self._check_divides()
        if self.virtual_pipeline_model_parallel_size > 1 and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "virtual_pipeline_model_parallel_size="
                f"{self.virtual_pipeline_model_parallel_size} cuts the stages of a pipeline, and "
                "pipeline_model_parallel_size is 1. Raise it, or leave virtual stages out."
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel=True shares rows among tensor-parallel ranks, and "
                "tensor_model_parallel_size is 1. Raise it, or leave sequence_parallel out."
            )

    def _check_divides(self) -> None:
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if self.world_size % (tp * pp):
            raise ValueError(
                f"The world size {self.world_size} is not a multiple of "
                f"tensor_model_parallel_size x pipeline_model_parallel_size = {tp} x {pp} = "
                f"{tp * pp}. Change devices or num_nodes of the Trainer, or the two sizes."
            )
        if self.dp_cp_size % self.context_parallel_size:
            raise ValueError(
                f"The DPxCP pool of {self.dp_cp_size} ranks (world size {self.world_size} / TP "
                f"{tp} / PP {pp}) is not a multiple of context_parallel_size="
                f"{self.context_parallel_size}. Use a context_parallel_size that divides it."
            )

        # All ranks of a stage, tensor-parallel ones too: an expert is not split.
        of_stage = self.world_size // pp
        if of_stage % self.expert_model_parallel_size:
            raise ValueError(
                f"The {of_stage} ranks of a pipeline stage (world size {self.world_size} / PP "
                f"{pp}) are not a multiple of expert_model_parallel_size="
                f"{self.expert_model_parallel_size}. Use one that divides them."
            )

    @property
    def execution(self) -> Execution:
        """Who waits for whom in a run of these sizes."""
        # Stages hand micro-batches on in one order, and experts exchange rows over the whole pool:
        # every step then waits for its slowest rank. Without either, a rank meets others only in
        # its CP group, and in the reduction of gradients at the end.
        if self.pipeline_model_parallel_size > 1 or self.expert_model_parallel_size > 1:
            return "lockstep"
        return "free_running"

    @property
    def dp_cp_size(self) -> int:
        """Ranks of one DPxCP pool: those among which CP groups are formed."""
        return self.world_size // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        )

    @property
    def parts(self) -> str:
        """The sizes for which a rank has a part of the model alone, as they are written; or ""."""
        names = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
        return ", ".join(f"{name}={size}" for name in names if (size := getattr(self, name)) > 1)
