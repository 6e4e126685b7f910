"""Multi-token prediction under dynamic groups: each depth reads further tokens of its own sequence.

Depth ``k`` predicts the token after the next ``k`` (DeepSeek-V3, arXiv 2412.19437, section 2.2).
Megatron-Core's block is used as it is, but for what it rolls over the static CP group: ids and
labels come with the micro-batch, read from whole sequences before the cut, so that no rank asks
another. Rows near a sequence's end, which have no token so far on, see id 0 and have no target;
experts count them as they do in the layers before.

What a depth adds to the loss is its mean over its own targets in the global batch, times
``mtp_loss_scaling_factor`` over the number of depths. It is attached to the hidden states, as
router losses are: any loss that is made from them trains the depths too, and nothing else changes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_dcp.loss import linear_cross_entropy
from lightning_dcp.model.chunk import ModelChunk
from lightning_dcp.model.layers import RMSNorm
from lightning_dcp.parallel.packed_params import BoundPackedSeqParams


class PackedMTPLayer(MultiTokenPredictionLayer):
    """One depth of Megatron-Core's, which embeds the ids that the micro-batch has for it."""

    def _get_embeddings(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        embedding: Any,
        hidden_states: Tensor,
        packed_seq_params: BoundPackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Any, ...]:
        assert packed_seq_params is not None
        # Ids alone move on: with rope the embedding does not look at positions.
        ids = packed_seq_params.mtp[self.layer_number - 1].input_ids
        decoder_input = embedding(input_ids=ids[None], position_ids=position_ids)
        return input_ids, position_ids, padding_mask, decoder_input, hidden_states


class MTPModel(ModelChunk):
    """GPTModel with multi-token prediction for packed sequences under any CP group.

    The depths run in training only: losses and predictions of other passes are those of the model
    alone.

    Attributes:
        mtp_loss_sums: ``[depths]`` float32: what this rank added to each depth's mean loss in this
            step so far; None before the first.
        real_vocab_size: Columns of the head from there on are padding.
    """

    config: TransformerConfig

    def __init__(self, *args: Any, real_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.real_vocab_size = real_vocab_size
        self.mtp_loss_sums: Tensor | None = None
        self._config_of_head = copy.copy(self.config)
        self._config_of_head.mtp_num_layers = None
        tied_elsewhere = self.share_embeddings_and_output_weights and not self.pre_process
        if self.mtp_process and tied_elsewhere:
            # This stage has the embedding for the depths, and ties the head to that.
            self.output_layer.weight = None

    def _postprocess(
        self, hidden_states: Tensor, *, mtp_in_postprocess: bool, **inputs: Any
    ) -> Any:
        """The head, as if there were no depths, on states that their losses are attached to."""
        if mtp_in_postprocess and self.training and torch.is_grad_enabled():
            hidden_states = self._with_losses(hidden_states, **inputs)
        # Where its config has depths, Megatron-Core splits the states again, for losses of its own.
        config, self.config = self.config, self._config_of_head
        try:
            return super()._postprocess(
                hidden_states=hidden_states, mtp_in_postprocess=False, **inputs
            )
        finally:
            self.config = config

    def _with_losses(
        self,
        hidden_states: Tensor,
        *,
        position_ids: Tensor,
        packed_seq_params: BoundPackedSeqParams,
        padding_mask: Tensor | None,
        rotary_pos_emb: Tensor | None,
        **unused: Any,
    ) -> Tensor:
        depths = self.config.mtp_num_layers
        if len(packed_seq_params.mtp) != depths:
            raise RuntimeError(
                f"The model has mtp_num_layers={depths}, and the micro-batch carries tokens for "
                f"{len(packed_seq_params.mtp)} depths. Prepare the batch with "
                f"engine.prepare(..., mtp_depths={depths})."
            )
        states = self.mtp(
            # Each depth reads its own off the micro-batch.
            input_ids=None,
            position_ids=position_ids,
            hidden_states=hidden_states,
            attention_mask=None,
            padding_mask=padding_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            embedding=self.embedding,
        )
        # [(1 + depths) * rows, 1, hidden_size]: the block stacks them along the rows.
        hidden_states, *of_depths = states.chunk(1 + depths)
        losses = self._losses(of_depths, packed_seq_params)
        before = self.mtp_loss_sums
        self.mtp_loss_sums = losses.detach() if before is None else before + losses.detach()
        # The engine divides everything by the targets of the next token.
        scale = self.config.mtp_loss_scaling_factor * packed_seq_params.batch_totals.targets
        attached: Tensor = MTPLossAutoScaler.apply(hidden_states, losses.mean() * scale)
        return attached

    def _losses(self, of_depths: list[Tensor], sequences: BoundPackedSeqParams) -> Tensor:
        """``[depths]``: this rank's part of each depth's mean loss; 0 where it has no target."""
        tp_group = self.pg_collection.tp
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        losses = []
        for hidden, targets, num_targets in zip(
            of_depths, sequences.mtp, sequences.batch_totals.mtp_targets, strict=True
        ):
            if self.config.sequence_parallel:
                # The fused loss sums the gradient over the group itself.
                hidden = gather_from_sequence_parallel_region(
                    hidden, tensor_parallel_output_grad=False, group=tp_group
                )
            loss = linear_cross_entropy(
                hidden[:, 0],
                weight,
                targets.labels,
                tp_group=tp_group if tp_group.size() > 1 else None,
                vocab_size=self.real_vocab_size,
            )
            losses.append(loss / torch.as_tensor(num_targets, device=loss.device).clamp(min=1))
        return torch.stack(losses)


def mtp_block(
    layer: ModuleSpec, config: TransformerConfig, virtual_stage: int | None, *, fused: bool
) -> MultiTokenPredictionBlockSubmodules | None:
    """The depths of this rank's stage, each with a layer like the decoder's; None on others."""
    block = get_gpt_mtp_block_spec(
        config, layer, use_transformer_engine=fused, vp_stage=virtual_stage
    )
    for spec in block.layer_specs if block is not None else ():
        spec.module = PackedMTPLayer
        # Megatron-Core's spec takes whichever norm an earlier call left in a global of the module.
        if not fused:
            spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = RMSNorm
    return block
