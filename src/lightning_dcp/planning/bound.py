"""A lower bound on the predicted time of any plan of a request."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.planning.request import PlanRequest

# The k of the shares; 0 stands for the share as it is.
_ROUNDINGS = (0, 1, 2, 3)
# Steps that are bounded one by one, from the longest on.
_NUM_LONGEST = 64


# Kept for the last request: the planner asks for it, and the report of its plan.
# Requests compare by identity, so that the look-up hashes no lengths.
@lru_cache(maxsize=1)
def lower_bound(request: PlanRequest) -> float:
    """Seconds that no valid plan of the request stays below, by its cost model.

    The largest of several bounds. A plan has ``K`` steps on ``N`` ranks; sample ``i`` has
    ``r_i(s)`` rows and adds ``t_i(s)`` on a group of ``s`` ranks; ``f(s) = f(1) + h(s)`` is the
    fixed time of a micro-batch. Every minimum is over the sizes that hold the sample under the cap
    ``C`` (the rows that samples may take, where packs are padded further, which counts as no time);
    ``fastest_i = min_s (t_i(s) + f(s))`` and ``space_i = min_s s * r_i(s)``.

    Number of steps. Call ``u`` a share if numbers that add up to at most 1 keep a sum of at most 1
    under ``u``: ``u(x) = x`` is one, and ``u(x) = floor((k + 1) * x) / k`` where ``(k + 1) * x`` is
    no integer, else ``x`` (Fekete and Schepers 2001, dual feasible functions). The rows of a group
    keep the cap, so the shares ``u(r_i(s) / C)`` of its samples add up to at most 1, and those of
    a step, times the sizes, to at most ``N``: ``K >= sum_i min_s s * u(r_i(s) / C) / N``. This is
    said of groups of one size at a time, so that ``u`` may be another function for each size: with
    one for all, a sample would seem to cost no hops on a size where its share rounds to zero.

    1. Work. A step lasts as long as its ranks are busy on average or longer, so a plan takes at
       least ``K * f(1) + sum over groups of s * (h(s) + sum_i t_i(s)) / N``. ``h(s)`` is at least
       itself times the shares of the group's samples. So a sample costs
       ``w_i(s) = s * (t_i(s) + u * h(s))``, and a plan at least ``K * f(1) + sum_i min_s w_i / N``.
    2. The longest sample takes ``fastest_i``.
    3. Pools that are no power of two. Groups of ``c`` ranks or more, ``c`` a power of two, but for
       the whole pool are multiples of ``c``: they take at most ``N_c = N - N mod c`` ranks of a
       step. With ``v_i(s) = t_i(s) + u * f(s)``, a sample that needs ``c`` ranks costs
       ``min_s s * v_i(s) / N_c`` there, the minimum over powers of two, or ``v_i(N)`` on the whole
       pool. Where ``N mod m > 0``, each step without the whole pool has a group of less than ``m``
       ranks: there are at most as many such steps as samples that fit one, each with the space
       ``N_c * C`` for samples that need ``c`` ranks, which limits what can be saved over the whole
       pool (a fractional knapsack). Without such samples all steps are the whole pool's.
    4. Lockstep only. Samples with ``fastest_i > a`` need ``ceil(space / (N * C))`` steps, each of
       which lasts longer than ``a``: this bounds the longest step, the two longest and so on. The
       ``m`` longest hold no more work than fits their space; the other steps do the rest. Work is
       that of 1: ``min_s w_i(s)`` of each sample, so that the rest pays for its groups as well.

    1 to 3 hold for ranks that do not wait for each other as well: each rank runs ``K``
    micro-batches, the last one is done no earlier than the average one, and the whole pool and any
    group share a rank.

    Args:
        request: The planning request.
    """
    sizes = np.array(request.cp_sizes, dtype=np.float64)[:, None]
    # Not request.fits: a plan may use any size that holds its samples, between others that do not.
    fits = request.row_table <= request.capacity_table
    fastest = _least(fits, request.time_table + request.fixed_table)
    shares = [_share(request.row_table, request.capacity_table, k) for k in _ROUNDINGS]
    ranks, _ = _mix(fits, shares, sizes)
    # A sum that rounding lifts above a whole number must not count as a step more.
    num_steps = max(1, math.ceil(_sum(ranks) / request.num_ranks - 1e-9))
    hops = sizes * (request.fixed_table - request.fixed_table[0])
    work, share = _mix(fits, shares, hops, sizes * request.time_table)
    bounds = [
        num_steps * request.fixed[1] + _sum(work) / request.num_ranks,
        float(fastest.max()),
        _odd_pool(request, sizes, fits, [*shares, share]),
    ]
    if request.settings.execution == "lockstep":
        space = _least(fits, sizes * request.row_table)
        bounds.append(_longest_steps(request, fastest, work, space, num_steps))
    # A sum of rounded numbers may end up above its exact value.
    return max(bounds) * (1.0 - 1e-10)


def _least(fits: NDArray[np.bool_], table: NDArray[np.float64]) -> NDArray[np.float64]:
    least: NDArray[np.float64] = np.where(fits, table, np.inf).min(axis=0)
    return least


def _share(rows: NDArray[np.int64], capacity: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    share: NDArray[np.float64] = rows / capacity
    if k == 0:
        return share
    # In integers: a share rounded up by mistake would break the proof.
    whole, rest = np.divmod((k + 1) * rows, capacity)
    return np.where(rest == 0, share, whole / k)


def _mix(
    fits: NDArray[np.bool_],
    shares: list[NDArray[np.float64]],
    weight: NDArray[np.float64],
    base: NDArray[np.float64] | float = 0.0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The least ``base + weight * share`` of each sample, ``[num_samples]``, and the shares in it.

    A share is chosen for each size, so that the sum over samples is large.
    """
    tables = [np.where(fits, base + weight * share, np.inf) for share in shares]
    totals = [float(table.min(axis=0).sum()) for table in tables]
    # Greedy: every choice of shares gives a bound, so that a poor one is still true.
    start = max(range(len(shares)), key=totals.__getitem__)
    mixed, chosen, best = tables[start].copy(), shares[start].copy(), totals[start]
    for size in reversed(range(len(mixed))):
        others = np.delete(mixed, size, axis=0).min(axis=0, initial=np.inf)
        for table, share in zip(tables, shares, strict=True):
            total = float(np.minimum(others, table[size]).sum())
            if total > best:
                mixed[size], chosen[size], best = table[size], share[size], total
    return mixed.min(axis=0), chosen


