"""A micro-batch: what one rank computes in one step of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.packing.layout import PackLayout


@dataclass(frozen=True)
class MTPTargets:
    """What multi-token prediction reads at one depth: ids and labels some tokens further on.

    Attributes:
        input_ids: ``[rows]`` int64: the id ``depth`` tokens after the row's own, in its sequence;
            0 where that is past the end.
        labels: ``[rows]`` int64: the row's label at this depth, one token after that;
            ``IGNORE_INDEX`` where there is no target.
    """

    input_ids: Tensor
    labels: Tensor


@dataclass
class MicroBatch:
    """What one rank computes in one step of a plan: its rows of its CP group's pack.

    A row is a token of one of the pack's sequences, or padding at a sequence's end. All tensors are
    per rank: under context parallelism a rank holds some rows of every sequence, along the zigzag
    that ``packing.layout`` draws. Masks come from lengths, never from a pad token's id.

    Attributes:
        input_ids: ``[rows]`` int64: the row's own token; 0 at padding.
        labels: ``[rows]`` int64: the row's target, the token after its own in its sequence (read
            before the cut, so also where that is another rank's); ``IGNORE_INDEX`` without one.
        loss_mask: ``[rows]`` bool: whether the row has a target. Of all ranks' rows together, True
            once for each target token of the global batch.
        position_ids: ``[rows]`` int64: position of the row's token in its sequence, from 0.
        padding_mask: ``[rows]`` bool: True at padding, the sense that Megatron-Core's router wants.
        local_cp_size: Ranks of the CP group.
        sample_ids: The samples of the pack, in pack order, as indices into the global batch.
        num_tokens: int64 scalar tensor: target tokens among this rank's rows.
        is_group_leader: Whether this is CP rank 0 of its group: what a group must count once, such
            as the pairs of DPO, counts here.
        packed_seq_params: None until :func:`~lightning_dcp.parallel.bind_micro_batch`: boundaries
            of the pack's sequences, in tokens over the whole CP group, and the group itself
            (``packed_seq_params.cp_group``).
        extras: Further keys of the batch, by key. Per-token ones ``[rows, ...]``: the value at the
            row's own token, 0 at padding and at a last token that a key lacks. Per-sample ones
            ``[samples of the pack, ...]``, in the order of ``sample_ids``.
        target_extras: The keys that an objective's ``extras`` name, by key, ``[rows, ...]``: the
            value at the row's target (the next token, as ``labels``), of a per-sample key that of
            the row's sample; 0 where the row has no target.
        mtp: For each depth of multi-token prediction, from 1 on, the ids and labels that it reads.
        layout: Lengths and boundaries on the host, in NumPy: reading them waits for no device.
        is_filler: Whether it only fills up a pipeline's group: nothing in it counts, and the engine
            takes its loss for zero.
    """

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    padding_mask: Tensor
    local_cp_size: int
    sample_ids: tuple[int, ...]
    num_tokens: Tensor
    is_group_leader: bool
    # Any: packing knows nothing of Megatron-Core, whose type it is.
    packed_seq_params: Any = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    target_extras: dict[str, Tensor] = field(default_factory=dict)
    mtp: tuple[MTPTargets, ...] = ()
    layout: PackLayout = field(default_factory=lambda: PackLayout((1,)))
    is_filler: bool = False

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """This micro-batch, not bound yet, with every tensor on ``device``; changes it in place."""

        # By type and not by name: a tensor that is added above is moved as well.
        def move(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking) if torch.is_tensor(value) else value

        for each in fields(self):
            setattr(self, each.name, move(getattr(self, each.name)))
        self.extras = {key: move(value) for key, value in self.extras.items()}
        self.target_extras = {key: move(value) for key, value in self.target_extras.items()}
        self.mtp = tuple(MTPTargets(move(one.input_ids), move(one.labels)) for one in self.mtp)
        return self
