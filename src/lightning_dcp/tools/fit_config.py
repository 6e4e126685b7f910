"""What a config of ``lightning-dcp fit`` says of its plans, read without Lightning and torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dcp.config.model import ModelConfig
from lightning_dcp.config.moe import MoEConfig


class FitConfig:
    """A config of ``fit``, as far as plans depend on it.

    Args:
        content: The YAML file's content.

    Attributes:
        model: Sizes of the model.
        strategy: Options of the DynamicCPStrategy that are in the file.
        max_length: Tokens of the data's longest sequence, where the file gives it.

    Raises:
        ValueError: There is no model in it.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        # By hand and not by LightningCLI, which would import every class that the file names.
        model = _section(content, "model", "init_args", "model")
        if not model:
            raise ValueError("there is no model.init_args.model, the sizes of a DynamicCPModule")
        if model.get("moe"):
            model = {**model, "moe": MoEConfig(**model["moe"])}
        self.model = ModelConfig(**model)
        self.strategy = _section(content, "trainer", "strategy", "init_args")
        self._trainer = _section(content, "trainer")
        self.max_length = _section(content, "data", "init_args").get("max_length")

    @property
    def world_size(self) -> int | None:
        """Devices of all nodes; None where the file leaves them to the machine."""
        devices, nodes = self._trainer.get("devices"), self._trainer.get("num_nodes") or 1
        if isinstance(devices, list):
            devices = len(devices)
        elif isinstance(devices, str) and devices.isdigit():
            devices = int(devices)
        # "auto" and -1 are known on the machine alone that runs it.
        return devices * int(nodes) if isinstance(devices, int) and devices > 0 else None

    @property
    def planner(self) -> str:
        """The planner that ``fit`` uses."""
        dynamic = self.strategy.get("dynamic_context_parallel", True)
        return str(self.strategy.get("planner") or ("balanced" if dynamic else "static"))

    def options(self) -> dict[str, Any]:
        """Options of ``plan`` by name; None for what the file leaves out."""
        get = self.strategy.get
        cp_size = get("context_parallel_size") or 1
        recompute = get("recompute") or {}
        # "auto" and "gpu" name no device: --device, or its default, says which.
        on_cpu = self._trainer.get("accelerator") == "cpu"
        return {
            "tp_size": get("tensor_model_parallel_size"),
            "pipeline_model_parallel_size": get("pipeline_model_parallel_size"),
            "expert_model_parallel_size": get("expert_model_parallel_size"),
            # A dynamic run has no CP size that its default could be compared at.
            "context_parallel_size": cp_size if self.planner == "static" or cp_size > 1 else None,
            "pad_to_length": get("pad_to_length"),
            "pad_to_length_bucket": get("pad_to_length_bucket"),
            "fp8": get("fp8") is not None,
            "calibration": get("cost_model"),
            "device": "cpu" if on_cpu else None,
            "recompute": recompute.get("granularity") == "full",
        }


def _section(content: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """The mapping under some keys; an empty one where there is none."""
    found: Any = content
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}