def _odd_pool(
    request: PlanRequest,
    sizes: NDArray[np.float64],
    fits: NDArray[np.bool_],
    shares: list[NDArray[np.float64]],
) -> float:
    num_ranks = request.num_ranks
    if num_ranks & (num_ranks - 1) == 0:
        return 0.0
    smallest = sizes[fits.argmax(axis=0), 0]
    fits, sizes = fits[:-1], sizes[:-1]
    parts = [int((smallest < m).sum()) for m in request.cp_sizes[1:-1] if num_ranks % m]
    num_parts = min(parts, default=0)
    if num_parts == 0:
        num_steps = max(math.ceil(_sum(share[-1]) - 1e-9) for share in shares)
        return _sum(request.time_table[-1]) + num_steps * request.fixed[num_ranks]
    space = _least(fits, sizes * request.row_table[:-1])
    best = 0.0
    for share in shares:
        cost = request.time_table + share * request.fixed_table
        in_part, whole = _least(fits, sizes * cost[:-1]), cost[-1]
        for c in request.cp_sizes[1:-1]:
            usable = num_ranks - num_ranks % c
            big = smallest >= c
            saved = np.where(np.isfinite(in_part), whole - in_part / usable, 0.0)[big]
            most = _most(saved, space[big], num_parts * usable * request.capacity[1])
            best = max(best, _sum(whole[big]) - most)
    return best


def _longest_steps(
    request: PlanRequest,
    fastest: NDArray[np.float64],
    work: NDArray[np.float64],
    space: NDArray[np.float64],
    num_steps: int,
) -> float:
    # More steps than rows are as good as any number.
    of_step = float(request.num_ranks * min(request.capacity[1], 2**50))
    slowest_first = np.argsort(-fastest, kind="stable")
    filled = np.cumsum(space[slowest_first])
    num_steps = max(num_steps, math.ceil(filled[-1] / of_step - 1e-9))
    steps = np.arange(min(num_steps, _NUM_LONGEST))
    # The first sample with which the space up to it is more than that many steps have.
    first = np.searchsorted(filled, steps * of_step, side="right")
    seconds = fastest[slowest_first][np.minimum(first, len(slowest_first) - 1)]
    dense = np.argsort(-work / space, kind="stable")
    # A sample that does not fit whole counts in part; below the first one, it counts whole.
    held = np.interp((steps + 1) * of_step, np.cumsum(space[dense]), np.cumsum(work[dense]))
    rest = np.maximum(0.0, _sum(work) - held) / request.num_ranks
    bounds = np.cumsum(seconds) + rest + (num_steps - 1 - steps) * request.fixed[1]
    return float(bounds.max())


def _sum(values: NDArray[np.float64]) -> float:
    # The same on every machine; a list, since numbers come out of an array one by one slowly.
    return math.fsum(values.tolist())


def _most(values: NDArray[np.float64], weights: NDArray[np.float64], capacity: float) -> float:
    """The largest sum of values whose weights keep a capacity, parts of an item allowed."""
    keep = values > 0
    values, weights = values[keep], weights[keep]
    # Densest first, the last one in part: no choice of whole items is worth more (Dantzig 1957).
    order = np.argsort(-values / weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    part = np.clip((capacity - before) / weights[order], 0.0, 1.0)
    return _sum(values[order] * part)
