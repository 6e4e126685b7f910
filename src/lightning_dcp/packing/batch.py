"""A global batch, taken apart and checked once, on the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dcp.packing.jagged import Jagged, is_jagged, read_jagged

IGNORE_INDEX = -100
"""Label of a token that is no target, as in ``torch.nn.functional.cross_entropy``."""

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Types that torch can store and do little else with."""


@dataclass(frozen=True)
class GlobalBatch:
    """The sequences of one optimizer step; the same on every rank of the DPxCP pool.

    Attributes:
        input_ids: Token ids.
        labels: Which token each position holds as a target, unshifted: position ``i`` predicts the
            label at ``i + 1``. ``IGNORE_INDEX`` is no target. The input ids themselves by default.
        loss_mask: Which positions are targets, unshifted; None means all.
        extras: Further keys: jagged ones follow their tokens, dense ones ``[num_samples, ...]``
            their samples. Jagged ones that were allowed to may lack a sample's last row.
    """

    input_ids: Jagged
    labels: Jagged
    loss_mask: Jagged | None = None
    extras: dict[str, Jagged | Tensor] = field(default_factory=dict)

    @property
    def lengths(self) -> np.ndarray:
        """``[num_samples]`` int64: tokens of each sample."""
        return self.input_ids.lengths

    def num_targets_from(self, position: int) -> Tensor:
        """int64 scalar: targets at this position of their samples or later.

        The next token has those from 1 on, depth ``k`` of multi-token prediction from ``k + 1``.
        """
        lengths = self.labels.lengths
        is_target = self.labels.token_rows() != IGNORE_INDEX
        if self.loss_mask is not None:
            is_target &= self.loss_mask.token_rows().bool()
        # All targets less the early ones: an index of the few is cheaper than one of all others.
        left_out = np.minimum(lengths, position)
        firsts = np.cumsum(lengths) - lengths - (np.cumsum(left_out) - left_out)
        early = torch.from_numpy(np.repeat(firsts, left_out) + np.arange(left_out.sum()))
        early = early.to(is_target.device)
        return is_target.count_nonzero() - is_target.index_select(0, early).count_nonzero()

    def __len__(self) -> int:
        return len(self.lengths)


def read_global_batch(
    batch: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
    may_lack_last: Collection[str] = (),
) -> GlobalBatch:
    """Takes a batch of a DataModule apart and refuses what cannot be trained on.

    Args:
        batch: ``input_ids`` as a jagged NestedTensor; optionally ``labels`` and ``loss_mask`` with
            the same lengths, jagged extras with the same lengths and any trailing shape, and dense
            per-sample tensors ``[num_samples, ...]``.
        vocab_size: Ids must be in ``0 .. vocab_size - 1``; None leaves them unchecked.
        may_lack_last: Jagged extras that may have one row less than a sample has tokens.

    Raises:
        TypeError: The batch is no mapping, ``input_ids`` is not jagged, or a value no tensor.
        ValueError: An empty batch, an empty sequence, token ids outside the vocabulary, or a key
            whose lengths are not those of ``input_ids``.
    """
    _check_one_batch(batch)
    tokens = read_jagged(batch["input_ids"], "input_ids")
    if len(tokens.lengths) == 0:
        raise ValueError("The batch is empty: 'input_ids' holds no sequence.")
    if tokens.lengths.min() < 1:
        where = int(tokens.lengths.argmin())
        raise ValueError(
            f"Sample {where} of the batch is empty (length {tokens.lengths[where]}). Leave empty "
            "sequences out in the DataModule."
        )
    rest = {
        key: _read_key(key, value, batch["input_ids"], tokens, may_lack=int(key in may_lack_last))
        for key, value in batch.items()
        if key != "input_ids"
    }
    # Read as any other key, so that one place compares lengths.
    labels, loss_mask = (_pop_jagged(rest, key) for key in ("labels", "loss_mask"))
    tokens = _checked_ids(tokens, "input_ids", vocab_size, ignore=False)
    if labels is not None:
        labels = _checked_ids(labels, "labels", vocab_size, ignore=True)
    if loss_mask is not None:
        _check_mask(loss_mask)
    return GlobalBatch(tokens, tokens if labels is None else labels, loss_mask, rest)


def _check_one_batch(batch: Any) -> None:
    is_dict = isinstance(batch, Mapping)
    if is_dict and "input_ids" in batch:
        return
    # What Lightning makes of a dict or list of train loaders.
    parts = batch.values() if is_dict else batch if isinstance(batch, (list, tuple)) else ()
    if any(isinstance(part, Mapping) and "input_ids" in part for part in parts):
        raise TypeError(
            f"Found a {type(batch).__name__} of {len(batch)} batches, as several loaders give; a "
            "step runs one global batch: give one loader, whose batches hold the samples of all."
        )
    if not is_dict:
        raise TypeError(f"A batch must be a dict with 'input_ids', found a {type(batch).__name__}.")
    raise ValueError(f"The batch has no 'input_ids'; its keys are {sorted(batch)}.")


