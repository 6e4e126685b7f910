"""Mixture of experts under dynamic groups: a router that counts real tokens of its own group.

Megatron-Core's router reduces over the static CP group and weighs its losses by the rows of a
rank. Here both follow the micro-batch: its own CP group, and its tokens without padding. What a
step's losses are then does not depend on the ranks that a plan puts a micro-batch on:

- z-loss: mean over the real tokens of the global batch of the squared log-sum-exp of the logits;
- ``seq_aux_loss``: mean over the sequences of the global batch of the load-balancing loss of each;
- ``aux_loss``: the load-balancing loss of each micro-batch, weighed by its share of real tokens; it
  depends on what is packed together, as in any implementation.

The load-balancing loss is ``experts / top-k`` times the sum over experts of (routed assignments per
token) x (mean score), Switch Transformer, arXiv 2101.03961, equations 4 to 6.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from lightning_dcp.model.router_replay import PackedRouterReplay, moe_layer_index
from lightning_dcp.parallel.packed_params import BoundPackedSeqParams


class PackedTopKRouter(TopKRouter):
    """Megatron-Core's top-k router, with losses and counts of the micro-batch that is running.

    Attributes:
        sequences: The micro-batch that is running, set by the hooks of ``install_cp_hooks``.
        loss_sums: Of each loss, what this rank added to the step so far: summed over the ranks that
            share the rows and the micro-batches, and divided by the tokens or sequences of the
            global batch, it is the loss's mean without its coefficient.
        router_replay: Its replay, a :class:`PackedRouterReplay`; None where there is none.
    """

    router_replay: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sequences: BoundPackedSeqParams | None = None
        self.loss_sums: dict[str, Tensor] = {}
        if self.router_replay is not None:
            self.router_replay = PackedRouterReplay.in_place_of(self.router_replay)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As Megatron-Core's, with the routes that the micro-batch brings for this layer."""
        replay = self.router_replay
        result: tuple[Tensor, Tensor]
        # Depths of multi-token prediction have routers too, which routes say nothing about.
        if replay is None or self.sequences is None or self.is_mtp_layer:
            result = super().routing(logits, padding_mask)
            return result
        routes = self.sequences.routes
        layer = moe_layer_index(self.config, self.layer_number)
        num_rows = logits.shape[:-1].numel()
        if routes.replayed is not None and routes.has_route is not None:
            replay.replay(
                self._rows_here(routes.replayed[:, layer], num_rows),
                self._rows_here(routes.has_route, num_rows),
            )
        try:
            result = super().routing(logits, padding_mask)
            if routes.recorded is not None:
                num_own = self._num_own_rows(self.sequences.layout.num_rows)
                # Compact: they stay until the whole global batch has run.
                routes.recorded[layer] = replay.get_recorded_indices()[:num_own].to(routes.dtype)
        finally:
            # After an error too: the next pass would replay the routes of this micro-batch.
            replay.clear_indices()
        return result

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attaches the z-loss of this rank's real rows; ``logits`` ``[rows, experts]``."""
        coefficient = self.config.moe_z_loss_coeff
        # A recomputed layer's first pass runs without gradients: counted once, in the second.
        if not coefficient or not (self.training and torch.is_grad_enabled()):
            return logits
        # [rows], in float32: squares of bfloat16 have three digits.
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0)
        return self._attach(logits, "moe_z_loss", squares.sum(), coefficient, "tokens")

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if not coefficient:
            return probs
        # Counts have no gradient, so that they may be summed like this; scores stay this rank's, or
        # each rank's share of the loss would count once a rank.
        counts = self._summed_over_group(routing_map.sum(0).float())
        num_tokens = sum(self._bound.layout.lengths)
        scores = scores_for_aux_loss.sum(0)
        # The mean over the micro-batch's tokens, times their number: its weight in the batch.
        loss = self.num_experts / self.topk * (counts * scores).sum() / num_tokens
        return self._attach(probs, "moe_aux_loss", loss, coefficient, "tokens")

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if not coefficient:
            return probs
        # Rows that a dispatcher added at the end count for sequence 0, with nothing.
        of_rows = self._bound.on_device("sequence_of_row", probs.device)
        sequence_of_row = self._rows_here(of_rows, len(probs))
        lengths = self._bound.on_device("lengths", probs.device).float()
        shape = (len(lengths), self.num_experts)
        counts = torch.zeros(shape, device=probs.device)
        counts.index_add_(0, sequence_of_row, routing_map.float())
        counts = self._summed_over_group(counts)
        scores = torch.zeros(shape, device=probs.device)
        scores = scores.index_add(0, sequence_of_row, scores_for_aux_loss)
        # Squared: assignments and scores are both means over the sequence's tokens.
        of_sequence = (counts * scores).sum(1) / lengths.square()
        loss = self.num_experts / self.topk * of_sequence.sum()
        return self._attach(probs, "moe_seq_aux_loss", loss, coefficient, "sequences")

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if (
            not self.enable_expert_bias
            or not self.enable_expert_bias
            or not torch.is_grad_enabled()
        ):
            return
        with torch.no_grad():
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += routing_map.sum(0)

    @property
    def _bound(self) -> BoundPackedSeqParams:
        if self.sequences is None:
            raise RuntimeError(
                "The router's losses need the micro-batch: call install_cp_hooks on the model."
            )
        return self.sequences

    def _summed_over_group(self, counts: Tensor) -> Tensor:
        """Sums over the ranks that share the micro-batch's rows: its CP group, and TP's slices."""
        # The same order on all ranks. A CP group lies across the TP groups of its ranks, so that
        # two ranks that took them the other way round would wait for each other.
        counts = counts.contiguous()
        for group in (self._bound.cp_group, self.tp_group):
            is_tp = group is self.tp_group
            if dist.get_world_size(group) > 1 and (not is_tp or self.config.sequence_parallel):
                dist.all_reduce(counts, group=group)
        return counts

    def _num_own_rows(self, num_rows: int) -> int:
        """Of a rank's rows of the micro-batch, those that this router routes."""
        tp_size = dist.get_world_size(self.tp_group) if self.config.sequence_parallel else 1
        return num_rows // tp_size

    def _rows_here(self, rows: Tensor, num_rows: int) -> Tensor:
        """Of the CP rank's ``[rows, ...]`` those that this router routes, ``[num_rows, ...]``.

        Under sequence parallelism they are this rank's slice. Rows that the all-gather dispatcher
        added at the end are 0.
        """
        layout, most = self._bound.layout, self._bound.max_rows_of_step
        own = self._num_own_rows(layout.num_rows)
        gathers = self.config.moe_token_dispatcher_type == "allgather"
        allowed = {own, max(own, self._num_own_rows(most))} if gathers else {own}
        if len(rows) != layout.num_rows or num_rows not in allowed:
            raise RuntimeError(
                f"The router of layer {self.layer_number} got {num_rows} rows, and values of "
                f"{len(rows)}; the micro-batch has {layout.num_rows} rows, of which this rank "
                f"routes {own}."
            )
        if own < len(rows):
            # Sequence parallelism cuts rows evenly, in the order of the tensor-parallel ranks.
            rows = rows[own * dist.get_rank(self.tp_group) :][:own]
        added = num_rows - own
        return F.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, added)) if added else rows

    def _attach(
        self, activation: Tensor, name: str, loss: Tensor, coefficient: float, per: str
    ) -> Tensor:
        """Makes the backward pass add a loss that the engine later divides by all targets.

        ``loss`` is this rank's part of the micro-batch's sum over what the loss is a mean ``per``:
        the global batch's "tokens" or "sequences".
        """
        batch = self._bound.batch_totals
        share = loss / (batch.tokens if per == "tokens" else batch.sequences)
        if self.is_mtp_layer and self.config.mtp_use_repeated_layer:
            # One layer serves all depths: its router runs, and adds its loss, once for each.
            share = share / self.config.mtp_num_layers
        # Detached: the sum would keep the graph of every micro-batch alive.
        self.loss_sums[name] = self.loss_sums.get(name, 0) + share.detach()
        attached: Tensor = MoEAuxLossAutoScaler.apply(
            activation, share * coefficient * batch.targets
        )
        return attached


