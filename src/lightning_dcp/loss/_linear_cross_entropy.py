"""Cross-entropy of a linear layer's output that never holds the logits."""

from __future__ import annotations

from typing import Literal, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.config.checks import check_at_least, check_not_negative
from lightning_dcp.loss._autograd import LossArguments, RowLosses, SummedLoss, apply
from lightning_dcp.loss._rows import target_rows
from lightning_dcp.loss._shard import make_shard
from lightning_dcp.loss._softmax import LossTerms, statistics_dtype

_MIN_CHUNK_ROWS = 128
_MAX_CHUNK_ROWS = 2048


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss_mask: Tensor | None = ...,
    temperature: float | Tensor | None = ...,
    reduction: Literal["sum", "none"] = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    tp_group: dist.ProcessGroup | None = ...,
    vocab_size: int | None = ...,
    chunk_rows: int | None = ...,
    return_entropy: Literal[False] = ...,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss_mask: Tensor | None = ...,
    temperature: float | Tensor | None = ...,
    reduction: Literal["sum", "none"] = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    tp_group: dist.ProcessGroup | None = ...,
    vocab_size: int | None = ...,
    chunk_rows: int | None = ...,
    return_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss_mask: Tensor | None = None,
    temperature: float | Tensor | None = None,
    reduction: Literal["sum", "none"] = "sum",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of ``hidden @ weight.T / temperature`` against ``labels``, in chunks of rows.

    Two forms. ``reduction="sum"`` makes the gradient in the forward pass, while a chunk's logits
    exist: three matrix products, as many as the plain loss. ``reduction="none"`` gives each row's
    loss and computes the logits again in the backward pass, so that any weights or terms on
    top get true per-row gradients. Rows are this rank's; nothing is divided by a number of tokens.

    Statistics are float32 whatever the inputs are (float64 for float64 inputs), and so is the sum
    of the weight's gradient over chunks; products run in the dtype of the inputs, under autocast
    too. Results are the same on all ranks of ``tp_group``, and all but ``weight`` must be.

    Args:
        hidden: Hidden states [rows, h], the same on all ranks of ``tp_group``; their gradient is
            summed over the group.
        weight: Output weight [local vocabulary, h] of ``hidden``'s dtype. Rank r of ``tp_group``
            holds rows r * local to (r + 1) * local of the whole.
        labels: Global target ids [rows]; ``IGNORE_INDEX`` (-100) marks a row without a target.
        loss_mask: Rows that count [rows], bool or 0 and 1; others are ignored whatever they hold,
            NaN too. Weights other than 0 and 1 go on top of ``reduction="none"``.
        temperature: What logits are divided by: a number, or one per row [rows]. Expand one per
            sequence with ``torch.repeat_interleave``. Default: 1.
        reduction: ``"sum"`` or ``"none"``.
        label_smoothing: Share of the target spread evenly over the real vocabulary, in [0, 1).
        z_loss: Factor of ``log_sum_exp ** 2``, added to each row's loss (PaLM, section 5).
        tp_group: Tensor-parallel group over which the vocabulary is split.
        vocab_size: Real vocabulary; rows of the padded weight from there on never count. Default:
            all rows.
        chunk_rows: Rows whose logits exist at a time, the same on all ranks of ``tp_group``.
            Default: 128 to 2048, so that a chunk takes less than a fiftieth of what plain
            cross-entropy takes, or little beside the weight's gradient.
        return_entropy: Also give each row's entropy in nats, differentiable; ``"none"`` only.

    Returns:
        The sum of the losses, a scalar, exactly 0 without a target; or each row's loss [rows],
        exactly 0 in ignored rows; with ``return_entropy`` the pair (losses, entropies). float32
        (float64 for float64 inputs).

    Raises:
        ValueError: A value or a length that does not fit. On a GPU, what only the device knows (a
            label outside the vocabulary, a temperature that is not above 0) is asserted
            asynchronously; see :func:`check_labels`.
        TypeError: Different or unsupported dtypes.
    """
    check_tensors(hidden, weight, labels, loss_mask, temperature)
    _check_options(reduction, label_smoothing, z_loss, return_entropy)
    shard = make_shard(weight, vocab_size, tp_group)
    rows = target_rows(
        labels.long(),
        vocab_size=shard.vocab_size,
        loss_mask=loss_mask,
        temperature=temperature,
        dtype=statistics_dtype(hidden.dtype),
    )
    terms = LossTerms(label_smoothing, z_loss, return_entropy)
    arguments = LossArguments(rows, shard, terms, rows_of_chunk(hidden, chunk_rows))
    if reduction == "sum":
        return cast(Tensor, apply(SummedLoss, hidden, weight, arguments))
    losses, entropy = apply(RowLosses, hidden, weight, arguments)
    return (losses, entropy) if return_entropy else losses


def rows_of_chunk(hidden: Tensor, chunk_rows: int | None) -> int:
    """``chunk_rows``; by default from what is the same on all tensor-parallel ranks only."""
    if chunk_rows is not None:
        return check_at_least("chunk_rows", chunk_rows)
    rows, width = hidden.shape
    # Plain cross-entropy holds three times `rows` logits (themselves, log-softmax, gradient); the
    # weight's gradient in float32 is `width` wide, and is read and written once a chunk.
    wanted = max(rows * hidden.element_size() // 64, width // 4)
    return min(max(wanted, _MIN_CHUNK_ROWS), _MAX_CHUNK_ROWS)


def check_tensors(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None,
    temperature: float | Tensor | None,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight is {list(weight.shape)}: they must be "
            f"[rows, h] and [local vocabulary, h]"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise TypeError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}: both must have the same "
            f"floating-point dtype"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels is {labels.dtype}: it must be an integer dtype")
    per_row = {"labels": labels, "loss_mask": loss_mask, "temperature": temperature}
    for name, value in per_row.items():
        if isinstance(value, Tensor) and value.shape != hidden.shape[:1]:
            raise ValueError(
                f"{name} is {list(value.shape)}, but hidden has {hidden.shape[0]} rows: give "
                f"one value per row"
            )


def _check_options(
    reduction: str, label_smoothing: float, z_loss: float, return_entropy: bool
) -> None:
    if reduction not in ("sum", "none"):
        raise ValueError(
            f"reduction is {reduction!r}: it must be 'sum' or 'none'. A mean is the sum over the "
            f"number of target tokens of the whole global batch"
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}: it must be in [0, 1)")
    check_not_negative(z_loss=z_loss)
    if return_entropy and reduction != "none":
        raise ValueError("return_entropy=True needs reduction='none'")
