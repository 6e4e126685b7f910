"""An objective: from what the model says of each row, and the batch's extras, to a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_dcp.packing import GlobalBatch, Jagged, MicroBatch


@dataclass(frozen=True)
class Extra:
    """A key of the batch that an objective reads, and what has to stand under it.

    Values are floating point unless said otherwise. Anything else is an error before the step.

    Attributes:
        key: The key in the dict that the DataModule gives.
        of: ``"token"``: jagged ``[num_samples, length*]``, one value a token. It belongs to the
            token that it stands at, as a label does, and is not shifted: packing brings it to the
            row that predicts this token. ``"sample"``: dense ``[num_samples]``. ``"either"``: one
            of the two.
        num_dims: Dimensions of one value: 0 for a number, 1 for ``k`` numbers.
        integer: Whether the values are ids of the vocabulary or of anything else.
        boolean: Whether the values are True or False.
    """

    key: str
    of: Literal["token", "sample", "either"] = "token"
    num_dims: int = 0
    integer: bool = False
    boolean: bool = False

    @property
    def kind(self) -> str:
        """What the values are, for errors."""
        return "integers" if self.integer else "bool" if self.boolean else "floating point"

    def holds(self, values: Tensor) -> bool:
        """Whether the values are of this kind."""
        is_bool, is_float = values.dtype == torch.bool, values.is_floating_point()
        if self.integer:
            return not (is_bool or is_float or values.is_complex())
        return is_bool if self.boolean else is_float

    @property
    def form(self) -> str:
        """How it has to look, for errors."""
        trailing = "".join(", k" for _ in range(self.num_dims))
        forms = {
            "token": f"a jagged tensor [num_samples, length*{trailing}]",
            "sample": f"a dense tensor [num_samples{trailing}]",
        }
        wanted = [form for of, form in forms.items() if self.of in (of, "either")]
        return f"{' or '.join(wanted)}, {self.kind}"


class Objective(ABC):
    """What a model is trained for. A subclass names the keys that it reads and gives losses.

    A step's loss is the sum of all losses over what they count as, both over the whole global
    batch: an objective never divides by a number of tokens, since a rank knows only its own. The
    count is that of the target tokens, also where weights scale their losses; an objective that is
    no sum over tokens overrides :meth:`count`. Plans, layouts and logs do not change with it::

        @dataclass(frozen=True)
        class Weighted(Objective):
            @property
            def extras(self):
                return (Extra("weights"),)

            def __call__(self, outputs, micro_batch):
                return -outputs.log_probs() * micro_batch.target_extras["weights"]

    Attributes:
        temperature: What logits are divided by; predictions use the same, so that they serve as
            old log-probabilities.
        head: What the model must end in: an output layer over the ``"vocabulary"``, or a
            ``"value"`` a token (``ModelConfig(head=...)``).
        counts: What :meth:`count` counts, in the plural.
    """

    temperature: float = 1.0
    head: ClassVar[Literal["vocabulary", "value"]] = "vocabulary"
    counts: ClassVar[str] = "tokens"

    @property
    def extras(self) -> tuple[Extra, ...]:
        """Keys that the batch must have; ``micro_batch.target_extras`` has them row by row."""
        return ()

    @property
    def keep_together(self) -> str | None:
        """A per-sample key, if any: samples with equal values go into one micro-batch."""
        return None

    @abstractmethod
    def __call__(self, outputs: Any, micro_batch: MicroBatch) -> Tensor:
        """The losses of a micro-batch's rows on this rank.

        Args:
            outputs: :class:`~lightning_dcp.objectives.TargetOutputs`: log-probabilities and
                entropies of the targets, made when asked for; with ``head = "value"``
                :class:`~lightning_dcp.objectives.ValueOutputs`.
            micro_batch: The rows. ``target_extras`` holds each key of :attr:`extras` at the target
                of each row: ``[rows, ...]``, 0 where there is none.

        Returns:
            The loss of each row ``[rows]``, of which those without a target are left out; or a
            scalar, the sum of what this rank counts. Either must depend on ``outputs``, also where
            there is no target: the other ranks of the CP group wait for this one's backward pass.
        """

    def count(self, micro_batch: MicroBatch) -> Tensor:
        """What this rank's losses count as: an int64 scalar tensor, the target tokens by default.

        The step's loss is the sum of all ranks' losses over the sum of these.
        """
        return micro_batch.num_tokens

    def check(self, batch: GlobalBatch, *, vocab_size: int | None = None) -> None:
        """Refuses a global batch that lacks what this objective reads.

        Without ``vocab_size`` ids are left unchecked, as those on a device are.

        Raises:
            ValueError: A key is missing, has another shape, or holds ids outside the vocabulary.
            TypeError: A key has another type.
        """
        for extra in self.extras:
            self._check_extra(extra, batch)
            if extra.integer and vocab_size is not None:
                _check_ids(extra.key, batch.extras[extra.key], vocab_size)

    def _check_extra(self, extra: Extra, batch: GlobalBatch) -> None:
        name = type(self).__name__
        if extra.key not in batch.extras:
            has = ", ".join(repr(key) for key in sorted(batch.extras)) or "none"
            raise ValueError(
                f"{name} needs '{extra.key}' in every batch: {extra.form}. The batch's extra keys: "
                f"{has}. Have the DataModule give it, or name another key in the options of {name}."
            )
        value = batch.extras[extra.key]
        of: str = "token" if isinstance(value, Jagged) else "sample"
        values = value.values if isinstance(value, Jagged) else value
        shape = list(values.shape[1:])
        if extra.of not in (of, "either") or len(shape) != extra.num_dims:
            found = f"jagged with {shape or 'one value'} a token" if of == "token" else "dense"
            raise ValueError(
                f"{name} needs '{extra.key}' as {extra.form}; found it {found}"
                f"{'' if of == 'token' else f', of shape {list(values.shape)}'}."
            )
        if not extra.holds(values):
            raise TypeError(f"{name} needs '{extra.key}' as {extra.form}; found {values.dtype}.")


def _check_ids(key: str, value: Jagged | Tensor, vocab_size: int) -> None:
    # Integers of samples are no token ids (pairs of DPO, say); on a device the comparison would
    # wait for it, at every step.
    if not isinstance(value, Jagged) or value.values.device.type != "cpu":
        return
    bad = (value.values < 0) | (value.values >= vocab_size)
    found = value.first_where(bad) if bad.any() else None
    if found is not None:
        sample, token = found
        row = int(value.starts[sample]) + token
        raise ValueError(
            f"'{key}' of sample {sample} holds id {int(value.values[row][bad[row]][0])} at token "
            f"{token}; the vocabulary has ids 0 to {vocab_size - 1}. Use 0 for tokens that are no "
            "target."
        )


def check_extras(objective: Objective) -> None:
    """Raises a TypeError for an objective that names its keys in another way than by Extra."""
    extras: Any = objective.extras
    if not isinstance(extras, (tuple, list)) or not all(isinstance(one, Extra) for one in extras):
        name = type(objective).__name__
        raise TypeError(
            f"{name}.extras must be a tuple of Extra, found {extras!r}: return "
            "(Extra('weights'),), say, for a key 'weights' with one number a token."
        )
