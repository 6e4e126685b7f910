"""The weights of a whole model, between runs: on the host, on no process groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class WholeModel(torch.nn.Module):
    """Holds whole weights under the names of a whole model; it computes nothing.

    What a module has for its model where no process has a part of it: after a notebook's fit, from
    a checkpoint, out of a pickle. The next run takes the weights up, in any layout.

    Args:
        state: Tensors by their names in the whole model, kept as they are, not copied. What else a
            state dict has is no weight.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                continue
            *path, last = name.split(".")
            part: torch.nn.Module = self
            for each in path:
                if each not in part._modules:
                    part.add_module(each, torch.nn.Module())
                part = part.get_submodule(each)
            if tensor.is_floating_point():
                part.register_parameter(last, torch.nn.Parameter(tensor.detach()))
            else:
                part.register_buffer(last, tensor)
