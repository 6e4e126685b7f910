"""Memory and time of a step with and without recomputation, under dynamic context parallelism.

Two processes run the same plan, in which CP sizes 1 and 2 occur, once for each kind of
recomputation. Extra memory is the highest resident size of rank 0 during the step over the one
before: activations, mostly. Losses and gradients are compared: they
must be equal. Linux only: the highest resident size is read and reset through /proc.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bare_loop import BareLoop, parallel_processes, random_batch
from launch import proc_bytes, run_on
from lightning_dcp import ModelConfig, MoEConfig, Recompute
from lightning_dcp.engine import DynamicCPEngine
from lightning_dcp.parallel import ParallelContext
from lightning_dcp.planning import PlanSettings

DENSE = {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 256}
EXPERTS = MoEConfig(num_experts=8, topk=2, ffn_hidden_size=256)
KINDS = {
    "none": Recompute(),
    "selective: core_attn": Recompute(granularity="selective"),
    "selective: mlp": Recompute(granularity="selective", modules=("mlp",)),
    "selective: moe": Recompute(granularity="selective", modules=("moe",)),
    "full, block of 4": Recompute(granularity="full", method="block", num_layers=4),
    "full": Recompute(granularity="full"),
}
LENGTHS = [3000, 1500, 1200, 1000, 900, 800, 700, 600, 500, 300, 200]
CAP = 2048
_STATUS = "/proc/self/status"


def measure_all(kinds: list[str], experts: bool) -> dict[str, tuple[Any, ...]]:
    """What each kind took on this rank."""
    torch.set_num_threads(1)
    config = ModelConfig(**DENSE, moe=EXPERTS if experts else None)
    with parallel_processes(expert_model_parallel_size=2 if experts else 1) as context:
        return {kind: measure(kind, config, context) for kind in kinds}


def measure(kind: str, config: ModelConfig, context: ParallelContext) -> tuple[Any, ...]:
    """Extra memory, CPU time, loss, norm of the gradients and CP sizes of a second step."""
    loop = BareLoop(config, context, recompute=KINDS[kind])
    ddp, loss = loop.ddp, loop.micro_batch_step
    engine = DynamicCPEngine(
        context, PlanSettings.of_run(context.sizes, max_seqlen_per_dp_cp_rank=CAP)
    )
    batch = random_batch(LENGTHS, config.vocab_size, np.random.default_rng(0))
    planned = engine.prepare(batch)
    engine.train_step(ddp, planned, loss)
    # Gives back what the allocator kept of the first step, which the second would use again.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the highest resident size
    before, start = proc_bytes(_STATUS, "VmRSS"), time.process_time()
    result = engine.train_step(ddp, planned, loss, force_all_reduce=True)
    seconds, extra = time.process_time() - start, proc_bytes(_STATUS, "VmHWM") - before
    norm = sum(float(p.main_grad.double().square().sum()) for p in loop.model.parameters()) ** 0.5
    engine.close()
    return extra, seconds, float(result.loss), norm, sorted(planned.plan.cp_sizes())


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for experts in (False, True):
        left_out = "mlp" if experts else "moe"
        kinds = [kind for kind in KINDS if left_out not in kind]
        found = run_on(2, measure_all, kinds, experts)
        extra, seconds, loss, norm, sizes = found["none"]
        print(f"\n{'8 experts, EP 2' if experts else 'dense'}; CP sizes {sizes}; loss {loss:.5f}")
        print("recomputed            |  extra memory | of none | CPU time of none")
        for kind, (memory, own_seconds, own_loss, own_norm, _) in found.items():
            assert abs(own_loss - loss) < 1e-5 * loss, kind
            assert abs(own_norm - norm) < 1e-5 * norm, kind
            print(
                f"{kind:21} | {memory / 1e6:10.0f} MB |   {memory / extra:5.2f} | "
                f"{own_seconds / seconds:9.2f}"
            )


if __name__ == "__main__":
    main()
