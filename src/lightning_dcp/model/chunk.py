"""This rank's chunk of the model: Megatron-Core's GPTModel, made to be copied and pickled."""

from __future__ import annotations

import copy
from typing import Any, override

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from lightning_dcp.model.whole import WholeModel
from lightning_dcp.parallel import ParallelContext


class ModelChunk(GPTModel):
    """GPTModel, of which a copy runs on the same process groups, and a pickle is the whole model.

    Attributes:
        context: The parallel state that it was built on.
    """

    context: ParallelContext

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelChunk:
        # Groups are the run's, not the model's, and cannot be copied.
        memo.update((id(group), group) for group in self.context.groups)
        for part in self.modules():
            # A run hangs functions of its own on it.
            config = getattr(part, "config", None)
            memo[id(config)] = config
            # What a dispatcher of experts keeps of the last step has a graph; the next makes anew.
            of_step = vars(getattr(part, "token_dispatcher", part)).values()
            graphs = (each for each in of_step if isinstance(each, Tensor) and each.grad_fn)
            memo.update((id(each), each.detach()) for each in graphs)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for mine, other in zip(self.parameters(), copied.parameters(), strict=True):
            # Torch copies a parameter without its attributes, such as how it is split over ranks;
            # tensors among them (gradients, masters) stay the original's.
            marks = {key: mark for key, mark in vars(mine).items() if isinstance(mark, int)}
            other.__dict__.update(marks)
        return copied

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        parts = self.context.sizes.parts
        if parts:
            raise TypeError(
                f"This process has a part of the model only ({parts}), which cannot be pickled. "
                "Save the whole with trainer.save_checkpoint(path); copy.deepcopy copies the part."
            )
        return WholeModel, (self.state_dict(),)
