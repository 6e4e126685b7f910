"""One dataclass that owns every parallel size of a run and checks them against each other."""

from __future__ import annotations

from dataclasses import dataclass


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
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, found {value!r}.")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}.")
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

        of_stage = self.world_size // pp
        if of_stage % self.expert_model_parallel_size:
            raise ValueError(
                f"The {of_stage} ranks of a pipeline stage (world size {self.world_size} / PP "
                f"{pp}) are not a multiple of expert_model_parallel_size="
                f"{self.expert_model_parallel_size}. Use one that divides them."
            )

    @property
    def needs_lockstep(self) -> bool:
        """Whether ranks of different CP groups wait for each other in every micro-batch."""
        return self.pipeline_model_parallel_size > 1 or self.expert_model_parallel_size > 1

    @property
    def dp_cp_size(self) -> int:
        """Ranks of one DPxCP pool: those among which CP groups are formed."""
        return self.world_size // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        )

    @property
    def data_parallel_size(self) -> int:
        """Megatron-Core's data-parallel size, with the CP ranks of a static run not counted."""
        return self.dp_cp_size // self.context_parallel_size
