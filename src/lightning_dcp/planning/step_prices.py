"""A lower bound on the time of plans whose longest step takes a time within given limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lightning_dcp.planning.request import Problem

# Intervals of the time of a step with prices of their own.
_NUM_BANDS = 8
# Prices are found for some samples of about this number, that stand for those of like length.
_NUM_CLASSES = 96
# Steps uphill; their size at first, and at last as a part of that.
_NUM_ITERATIONS, _RATE, _LAST_RATE = 80, 0.15, 0.03
# How far above the least cost one still counts, as a part of it, first and last.
_SOFT, _LAST_SOFT = 0.1, 0.004


@dataclass(frozen=True, slots=True)
class _Costs:
    """Samples or classes of them, a row each.

    Attributes:
        weight: Samples in each; ``[num]``.
        work: ``s * t_i(s) / N``; ``[num, num_sizes]``.
        space: ``s * r_i(s) / (N * C)``; ``[num, num_sizes]``.
        alone: ``t_i(s) + f(s)``, infinite where the size does not hold the sample.
    """

    weight: NDArray[np.float64]
    work: NDArray[np.float64]
    space: NDArray[np.float64]
    alone: NDArray[np.float64]

    def take(self, samples: NDArray[np.int64], weight: NDArray[np.float64]) -> _Costs:
        """Some samples, each of which stands for several."""
        return _Costs(weight, self.work[samples], self.space[samples], self.alone[samples])


class StepPrices:
    """Bounds the time of plans in lockstep by charging samples for time and for rows.

    A group of ``s`` ranks in a step of ``L`` seconds has ``f(s) + sum of t_i(s) <= L`` and ``sum of
    r_i(s) / C <= 1``. With ``0 <= a <= 1`` and ``m = a * f(s) + (1 - a) * D``, where ``D <= L``, it
    follows that ``a * sum of t_i(s) + m * sum of r_i(s) / C <= L``. The same holds with ``1 <= a <=
    U / (U - f(s))`` and ``m = a * f(s) + (1 - a) * U``, where ``L <= U``: a sample that has a group
    to itself then pays for all of its fixed time. The sizes of a step's groups add up to ``N``: if
    each sample is charged ``s / N`` times its part of the left side, all samples of a step are
    charged ``L`` at most, and those of a plan no more than it takes. A sample is charged at least
    the least over all sizes and over all steps that last ``t_i(s) + f(s)`` or more. ``a`` may be
    another for each size and for each interval of ``L`` (a band, from ``D`` to ``U``). In a long
    step ranks with short samples run out of rows, and ranks with one long sample cannot take a
    second one: rows are then what is charged.

    The longest step is one, and lasts ``low`` or more, so that it may have charges of its own: with
    ``m - e`` in place of ``m``, where ``0 <= e`` and ``m - e >= 0`` for each size, its samples are
    charged ``L - e`` at most, and a plan takes ``e`` more than all charges.

    Any ``a`` and ``e`` give a bound; good ones are found by gradient steps on a sum in which the
    least is smoothed. Rounding that differs between machines changes the bound, never a plan.

    Args:
        problem: The planning request.
    """

    def __init__(self, problem: Problem) -> None:
        sizes = np.array(problem.sizes, dtype=np.float64)
        share = sizes / problem.num_ranks
        fits = problem.row_table <= problem.room_table
        self.fixed = np.array([problem.fixed[s] for s in problem.sizes])
        alone = np.where(fits, problem.time_table + self.fixed[:, None], np.inf)
        self.costs = _Costs(
            np.ones(len(problem.lengths)),
            np.ascontiguousarray((share[:, None] * problem.time_table).T),
            np.ascontiguousarray((share[:, None] * problem.row_table / problem.room_table).T),
            np.ascontiguousarray(alone.T),
        )
        # Every so many of the samples, longest first, and all of those that are longest by far.
        order = np.array(problem.order)
        parts = np.array_split(order, min(_NUM_CLASSES, len(order)))
        middle = np.array([part[len(part) // 2] for part in parts])
        self.classes = self.costs.take(middle, np.array([float(len(part)) for part in parts]))
        self.shortest = float(alone.min())

    def bound(self, low: float, high: float, enough: float) -> float:
        """Seconds that no plan stays below whose longest step lasts ``low`` to ``high``.

        Args:
            low: No more than the longest step takes.
            high: No less than it takes.
            enough: A larger bound is of no more use.
        """
        ends = np.geomspace(min(self.shortest, low), high, _NUM_BANDS + 1)
        ends[-1] = high
        # The longest step's charges come last; the whole of its band is from low to high.
        lower, upper = np.append(ends[:-1], low), np.append(ends[1:], high)
        part, extra = self._prices(lower, upper, low, enough)
        least = self._table(self.costs, part, extra, lower, upper).min(axis=(1, 2))
        return extra + math.fsum((self.costs.weight * least).tolist())

    def _table(
        self,
        costs: _Costs,
        part: NDArray[np.float64],
        extra: float,
        lower: NDArray[np.float64],
        upper: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """The charges; ``[num, num_bands + 1, num_sizes]``."""
        end = np.where(part <= 1.0, lower[:, None], upper[:, None])
        row_price = end + part * (self.fixed - end)
        row_price[-1] -= extra
        # Rounding may leave it below 0, which the proof does not allow.
        row_price = np.maximum(row_price, 0.0)
        table = part * costs.work[:, None] + row_price * costs.space[:, None]
        return np.where(costs.alone[:, None] > upper[:, None], np.inf, table)

    def _prices(
        self, lower: NDArray[np.float64], upper: NDArray[np.float64], low: float, enough: float
    ) -> tuple[NDArray[np.float64], float]:
        """``a`` by band and size, that of the longest step last, and ``e``."""
        costs, fixed = self.classes, self.fixed
        part, extra = np.full((len(lower), len(fixed)), 0.8), 0.3 * low
        time = np.maximum(upper[:, None] - fixed, 1e-12)
        # Where no time is left beside the fixed one, no sample is on that size.
        most = np.where(upper[:, None] > fixed, upper[:, None] / time, 1.0)
        best, best_prices = -math.inf, (part, extra)
        first = np.zeros_like(part)
        second = np.zeros_like(part)
        moment = square = 0.0
        for k in range(_NUM_ITERATIONS):
            # The longest step's row price must not fall below 0.
            gap = np.maximum(low - fixed, 1e-12)
            short = np.clip((low - extra) / gap, 0.0, 1.0)
            more = np.clip((upper[-1] - extra) / time[-1], 1.0, most[-1])
            part[-1] = np.minimum(part[-1], np.where(fixed >= extra, more, short))
            table = self._table(costs, part, extra, lower, upper)
            least = table.min(axis=(1, 2))
            total = extra + float((costs.weight * least).sum())
            if total > best:
                best, best_prices = total, (part.copy(), extra)
                if best > enough:
                    break
            done = k / (_NUM_ITERATIONS - 1)
            soft = _SOFT * (_LAST_SOFT / _SOFT) ** done
            rate = _RATE * (_LAST_RATE) ** done
            scale = (soft * np.maximum(least, 1e-300))[:, None, None]
            chance = np.exp((least[:, None, None] - table) / scale)
            chance *= (costs.weight / chance.sum(axis=(1, 2)))[:, None, None]
            end = np.where(part < 1.0, lower[:, None], upper[:, None]) - fixed
            gradient = (chance * costs.work[:, None]).sum(axis=0)
            gradient -= end * (chance * costs.space[:, None]).sum(axis=0)
            up = 1.0 - float((chance[:, -1] * costs.space).sum())
            # Adam (Kingma and Ba 2015).
            first = 0.8 * first + 0.2 * gradient
            second = 0.95 * second + 0.05 * gradient**2
            moment, square = 0.8 * moment + 0.2 * up, 0.95 * square + 0.05 * up**2
            correction = math.sqrt(1 - 0.95 ** (k + 1)) / (1 - 0.8 ** (k + 1))
            step = first / (np.sqrt(second) + 1e-12) * correction
            part = np.clip(part + rate * step, 0.0, most)
            extra += rate * low * moment / (math.sqrt(square) + 1e-12) * correction
            extra = min(max(extra, 0.0), low)
        return best_prices
