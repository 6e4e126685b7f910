"""Training without Lightning: a model, its optimizer, and whichever engine a step is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from lightning_dcp import MicroBatch, ModelConfig, OptimizerSettings, Recompute
from lightning_dcp import linear_cross_entropy as loss_of
from lightning_dcp.engine import (
    DynamicCPEngine,
    PlannedBatch,
    StepResult,
    build_optimizer,
    wrap_ddp,
)
from lightning_dcp.model import build_gpt_model, hidden_states
from lightning_dcp.parallel import (
    ParallelContext,
    ParallelSizes,
    install_cp_hooks,
    quiet_megatron,
    setup_parallel,
)


@contextmanager
def parallel_processes(*, expert_model_parallel_size: int = 1) -> Iterator[ParallelContext]:
    """The parallel state of processes that a launcher started, taken down at the end."""
    dist.init_process_group("gloo")
    context = setup_parallel(
        ParallelSizes(
            world_size=dist.get_world_size(),
            expert_model_parallel_size=expert_model_parallel_size,
        )
    )
    try:
        yield context
    finally:
        context.destroy()
        dist.destroy_process_group()


def random_batch(
    lengths: Sequence[int] | np.ndarray, vocab_size: int, rng: np.random.Generator
) -> dict:
    """A global batch of random tokens."""
    rows = [torch.from_numpy(rng.integers(0, vocab_size, length)) for length in lengths]
    return {"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}


class BareLoop:
    """A model on its process groups, and a step with an engine and the optimizer, nothing else.

    Args:
        config: The model.
        context: The parallel state.
        lr: Learning rate; 0 leaves the weights as they are.
        recompute: What the backward pass computes again; nothing by default.
        clip_grad: Norm that gradients are clipped to.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ParallelContext,
        *,
        lr: float = OptimizerSettings().lr,
        recompute: Recompute | None = None,
        clip_grad: float = 1.0,
    ) -> None:
        self.vocab_size = config.vocab_size
        with quiet_megatron():
            self.model = build_gpt_model(
                config, context, dtype=torch.float32, seed=0, recompute=recompute or Recompute()
            )
            install_cp_hooks(self.model)
            self.ddp = wrap_ddp(self.model, context)
            settings = OptimizerSettings(lr=lr)
            self.optimizer = build_optimizer(self.ddp, context, settings, clip_grad=clip_grad)

    def step(
        self, engine: DynamicCPEngine, batch: dict[str, torch.Tensor]
    ) -> tuple[PlannedBatch, StepResult]:
        """Trains on a batch."""
        planned = engine.prepare(batch, vocab_size=self.vocab_size)
        result = engine.train_step(self.ddp, planned, self.micro_batch_step)
        self.optimizer.step()
        return planned, result

    def micro_batch_step(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``DynamicCPModule``'s."""
        hidden, weight = hidden_states(self.model, micro_batch)
        loss = loss_of(hidden, weight, micro_batch.labels, vocab_size=self.vocab_size)
        return loss, micro_batch.num_tokens
