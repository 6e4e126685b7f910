"""A look at a model while no Trainer runs: its process groups are gone, or there never were any."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.config.model import ModelConfig
from lightning_dcp.config.padding import TIGHT, resolve_cap
from lightning_dcp.config.parallel import ParallelSizes
from lightning_dcp.engine.run import DynamicCPEngine
from lightning_dcp.model import build_model, hidden_states, model_chunks, whole_logits
from lightning_dcp.packing import MicroBatch, read_global_batch
from lightning_dcp.parallel import install_cp_hooks, parallel_state_of
from lightning_dcp.planning import PlanSettings


def logits_between_runs(
    config: ModelConfig, weights: torch.nn.Module, input_ids: Tensor, sizes: ParallelSizes | None
) -> Tensor:
    """Logits of whole sequences, of a model that is built for the while, without gradients.

    Where processes have met, a collective of all of them.

    Args:
        config: The model's sizes.
        weights: This rank's part of an earlier run's model, or a whole one.
        input_ids: Jagged ``[num_samples, length*]``.
        sizes: The sizes of the run that the part is of; None of a whole model.

    Returns:
        On every rank jagged ``[num_samples, length*, vocab_size]``; ``[..., 1]`` of a value head.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    sizes = sizes or ParallelSizes(world_size=world_size)
    batch = {"input_ids": input_ids}
    longest = max(read_global_batch(batch, vocab_size=config.vocab_size).lengths.tolist())
    with torch.no_grad(), ExitStack() as stack:
        context = stack.enter_context(parallel_state_of(sizes))
        model = build_model(config, context, dtype=next(weights.parameters()).dtype)
        model.load_state_dict(weights.state_dict())
        model.to(context.device).eval()
        chunks = model_chunks(model)
        for chunk in chunks:
            stack.callback(install_cp_hooks(chunk))
        cap = resolve_cap("auto", sizes, TIGHT, max_length=longest)
        settings = PlanSettings.of_run(sizes, max_seqlen_per_dp_cp_rank=cap)
        engine = DynamicCPEngine(context, settings)
        stack.callback(engine.close)

        def outputs(micro_batch: MicroBatch) -> dict[str, Tensor]:
            states = hidden_states(chunks[-1], micro_batch)
            if config.head == "value":
                return {"logits": states.hidden @ states.weight.t()}
            group = context.pg_collection.tp
            return {"logits": whole_logits(states, vocab_size=config.vocab_size, group=group)}

        planned = engine.prepare(batch, vocab_size=config.vocab_size)
        found = engine.predict_step(
            planned, outputs, everywhere=True, of_own_token={"logits"}, model=model
        )
    return found["logits"]
