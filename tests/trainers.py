"""Small Trainers, modules and batches for tests of the Lightning path."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lightning_dcp import (
    DynamicCPModule,
    DynamicCPStrategy,
    LRSchedule,
    ModelConfig,
    OptimizerSettings,
)

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    vocab_size=61,
    make_vocab_size_divisible_by=8,
    init_method_std=0.2,
)
# An epsilon well above the rounding of gradients that are nearly zero: see test_parity.
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.1, "adam_eps": 1e-5}
LENGTHS = [
    [70, 5, 9, 33, 2, 17, 12, 24, 1, 8],
    [3, 48, 7, 7, 21, 95, 13, 2],
    [11, 6, 30, 30, 4, 60, 19, 5, 10],
    [40, 9],
    [5, 6, 7, 8, 9],
]


def random_batch(lengths: list[int], seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, CONFIG.vocab_size, n).tolist() for n in lengths]


def jagged(batch: list[list[int]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(ids, dtype=torch.int64) for ids in batch]
    return {"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}


class Batches(LightningDataModule):
    """Gives the batches that it was made with, one a step."""

    def __init__(self, train: list[dict[str, Any]], val: list[dict[str, Any]] | None = None):
        super().__init__()
        self.train, self.val = train, val or []

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=None, shuffle=False)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=None, shuffle=False)

    test_dataloader = predict_dataloader = val_dataloader


def batches(num: int = 3, num_val: int = 0) -> Batches:
    made = [jagged(random_batch(lengths, seed)) for seed, lengths in enumerate(LENGTHS)]
    return Batches(made[:num], made[:num_val])


def module(**options: Any) -> DynamicCPModule:
    settings = {
        "model": CONFIG,
        "optimizer": OptimizerSettings(**OPTIMIZER),
        "lr_schedule": LRSchedule(kind="constant"),
        "seed": 1,
        **options,
    }
    return DynamicCPModule(**settings)


def trainer(
    cap: int = 96, strategy: dict[str, Any] | None = None, name: str | None = None, **options: Any
) -> Trainer:
    """A quiet Trainer on this process's world; ``options`` go to the Trainer."""
    settings = {
        "accelerator": "cpu",
        "devices": options.pop("devices", None) or int(torch.distributed.get_world_size()),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "gradient_clip_val": 0.5,
        # Lightning would shuffle the batches.
        "use_distributed_sampler": False,
        **options,
    }
    chosen = name or DynamicCPStrategy(max_seqlen_per_dp_cp_rank=cap, **(strategy or {}))
    return Trainer(strategy=chosen, **settings)
