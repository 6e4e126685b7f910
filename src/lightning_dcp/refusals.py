"""What cannot work together, refused before any work starts."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType

from lightning_dcp.alignment import PackPadding, longest_that_fits, rows_per_rank
from lightning_dcp.parallel import ParallelSizes

Cap = int | Literal["auto"]


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Refuses what the Trainer or the module is set to and the engine cannot honour.

    Raises:
        ValueError: Gradient accumulation, or clipping by value.
        NotImplementedError: Manual optimization.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) does not work "
            "with DynamicCPStrategy: micro-batches are planned inside one global batch, and their "
            "gradients add up there. Leave it at 1 and raise the DataModule's global_batch_size."
        )
    if (
        trainer.gradient_clip_val is not None
        and trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    ):
        raise ValueError(
            "Trainer(gradient_clip_algorithm='value') does not work with DynamicCPStrategy, whose "
            "optimizer clips by the global norm. Leave it out, or use 'norm'."
        )
    if not module.automatic_optimization:
        raise NotImplementedError(
            f"{type(module).__name__} sets automatic_optimization=False. DynamicCPStrategy runs "
            "forward, backward and the optimizer step itself; leave it True."
        )


def check_vocabulary(trainer: Trainer, module: LightningModule) -> None:
    """Refuses a DataModule whose tokenizer has ids that the model's vocabulary lacks.

    Raises:
        ValueError: The DataModule's ``vocab_size`` is larger than the model's.
    """
    datamodule = getattr(trainer, "datamodule", None)
    of_data = getattr(datamodule, "vocab_size", None)
    of_model = getattr(module, "vocab_size", None)
    if isinstance(of_data, int) and isinstance(of_model, int) and of_data > of_model:
        raise ValueError(
            f"{type(datamodule).__name__} has a vocabulary of {of_data} ids, the model one of "
            f"{of_model}. Set the model's vocab_size to {of_data}."
        )


def resolve_cap(cap: Cap, *, trainer: Trainer, sizes: ParallelSizes, padding: PackPadding) -> int:
    """The cap as a number: ``"auto"`` follows from the DataModule's ``max_length``.

    Args:
        cap: A checked ``max_seqlen_per_dp_cp_rank``.
        trainer: Knows the DataModule.
        sizes: The parallel sizes of the run.
        padding: How packs are padded; the cap holds them.

    Raises:
        ValueError: ``"auto"`` without a DataModule that has a ``max_length``, or packs that are
            padded beyond the cap.
    """
    number = cap if isinstance(cap, int) else _cap_of_data(trainer, sizes, padding)
    padding.check_cap(number, sizes.dp_cp_size, sizes.tensor_model_parallel_size)
    return number


def check_cap(cap: object) -> Cap:
    """A checked ``max_seqlen_per_dp_cp_rank``.

    Raises:
        ValueError: It is missing or below 1.
        TypeError: It is neither an int nor ``"auto"``.
    """
    if cap is None:
        raise ValueError(
            "DynamicCPStrategy needs max_seqlen_per_dp_cp_rank: the most rows (tokens, padding "
            "included) that a rank may hold of one micro-batch. The tokens a GPU held before, "
            "packed-sequence budget / context_parallel_size, keep memory as it was."
        )
    if cap == "auto":
        return "auto"
    if not isinstance(cap, int) or isinstance(cap, bool):
        raise TypeError(f"max_seqlen_per_dp_cp_rank must be an int or 'auto', found {cap!r}.")
    if cap < 1:
        raise ValueError(f"max_seqlen_per_dp_cp_rank must be at least 1, found {cap}.")
    return cap


def _cap_of_data(trainer: Trainer, sizes: ParallelSizes, padding: PackPadding) -> int:
    max_length = getattr(getattr(trainer, "datamodule", None), "max_length", None)
    if not isinstance(max_length, int):
        raise ValueError(
            "max_seqlen_per_dp_cp_rank='auto' follows from the DataModule's max_length, and there "
            "is none. Give the number: Trainer(strategy=DynamicCPStrategy("
            "max_seqlen_per_dp_cp_rank=4096))."
        )
    pool, tp_size = sizes.dp_cp_size, sizes.tensor_model_parallel_size
    cap = padding.pack_rows(rows_per_rank(max_length, pool, tp_size, padding), pool, tp_size)
    assert longest_that_fits(cap, pool, tp_size, padding) >= max_length
    return cap
