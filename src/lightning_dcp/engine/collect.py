"""Per-row outputs of all ranks, back as jagged tensors in the order of the global batch.

Every rank knows the plan, hence how many rows every other one sends: tensors travel as they are,
without sizes or pickling ahead of them. A row is sent once, by the rank that holds it; of the ranks
that share a tensor-parallel model, which all hold the same, the first one sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_dcp.engine.agreement import form_of
from lightning_dcp.packing import MicroBatch, PackLayout, to_jagged, unpack_rows
from lightning_dcp.parallel import ParallelContext
from lightning_dcp.planning import Plan

RowOutputs = Callable[[MicroBatch], dict[str, Tensor]]
"""Of a micro-batch: outputs of each row's target on this rank, by name, ``[rows, ...]``."""


def checked_outputs(
    outputs: Any, micro_batch: MicroBatch, earlier: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What a user's prediction returned, or an error that says what it has to return.

    ``earlier`` is what it returned for another micro-batch.
    """
    if not isinstance(outputs, dict) or not outputs:
        raise TypeError(
            "predict_micro_batch must return a dict with one output or more by name, found "
            f"{'an empty dict' if outputs == {} else type(outputs).__name__}."
        )
    num_rows = len(micro_batch.labels)
    for name, value in outputs.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != num_rows:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise ValueError(
                f"predict_micro_batch gave '{name}' with {found}; an output needs one row for each "
                f"of the {num_rows} rows of the micro-batch."
            )
    if earlier is not None and form_of(outputs) != form_of(earlier):
        raise ValueError(
            f"predict_micro_batch gave {', '.join(form_of(earlier))} for one micro-batch and "
            f"{', '.join(form_of(outputs))} for another; it must give the same for all."
        )
    return outputs


def collect_outputs(
    rows: Sequence[Mapping[str, Tensor]],
    plan: Plan,
    context: ParallelContext,
    *,
    everywhere: bool = False,
    of_own_token: Collection[str] = (),
) -> dict[str, Tensor]:
    """Gathers what each rank made of its rows; a collective of all ranks of the world.

    In a pipeline the ranks of the last stage have rows, the others none.

    A row's output is about its target, the next token. In the result it stands at that token, as
    labels and extras do, and the first token of each sequence, which nothing predicts, has 0. An
    output that is about the row's own token stands there, and every token has one.

    Args:
        rows: For each step of the plan this rank's outputs by name, ``[rows, ...]``; the same
            names, dtypes and trailing shapes on every rank.
        plan: The plan that ran.
        context: The parallel state.
        everywhere: Give the result to all ranks and not to rank 0 alone.
        of_own_token: Names of outputs that are about the row's own token.

    Returns:
        By name jagged ``[num_samples, length*, ...]`` on this rank's device, on rank 0 or
        everywhere; elsewhere an empty dict.

    Raises:
        ValueError: A sample is missing or there twice.
    """
    lengths = torch.tensor(plan.lengths)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(context.device)
    values = _gather_values(rows, plan, context, offsets, of_own_token)
    values = _hand_out(values, context, num_tokens=int(lengths.sum()), everywhere=everywhere)
    return {
        name: torch.nested.nested_tensor_from_jagged(value, offsets=offsets)
        for name, value in values.items()
    }


def _gather_values(
    rows: Sequence[Mapping[str, Tensor]],
    plan: Plan,
    context: ParallelContext,
    offsets: Tensor,
    of_own_token: Collection[str],
) -> dict[str, Tensor]:
    """On the rank that collects, each output in the order of the batch; elsewhere nothing."""
    if not context.is_last_stage or context.tp_rank != 0:
        return {}
    # Sorted: transfers have no names, and must start in one order on all ranks.
    names = sorted(rows[0])
    num_rows = _rows_of_ranks(plan)
    ends = np.cumsum(num_rows.sum(0))
    transfers = {
        # All steps in one message: a transfer for each would pay its start as often.
        name: _start_gather(torch.cat([step[name] for step in rows]), ends, context)
        for name in names
    }
    # While the rows travel.
    collects = dist.get_rank() == context.collector
    order = _token_order(plan, num_rows).to(context.device) if collects else None
    # Rows that are sent must live till then, too.
    for _, works in transfers.values():
        for work in works:
            work.wait()
    if order is None:
        return {}
    return {
        name: rows.index_select(0, order)
        if name in of_own_token
        # At its target, and not at the row that made it.
        # (A first token gets the last row of another sample, and then 0.)
        else rows.index_select(0, order.roll(1)).index_fill_(0, offsets[:-1], 0)
        for name, (rows, _) in transfers.items()
    }


def _hand_out(
    values: dict[str, Tensor], context: ParallelContext, *, num_tokens: int, everywhere: bool
) -> dict[str, Tensor]:
    """From the rank that collected to rank 0, or to all; the others get an empty dict."""
    collector, rank = context.collector, dist.get_rank()
    # Without a pipeline rank 0 has collected, and the others hold an empty dict.
    if collector == 0 and not everywhere:
        return values
    # Other stages have seen no outputs: they are told what comes.
    facts = [{name: (value.dtype, value.shape[1:]) for name, value in values.items()}]
    dist.broadcast_object_list(facts, src=collector, group=context.host_group)
    if not everywhere and rank not in (0, collector):
        return {}
    # In the collector's order, which `facts` brought along: broadcasts have no names either.
    for name, (dtype, shape) in facts[0].items():
        if rank != collector:
            values[name] = torch.empty(num_tokens, *shape, dtype=dtype, device=context.device)
        if everywhere:
            dist.broadcast(values[name], src=collector)
        elif rank == collector:
            dist.send(values[name], dst=0)
        else:
            dist.recv(values[name], src=collector)
    return values if everywhere or rank == 0 else {}


def _rows_of_ranks(plan: Plan) -> NDArray[np.int64]:
    """``[num_steps, num_ranks]``: the rows that each rank of the pool holds in each step."""
    rows = []
    for step in plan.steps:
        sizes = [group.size for group in step.groups]
        rows.append(np.repeat([plan.rows(group) for group in step.groups], sizes))
    return np.asarray(rows, np.int64)


def _start_gather(
    local: Tensor, ends: NDArray[np.int64], context: ParallelContext
) -> tuple[Tensor, list[dist.Work]]:
    """Starts to bring the rows of all ranks of a pool, one after the other, to its first rank.

    Args:
        local: This rank's rows of all steps, [rows, ...].
        ends: ``[num_ranks]``: where each rank's rows end in the result.
        context: The parallel state.

    Returns:
        Where they arrive, or what is sent, and what to wait for.
    """
    pool, group = context.cp_groups.pool_ranks, context.pg_collection.dp_cp
    if context.pool_rank != 0:
        whole = local
        # Peers of a P2POp are global ranks, also in a group.
        operations = [dist.P2POp(dist.isend, local, pool[0], group)]
    else:
        whole = local.new_empty(int(ends[-1]), *local.shape[1:])
        whole[: ends[0]] = local
        operations = [
            dist.P2POp(dist.irecv, whole[ends[rank - 1] : ends[rank]], pool[rank], group)
            for rank in range(1, len(pool))
        ]
    # Batched: NCCL may block on a single send or receive until its peer is there.
    return whole, dist.batch_isend_irecv(operations) if operations else []


def _token_order(plan: Plan, num_rows: NDArray[np.int64]) -> Tensor:
    """``[num_tokens]``: where each token's own row lies among the gathered ones.

    Unpacking row numbers instead of rows gives it, with the check that each sample is there once.
    """
    # The gathered rows are those of rank 0 in all steps, then those of rank 1, and so on.
    # [num_steps, num_ranks], counted rank by rank.
    firsts = (np.cumsum(num_rows.T).reshape(num_rows.T.shape) - num_rows.T).T
    parts = []
    for first, step in zip(firsts, plan.steps, strict=True):
        for group in step.groups:
            layout = PackLayout.of(
                [plan.lengths[sample] for sample in group.sample_ids],
                cp_size=group.size,
                tp_size=plan.tp_size,
                padding=plan.padding,
            )
            starts = first[group.first_rank : group.first_rank + group.size]
            numbers = [torch.arange(start, start + layout.num_rows) for start in starts.tolist()]
            parts.append(unpack_rows(numbers, layout, group.sample_ids))
    order: Tensor = to_jagged(parts, len(plan.lengths)).values()
    return order
