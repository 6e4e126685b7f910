"""Cost models from measured micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.planning.cost.model import CostModel

# The fields that are fitted, in the order of the columns of :func:`_features`.
_FITTED = (
    "fixed_seconds",
    "seconds_per_row",
    "seconds_per_pair",
    "kv_seconds_per_row_within",
    "kv_seconds_per_row_across",
    "hop_seconds_within",
    "hop_seconds_across",
)
_OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
_MAX_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMicroBatch:
    """How long one micro-batch took.

    Attributes:
        lengths: Tokens of each of its samples, without padding.
        size: Ranks of its CP group.
        seconds: Forward and backward pass.
        tp_size: Tensor-parallel size that it was padded for.
    """

    lengths: tuple[int, ...]
    size: int
    seconds: float
    tp_size: int = 1

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths={self.lengths}: one sample or more, of 1 token or more")
        check_at_least("size", self.size)
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds={self.seconds} must be finite and above 0")


def fit_cost_model(measured: Sequence[MeasuredMicroBatch], *, base: CostModel) -> CostModel:
    """Fits a cost model to measured times: least squares of relative errors, no negative figures.

    Without hidden communication the time is a sum of the fitted fields times known numbers, which
    non-negative least squares solve. Which samples' communication is hidden depends on the
    result, so for each of a few overlaps the two are found in turn; the best overlap is taken.

    Args:
        measured: Micro-batches of various lengths, numbers of samples and CP sizes.
        base: Gives what the measurements say nothing about: ``thin_rows`` (its effect is that of
            other terms as well), ``ranks_per_node``, the memory, the model; communication where no
            group has more than one rank, and between nodes where none spans nodes.

    Raises:
        ValueError: There are fewer measurements than figures to fit, or the times do not grow with
            the rows.
    """
    seconds = np.array([one.seconds for one in measured])
    candidates = []
    for overlap in _OVERLAPS:
        model = replace(base, overlap=overlap)
        for _ in range(_MAX_ROUNDS):
            # Two fits may lead to each other for ever: hence the limit.
            last, (model, error) = model, _fit_once(measured, seconds, model)
            if model == last:
                break
        candidates.append((error, overlap, model))
        # Without groups there is no exchange that an overlap could hide.
        if all(one.size == 1 for one in measured):
            return replace(model, overlap=base.overlap)
    # Models have no order; of equal errors the smaller overlap counts.
    return min(candidates, key=lambda candidate: candidate[:2])[2]


def predict(cost_model: CostModel, measured: Sequence[MeasuredMicroBatch]) -> NDArray[np.float64]:
    """Predicted seconds of each micro-batch; ``[len(measured)]``."""
    return np.array(
        [
            cost_model.fixed_time(one.size)
            + math.fsum(cost_model.sample_times(_lengths(one), one.size, one.tp_size))
            for one in measured
        ]
    )


def r_squared(cost_model: CostModel, measured: Sequence[MeasuredMicroBatch]) -> float:
    """The part of the variance of the measured times that the model explains: 1 at best.

    Raises:
        ValueError: All measured times are the same, so that there is nothing to explain.
    """
    seconds = np.array([one.seconds for one in measured])
    variance = float(((seconds - seconds.mean()) ** 2).sum())
    if variance == 0:
        raise ValueError(f"{len(measured)} measured micro-batches all took the same time")
    error = float(((seconds - predict(cost_model, measured)) ** 2).sum())
    return 1.0 - error / variance


def _lengths(one: MeasuredMicroBatch) -> NDArray[np.int64]:
    return np.array(one.lengths, dtype=np.int64)


def _fit_once(
    measured: Sequence[MeasuredMicroBatch], seconds: NDArray[np.float64], model: CostModel
) -> tuple[CostModel, float]:
    """A fit where the communication of the same samples is hidden as by ``model``; its error."""
    # Over the measured time: errors are then relative, and long micro-batches do not rule the fit.
    table = np.array([_features(one, model) for one in measured]) / seconds[:, None]
    # What nothing was measured of keeps the value of the base.
    seen = [k for k in range(len(_FITTED)) if table[:, k].any()]
    if len(measured) < len(seen):
        raise ValueError(
            f"{len(measured)} measured micro-batches for {len(seen)} figures to fit "
            f"({', '.join(_FITTED[k] for k in seen)}): measure more"
        )
    values, error = _non_negative(table[:, seen], np.ones(len(measured)))
    fitted: dict[str, Any] = {
        _FITTED[k]: float(value) for k, value in zip(seen, values, strict=True)
    }
    if not fitted["seconds_per_row"] > 0:
        raise ValueError(
            f"the times of {len(measured)} measured micro-batches do not grow with their rows: "
            "measure longer ones, with fewer other processes on the machine"
        )
    return replace(model, **fitted), error


def _features(one: MeasuredMicroBatch, model: CostModel) -> list[float]:
    """By fitted field: what it is multiplied with in the time of a micro-batch."""
    parts = model.parts(_lengths(one), (one.size,), one.tp_size)
    rows = parts.rows[0].astype(np.float64)
    pairs = one.size * rows * (rows + model.thin_rows)
    # Without overlap all is paid, also where the figures so far say that it costs nothing.
    paid = (parts.communication[0] > 0) | (model.overlap == 0 and one.size > 1)
    moved = float((rows * paid).sum()) * (one.size - 1)
    attention = float(pairs.sum()) - model.overlap * float((pairs * paid).sum())
    within = one.size <= model.ranks_per_node
    hops = one.size - 1
    exchange = [moved, 0.0, hops, 0.0] if within else [0.0, moved, 0.0, hops]
    return [1.0, float(rows.sum()), attention, *exchange]


def _non_negative(
    table: NDArray[np.float64], target: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """Non-negative least squares, by trying each set of values above zero: there are few columns.

    The values above zero of the solution solve the least squares of their columns alone.
    """
    number = table.shape[1]
    # Columns of like size, so that no figure counts as zero for its unit.
    scale = np.linalg.norm(table, axis=0)
    best, least = np.zeros(number), float(target @ target)
    for chosen in (c for k in range(1, number + 1) for c in combinations(range(number), k)):
        columns = list(chosen)
        values = np.linalg.lstsq(table[:, columns] / scale[columns], target, rcond=None)[0]
        if (values < 0).any():
            continue
        rest = target - table[:, columns] @ (values / scale[columns])
        error = float(rest @ rest)
        if error < least:
            best, least = np.zeros(number), error
            best[columns] = values / scale[columns]
    return best, least
