"""The planner ``megatron``: Megatron-Core's own scheduler, where the installed build has it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_dcp.config.padding import padded_length
from lightning_dcp.planning.plan import Group, Plan, PlanError, Step
from lightning_dcp.planning.request import PlanRequest

# Where the development branch keeps the scheduler. Looked up by name when it is asked for: the
# import pulls in torch, which planning does without.
_MODULE = "megatron.core.datasets.data_schedule"
_CLASS = "DefaultDynamicCPScheduler"
# Samples times ranks up to which the scheduler answers in about 0.1 s: it takes 0.09 s for 512
# samples on 8 ranks, but 31 s for 8,192 on 256.
_QUICK = 2**13


def plan_megatron(request: PlanRequest) -> list[Step]:
    """Plans with ``DefaultDynamicCPScheduler`` of Megatron-Core.

    Its cap knows nothing of padding. It gets each length padded for the smallest group that holds
    the sample; if its plan breaks the cap, it is asked once more with lengths padded for the whole
    pool, as they would be for static CP.

    Args:
        request: The planning request.

    Returns:
        The steps.

    Raises:
        ImportError: The installed Megatron-Core has no such scheduler, or it cannot be imported.
        NotImplementedError: Samples must be kept together.
        PlanError: The scheduler failed, or returned a plan that cannot run.
    """
    if request.units is not None:
        raise NotImplementedError(
            f"planner='megatron' with keep_together: {_CLASS} takes samples one by one. Use "
            "planner='balanced', or leave keep_together out"
        )
    scheduler = _scheduler_class()
    if scheduler is None:
        raise ImportError(
            f"planner='megatron' needs a Megatron-Core build with {_CLASS} (its dev branch); the "
            "installed build has none. Use planner='balanced'"
        )

    def padded(cp_sizes: Sequence[int]) -> list[int]:
        tp_size, padding = request.settings.tp_size, request.settings.padding
        both = zip(request.lengths, cp_sizes, strict=True)
        return [padded_length(length, size, tp_size, padding) for length, size in both]

    smallest = padded(request.min_cp_sizes)
    try:
        return _ask(request, scheduler, smallest)
    except PlanError:
        widest = padded([request.num_ranks] * len(request.lengths))
        # The same question would get the same answer.
        if widest == smallest:
            raise
        return _ask(request, scheduler, widest)


def plan_megatron_if_quick(request: PlanRequest) -> Iterator[list[Step]]:
    """:func:`plan_megatron`, once where the scheduler is there, quick and does not fail."""
    if request.units is None and len(request.lengths) * request.num_ranks <= _QUICK:
        with suppress(ImportError, PlanError):
            yield plan_megatron(request)


def has_megatron_scheduler() -> bool:
    """Whether the installed Megatron-Core has ``DefaultDynamicCPScheduler``."""
    try:
        return _scheduler_class() is not None
    except ImportError:
        return False


def _scheduler_class() -> Any:
    module = sys.modules.get(_MODULE)
    if module is None and _is_in_source():
        try:
            module = importlib.import_module(_MODULE)
        except ImportError as error:
            raise ImportError(
                f"planner='megatron': the installed Megatron-Core has {_CLASS}, but {_MODULE} "
                f"cannot be imported: {error}. Use planner='balanced'"
            ) from error
    return getattr(module, _CLASS, None)


@cache
def _is_in_source() -> bool:
    """Whether the scheduler's class is in the installed sources, without importing them."""
    spec = importlib.util.find_spec("megatron")
    folders = spec.submodule_search_locations if spec else None
    paths = [Path(folder, *_MODULE.split(".")[1:]).with_suffix(".py") for folder in folders or ()]
    return any(f"class {_CLASS}" in path.read_text() for path in paths if path.is_file())


def _ask(request: PlanRequest, scheduler: Any, lengths: list[int]) -> list[Step]:
    settings = request.settings
    asked = (
        f"planner='megatron': {_CLASS} of Megatron-Core, asked for {len(lengths)} samples of up "
        f"to {max(lengths)} tokens (padded) on {request.num_ranks} DPxCP ranks with "
        f"max_seqlen_per_dp_cp_rank={settings.max_seqlen_per_dp_cp_rank},"
    )
    try:
        # It reads the two sizes only as their product, the pool.
        answer = scheduler(
            # What packs may hold before they are filled up, of which it knows nothing.
            max_seqlen_per_dp_cp_rank=request.capacity[request.num_ranks],
            cp_size=request.num_ranks,
            dp_size=1,
            microbatch_group_size_per_vp_stage=None,
        ).get_groups_and_subsamples(list(enumerate(lengths)))
        steps = [_step(request.num_ranks, ranks) for ranks in answer]
    except Exception as error:
        # Foreign code that fails by assertions, index errors and others on inputs it is not for.
        raise PlanError(
            f"{asked} failed: {type(error).__name__}: {error}. Use planner='balanced'"
        ) from error
    try:
        Plan(steps=tuple(steps), lengths=request.lengths, num_ranks=request.num_ranks,
             max_seqlen_per_dp_cp_rank=settings.max_seqlen_per_dp_cp_rank,
             tp_size=settings.tp_size, padding=settings.padding).validate()  # fmt: skip
    except PlanError as error:
        raise PlanError(
            f"{asked} returned a plan that cannot run: {error}. Use planner='balanced'"
        ) from error
    return steps


def _step(num_ranks: int, ranks: Sequence[Sequence[int]]) -> Step:
    """A step from the sample ids of each rank: neighbours with the same ids are a group."""
    if len(ranks) != num_ranks:
        raise ValueError(f"a micro-batch for {len(ranks)} ranks, the pool has {num_ranks}")
    groups = []
    first_rank = 0
    for samples, members in groupby(tuple(sorted(map(int, ids))) for ids in ranks):
        size = len(list(members))
        groups.append(Group(first_rank, size, samples))
        first_rank += size
    return Step(tuple(groups))
