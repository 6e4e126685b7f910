"""A micro-batch step that fails on one rank: all finish their collectives, and then all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.engine.agreement import raise_refusals
from lightning_dcp.model import hidden_states
from lightning_dcp.packing import MicroBatch


class StepGuard:
    """Stands in for the steps that fail on this rank, and lets all ranks know at the end.

    The other ranks of a CP group wait for this one's part of attention, forward and backward, and
    all ranks for its gradients. A step that fails is therefore followed by a zero that is made from
    the model's output, and its error is kept. An error within the model itself is raised at once.

    Args:
        chunk: Where the model of this rank ends; None leaves only the exchange.
        group: A gloo group of all ranks.
    """

    def __init__(self, chunk: torch.nn.Module | None, group: dist.ProcessGroup) -> None:
        self._chunk = chunk
        self._group = group
        self._error: Exception | None = None
        self._is_inside = False
        self._output: Any = None

    def run(self, step: Callable[[MicroBatch], Tensor], micro_batch: MicroBatch) -> Tensor:
        """What the step gives, or a zero with the model's backward pass where it fails."""
        chunk = self._chunk
        if chunk is None:
            return step(micro_batch)
        self._is_inside, self._output = False, None
        with (
            chunk.register_forward_pre_hook(self._before),
            chunk.register_forward_hook(self._after),
        ):
            try:
                return step(micro_batch)
            except Exception as error:
                # Of any kind: it is the user's code. All ranks raise in `finish`.
                if self._is_inside:
                    raise
                self._error = self._error or error
            if self._output is None:
                hidden_states(chunk, micro_batch)
        outputs = self._output if isinstance(self._output, tuple) else (self._output,)
        # All of them: DDP waits for the gradient of every weight that it reduces early.
        return torch.stack([output.float().sum() for output in outputs]).sum() * 0

    def start(self) -> Callable[[], None]:
        """Starts to tell the other ranks how it went; what it returns waits for all of them.

        The message travels from host to host, while devices compute.

        Raises:
            Exception: What this rank's step raised, from what is returned.
            ValueError: The step of another rank failed, likewise; on all ranks.
        """
        failed = torch.tensor([self._error is not None], dtype=torch.int32)
        work = dist.all_reduce(failed, group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            if bool(failed):
                raise_refusals(self._error, self._group, "failed in its step")

        return finish

    def _before(self, module: Any, args: Any) -> None:
        self._is_inside = True

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self._is_inside, self._output = False, output
