"""Memory and time of a step with and without recomputation, under dynamic context parallelism.

Two processes run the same plan, in which CP sizes 1 and 2 occur, once for each kind of
recomputation. Extra memory is the highest resident size of rank 0
during the step over the one before: activations, mostly. Losses and gradients are compared: they
must be equal. Linux only: the highest resident size is read and reset through /proc.
"""

from __future__ import annotations

import argparse
import ctypes
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_dcp.engine import DynamicCPEngine, PlanSettings, wrap_ddp
from lightning_dcp.loss import linear_cross_entropy
from lightning_dcp.model import ModelConfig, MoEConfig, Recompute, build_gpt_model, hidden_states
from lightning_dcp.packing import MicroBatch
from lightning_dcp.parallel import (
    ParallelContext,
    ParallelSizes,
    install_cp_hooks,
    setup_parallel,
)

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


def status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def measure_all(rank: int, port: int, kinds: list[str], experts: bool, results: Any) -> None:
    """Puts what each kind took on rank 0 of two in ``results``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    context = setup_parallel(
        ParallelSizes(world_size=2, expert_model_parallel_size=2 if experts else 1)
    )
    config = ModelConfig(**DENSE, moe=EXPERTS if experts else None)
    for kind in kinds:
        figures = measure(kind, config, context)
        if rank == 0:
            results.put(figures)
    context.destroy()
    dist.destroy_process_group()


def measure(kind: str, config: ModelConfig, context: ParallelContext) -> tuple[Any, ...]:
    """Extra memory, CPU time, loss, norm of the gradients and CP sizes of a second step."""
    model = build_gpt_model(config, context, recompute=KINDS[kind])
    install_cp_hooks(model)
    ddp = wrap_ddp(model, context)
    engine = DynamicCPEngine(
        context, PlanSettings.of_run(context.sizes, max_seqlen_per_dp_cp_rank=CAP)
    )

    def loss(micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = hidden_states(model, micro_batch)
        return linear_cross_entropy(hidden, weight, micro_batch.labels), micro_batch.num_tokens

    generator = np.random.default_rng(0)
    rows = [torch.from_numpy(generator.integers(0, 256, length)) for length in LENGTHS]
    planned = engine.prepare({"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)})
    engine.train_step(ddp, planned, loss)
    # Gives back what the allocator kept of the first step, which the second would use again.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the highest resident size
    before, start = status("VmRSS"), time.process_time()
    result = engine.train_step(ddp, planned, loss, force_all_reduce=True)
    seconds, extra = time.process_time() - start, status("VmHWM") - before
    norm = sum(float(p.main_grad.double().square().sum()) for p in model.parameters()) ** 0.5
    engine.close()
    return extra, seconds, float(result.loss), norm, sorted(planned.plan.cp_sizes())


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for experts in (False, True):
        left_out = "mlp" if experts else "moe"
        kinds = [kind for kind in KINDS if left_out not in kind]
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(measure_all, (free_port(), kinds, experts, results), nprocs=2)
        found = {kind: results.get() for kind in kinds}
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
