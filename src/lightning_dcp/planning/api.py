"""From the lengths of a global batch to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.padding import PackPadding
from lightning_dcp.config.parallel import Execution
from lightning_dcp.planning.cost.model import CostModel
from lightning_dcp.planning.inputs import as_lengths, as_units
from lightning_dcp.planning.plan import Plan, Step
from lightning_dcp.planning.planners.balanced import plan_balanced
from lightning_dcp.planning.planners.longest_sequence import plan_longest_sequence
from lightning_dcp.planning.planners.megatron import plan_megatron
from lightning_dcp.planning.planners.static import plan_static
from lightning_dcp.planning.report import make_report
from lightning_dcp.planning.request import PlanRequest, PlanSettings

type Planner = Callable[[PlanRequest], Sequence[Step]]

PLANNERS: MappingProxyType[str, Planner] = MappingProxyType(
    {
        "balanced": plan_balanced,
        "static": plan_static,
        "longest_sequence": plan_longest_sequence,
        "megatron": plan_megatron,
    }
)


def plan_global_batch(
    lengths: Sequence[int] | NDArray[np.integer],
    *,
    num_ranks: int,
    max_seqlen_per_dp_cp_rank: int,
    planner: str | Planner = "balanced",
    cost_model: CostModel | None = None,
    tp_size: int = 1,
    context_parallel_size: int | None = None,
    execution: Execution = "lockstep",
    pad_to_length: int | None = None,
    pad_to_length_bucket: int | None = None,
    fp8: bool = False,
    keep_together: Sequence[int] | NDArray[np.integer] | None = None,
) -> Plan:
    """Plans the micro-batches of one global batch on a pool of DPxCP ranks.

    The same arguments give the same plan on every rank.

    Args:
        lengths: Tokens of each sample of the global batch, without padding.
        num_ranks: Size of the DPxCP pool, any number from 1 up.
        max_seqlen_per_dp_cp_rank: The most rows a rank may hold in a step, padding included.
        planner: ``"balanced"``, ``"static"``, ``"longest_sequence"`` or ``"megatron"``, or a
            function from a :class:`PlanRequest` to the steps.
        cost_model: Predicts the time of micro-batches; by default :class:`CostModel`.
        tp_size: Tensor-parallel size; padded lengths are multiples of it.
        context_parallel_size: The CP size of ``planner="static"``; by default the smallest that
            holds every sample.
        execution: What to plan for and predict: ``"lockstep"``, where a step lasts as long as its
            slowest rank, as under pipeline and expert parallelism, or ``"free_running"``, where
            only the members of a group wait for each other.
        pad_to_length: Rows of a rank that every micro-batch is padded to; it may then hold no
            more, and the cap must be as large.
        pad_to_length_bucket: Round the rows that a rank holds of a micro-batch up to a multiple of
            this, and of all else that must divide them; the cap holds after rounding.
        fp8: Pad for FP8 kernels, as :class:`~lightning_dcp.config.padding.PackPadding`.
        keep_together: An int for each sample: samples with equal ones (such as the two answers of
            a pair) go into the same micro-batch. ``None`` leaves all samples free.

    Returns:
        A plan for which :meth:`Plan.validate` holds, with its :attr:`Plan.report`.

    Raises:
        TypeError: A length, a size, the cap or a unit is no integer.
        ValueError: The batch is empty, a sample is empty or longer than the pool holds, the
            samples of a unit are so together, or an option has a value that cannot work.
        PlanError: A planner of the user's own, or Megatron-Core's scheduler, returned a plan that
            breaks a rule, or the scheduler failed.
        NotImplementedError: ``planner="megatron"`` with ``keep_together``.
        ImportError: ``planner="megatron"`` and the installed Megatron-Core has no scheduler.
    """
    settings = PlanSettings(
        num_ranks=num_ranks,
        max_seqlen_per_dp_cp_rank=max_seqlen_per_dp_cp_rank,
        planner=planner,
        tp_size=tp_size,
        context_parallel_size=context_parallel_size,
        cost_model=cost_model or CostModel(),
        execution=execution,
        padding=PackPadding(
            pad_to_length=pad_to_length, pad_to_length_bucket=pad_to_length_bucket, fp8=fp8
        ),
    )
    return make_plan(lengths, settings, keep_together=keep_together)


def make_plan(
    lengths: Sequence[int] | NDArray[np.integer],
    settings: PlanSettings,
    *,
    keep_together: Sequence[int] | NDArray[np.integer] | None = None,
) -> Plan:
    """:func:`plan_global_batch` with settings that were put together, and checked, before.

    Args:
        lengths: Tokens of each sample of the global batch, without padding.
        settings: Everything else.
        keep_together: An int for each sample: samples with equal ones go into the same micro-batch.
    """
    name, make_steps = _resolve(settings.planner)
    context_parallel_size = settings.context_parallel_size
    # A planner of the user's own may read it.
    if context_parallel_size is not None and name in PLANNERS and name != "static":
        raise ValueError(
            f"context_parallel_size={context_parallel_size} with planner={name!r}, which "
            "chooses CP sizes itself: leave it out, or use planner='static'"
        )
    lengths = as_lengths(lengths)
    request = PlanRequest(lengths, settings, as_units(keep_together, len(lengths)))
    steps = tuple(make_steps(request))
    plan = Plan(
        steps=request.samples_of(steps),
        lengths=lengths,
        num_ranks=settings.num_ranks,
        max_seqlen_per_dp_cp_rank=settings.max_seqlen_per_dp_cp_rank,
        tp_size=settings.tp_size,
        planner=name,
        padding=settings.padding,
        keep_together=None if keep_together is None else tuple(map(int, keep_together)),
    )
    # Whoever made it: ranks that run a broken plan do not fail, they wait for each other.
    plan.validate()
    # The planner's steps, not the plan's: the tables of the request count by unit.
    return replace(plan, report=make_report(request, steps))


def _resolve(planner: str | Planner) -> tuple[str, Planner]:
    if callable(planner):
        # Partials and other callable objects have no name of their own.
        return getattr(planner, "__name__", type(planner).__name__), planner
    if planner not in PLANNERS:
        raise ValueError(
            f"planner={planner!r} is unknown; choose one of {', '.join(map(repr, PLANNERS))}, or "
            "give a function from a PlanRequest to steps"
        )
    return planner, PLANNERS[planner]
