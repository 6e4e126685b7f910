"""One dataclass that owns every parallel size of a run and checks them against each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """The parallel sizes of a run; what cannot work is refused when it is made.

    Attributes:
        world_size: Number of processes of the run.
        tensor_model_parallel_size: Ranks that share each layer's weights (TP).
        pipeline_model_parallel_size: Pipeline stages (PP); above 1 is not there yet.
        expert_model_parallel_size: Ranks that share the experts (EP); above 1 is not there yet.
        context_parallel_size: CP size of a static run, and Megatron-Core's own CP groups.

    Raises:
        TypeError: A size that is not an int.
        ValueError: A size below 1, or sizes that do not divide the world size.
        NotImplementedError: PP or EP above 1.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, found {value!r}.")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}.")
        for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
            if getattr(self, name) > 1:
                raise NotImplementedError(
                    f"{name}={getattr(self, name)}: only 1 is supported so far. Use tensor "
                    "parallelism and a larger DPxCP pool instead."
                )
        self._check_divides()

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
