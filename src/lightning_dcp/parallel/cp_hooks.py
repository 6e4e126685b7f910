"""Hooks that put a micro-batch, with its CP group, into Megatron-Core's model.

``SelfAttention`` takes rope's CP group from its ``pg_collection.cp``, which is the static group,
and not from ``packed_seq_params.cp_group``. Each attention module therefore gets its own copy of
the collection, whose ``cp`` is swapped around its forward. The micro-batch's group arrives as a
keyword argument there, so a recomputed forward sees the right group too.

Modules that are not handed the packed boundaries (routers, heads) have an attribute ``sequences``
instead. It is set when the model starts on a micro-batch, and again when the backward pass of that
micro-batch reaches the model: layers that are recomputed there see their own micro-batch, also when
a pipeline has run others in between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from torch import Tensor

from lightning_dcp.parallel.packed_params import BoundPackedSeqParams

_INSTALLED = "_follows_micro_batches"


def install_cp_hooks(model: torch.nn.Module) -> Callable[[], None]:
    """Makes every module of ``model`` that needs to know follow the micro-batch that is running.

    The model takes ``packed_seq_params`` by keyword. What is returned takes the hooks away and
    restores the collections; calling it twice is harmless.
    """
    if torch.cuda.is_available():
        from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention

        # TransformerEngine's attention makes its stream for a static CP size only.
        if HAVE_TE and TEDotProductAttention.cp_stream is None:
            TEDotProductAttention.cp_stream = torch.cuda.Stream()
    undo = ExitStack()
    setattr(model, _INSTALLED, True)
    undo.callback(setattr, model, _INSTALLED, False)
    for module in model.modules():
        if isinstance(module, Attention):
            _install_on(module, undo)
    listeners = [module for module in model.modules() if hasattr(module, "sequences")]
    if listeners:
        _announce_to(model, listeners, undo)
    return undo.close


def check_cp_hooks(model: torch.nn.Module) -> None:
    """Raises a RuntimeError if a chunk of a model does not follow the CP groups of micro-batches.

    Attention would then take rope's frequencies from the static CP group, without a word.
    """
    if not getattr(model, _INSTALLED, False):
        raise RuntimeError(
            f"This {type(model).__name__} does not follow the CP groups of its micro-batches: call "
            "lightning_dcp.parallel.install_cp_hooks on it (on each of model_chunks(model)) before "
            "the first step."
        )


def _announce_to(model: torch.nn.Module, listeners: list[Any], undo: ExitStack) -> None:
    def announce(sequences: BoundPackedSeqParams | None) -> None:
        for listener in listeners:
            listener.sequences = sequences

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        announce(kwargs.get("packed_seq_params"))

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        sequences = kwargs.get("packed_seq_params")
        for tensor in output if isinstance(output, tuple) else (output,):
            # The gradient of the output is the first thing that a backward pass makes here.
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: announce(sequences))

    # Else the listeners keep the last micro-batch's tensors alive.
    undo.callback(announce, None)
    undo.enter_context(model.register_forward_pre_hook(before, with_kwargs=True))
    undo.enter_context(model.register_forward_hook(after, with_kwargs=True))


def _install_on(attention: Any, undo: ExitStack) -> None:
    # The whole model shares one collection, and others read its `cp` for what it is, the static
    # group: with a copy each, attention modules alone see the swap.
    shared = attention.pg_collection
    attention.pg_collection = copy.copy(shared)
    undo.callback(setattr, attention, "pg_collection", shared)

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        group = getattr(kwargs.get("packed_seq_params"), "cp_group", None)
        module.pg_collection.cp = shared.cp if group is None else group

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        module.pg_collection.cp = shared.cp

    undo.enter_context(attention.register_forward_pre_hook(before, with_kwargs=True))
    # Always: after an error, too, the static group is to be back.
    undo.enter_context(attention.register_forward_hook(after, with_kwargs=True, always_call=True))