class PackedMoELayer(MoELayer):
    """Megatron-Core's MoE layer, where ranks of an expert-parallel group hold different rows."""

    sequences: BoundPackedSeqParams | None = None

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> Any:
        """As Megatron-Core's; ``hidden_states`` ``[rows, 1, hidden]``."""
        missing = self._missing_rows(len(hidden_states))
        if not missing:
            return super().forward(hidden_states, intermediate_tensors, padding_mask)
        num_rows = len(hidden_states)
        hidden_states = F.pad(hidden_states, (0, 0, 0, 0, 0, missing))
        if padding_mask is not None:
            # As padding: no loss and no expert's count sees these rows.
            padding_mask = F.pad(padding_mask, (0, missing), value=True)
        output, bias = super().forward(hidden_states, intermediate_tensors, padding_mask)
        return output[:num_rows], bias

    def _missing_rows(self, num_rows: int) -> int:
        # The all-gather dispatcher needs as many rows on every rank. Under dynamic groups a rank's
        # rows follow its pack, so that they are padded to the most that any rank has in this step
        # of the plan, a number that all ranks know without asking.
        gathers = self.config.moe_token_dispatcher_type == "allgather"
        if not gathers or self.sequences is None or dist.get_world_size(self.ep_group) == 1:
            return 0
        most = self.sequences.max_rows_of_step
        if self.config.sequence_parallel:
            # A plan counts the rows of a CP rank, which its tensor-parallel ranks share.
            most //= dist.get_world_size(self.attn_tp_group)
        return max(most - num_rows, 0)
