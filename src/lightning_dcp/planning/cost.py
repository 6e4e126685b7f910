"""What a micro-batch is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.alignment import row_alignment
from lightning_dcp.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class CostModel:
    """Linear and quadratic work, split evenly over the CP group.

    A sequence of ``n`` tokens (padding included) costs ``n * (1 + n / crossover_length)``: the
    linear layers and causal attention. The unit is the linear work of one token. Communication
    and fixed costs are not priced.

    Attributes:
        crossover_length: Tokens at which attention costs as much as the linear layers. FlexSP's
            fit for a 7B model puts it at about 36K tokens.
    """

    crossover_length: float = 36_000.0

    def __post_init__(self) -> None:
        if not self.crossover_length > 0:
            raise ValueError(
                f"crossover_length={self.crossover_length} must be above 0: it is the length, in "
                "tokens, at which attention costs as much as the linear layers"
            )

    def sample_times(
        self, lengths: NDArray[np.int64], size: int = 1, tp_size: int = 1
    ) -> NDArray[np.float64]:
        """The time that each sample adds to a micro-batch on a CP group.

        Args:
            lengths: Tokens of each sample, without padding; shape ``(num_samples,)``.
            size: Ranks of the CP group.
            tp_size: Tensor-parallel size.

        Returns:
            Units of one token's linear work; shape ``(num_samples,)``.
        """
        rows = padded_rows(lengths, size, tp_size).astype(np.float64)
        return rows * (1.0 + rows * (size / self.crossover_length))

    def step_times(self, plan: Plan) -> list[float]:
        """The predicted time of each step of ``plan``: that of its slowest group."""
        lengths = np.asarray(plan.lengths, dtype=np.int64)
        times = {
            size: self.sample_times(lengths, size, plan.tp_size).tolist()
            for size in plan.cp_sizes()
        }
        return [
            max(sum(times[group.size][i] for i in group.sample_ids) for group in step.groups)
            for step in plan.steps
        ]


def padded_rows(lengths: NDArray[np.int64], size: int, tp_size: int) -> NDArray[np.int64]:
    """:func:`lightning_dcp.alignment.rows_per_rank` of every length at once."""
    align = row_alignment(size, tp_size)
    return -(-lengths // align) * (align // size)