def _read_key(
    key: str, value: Any, input_ids: Any, tokens: Jagged, *, may_lack: int
) -> Jagged | Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"'{key}' must be a jagged NestedTensor or a tensor [num_samples, ...], found a "
            f"{type(value).__name__}."
        )
    if not is_jagged(value):
        if value.dim() == 0 or value.shape[0] != len(tokens.lengths):
            raise ValueError(
                f"'{key}' is a dense tensor of shape {tuple(value.shape)}; a per-sample tensor "
                f"has {len(tokens.lengths)} rows, one per sample."
            )
        return value
    of_key: Any = value
    if of_key.offsets() is input_ids.offsets() and of_key.lengths() is input_ids.lengths():
        # Built from the same offsets: the same lengths, without reading them again.
        jagged = Jagged(value.values(), tokens.starts, tokens.lengths)
        jagged.check_inside(key)
        return jagged
    jagged = read_jagged(value, key)
    if len(jagged.lengths) != len(tokens.lengths):
        raise ValueError(
            f"'{key}' has {len(jagged.lengths)} samples, 'input_ids' has {len(tokens.lengths)}."
        )
    lacking = tokens.lengths - jagged.lengths
    differ = np.flatnonzero((lacking < 0) | (lacking > may_lack))
    if len(differ):
        where = int(differ[0])
        raise ValueError(
            f"'{key}' of sample {where} has {jagged.lengths[where]} rows, its 'input_ids' "
            f"{tokens.lengths[where]} tokens. A jagged key needs one row a token"
            f"{'; this one may lack the last' if may_lack else ''}."
        )
    if not lacking.any() and np.array_equal(jagged.starts, tokens.starts):
        # Stored alike: packing then makes one index for both.
        return Jagged(jagged.values, tokens.starts, tokens.lengths)
    return jagged


def _pop_jagged(rest: dict[str, Jagged | Tensor], key: str) -> Jagged | None:
    value = rest.pop(key, None)
    if isinstance(value, Tensor):
        raise TypeError(f"'{key}' must be a jagged NestedTensor with one row a token.")
    return value


def _check_one_value_a_token(jagged: Jagged, name: str) -> None:
    if jagged.values.dim() != 1:
        raise ValueError(
            f"'{name}' needs one value a token, found {tuple(jagged.values.shape[1:])} values each."
        )


def _checked_ids(jagged: Jagged, name: str, vocab_size: int | None, *, ignore: bool) -> Jagged:
    """The ids, or an error that names the first sample with one outside the vocabulary.

    On a device the comparison would wait for it at every step: those are left to the embedding.
    """
    _check_one_value_a_token(jagged, name)
    values = jagged.values
    if values.is_floating_point() or values.dtype == torch.bool:
        raise TypeError(f"'{name}' must hold integers, found {values.dtype}.")
    if values.dtype in _UNSIGNED:
        values = values.to(torch.int64)
        jagged = Jagged(values, jagged.starts, jagged.lengths)
    if vocab_size is None or values.device.type != "cpu" or values.numel() == 0:
        return jagged
    # One pass without a mask as large as the batch; where ids are ignored, the masks follow.
    low, high = (int(bound) for bound in torch.aminmax(values))
    if low >= 0 and high < vocab_size:
        return jagged
    bad = (values < 0) | (values >= vocab_size)
    if ignore:
        bad &= values != IGNORE_INDEX
    found = jagged.first_where(bad)
    if found is not None:
        sample, where = found
        raise ValueError(
            f"'{name}' of sample {sample} holds id {int(values[jagged.starts[sample] + where])} at "
            f"position {where}; the vocabulary has ids 0 to {vocab_size - 1}. Use the tokenizer "
            "that the model's vocab_size is for, or a larger vocab_size."
        )
    return jagged


def _check_mask(mask: Jagged) -> None:
    """Refuses weights: they would be read as a selection. Host tensors only, as above."""
    _check_one_value_a_token(mask, "loss_mask")
    values = mask.values
    if values.dtype == torch.bool or values.device.type != "cpu":
        return
    is_selection = (values == 0) | (values == 1)
    found = None if is_selection.all() else mask.first_where(~is_selection)
    if found is not None:
        sample, where = found
        raise ValueError(
            f"'loss_mask' of sample {sample} holds {values[mask.starts[sample] + where].item()}; "
            "it selects targets, with 0 and 1 only. Give weights as an extra key of the batch and "
            "name it in DynamicCPModule(objective=SFT(token_weight=...))."
        )
