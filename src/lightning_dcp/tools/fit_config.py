"""What a config of ``lightning-dcp fit`` says of its plans, read without Lightning and torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from lightning_dcp.config.model import ModelConfig
from lightning_dcp.config.moe import MoEConfig
from lightning_dcp.tools.option_errors import no_option


class FitConfig:
    """A config of ``fit``, as far as plans depend on it.

    Args:
        content: The YAML file's content.

    Attributes:
        model: Sizes of the model.
        strategy: Options of the DynamicCPStrategy that are in the file.
        max_length: Tokens of the data's longest sequence, where the file gives it.
        tokenizer: That of the data, where the file gives one.

    Raises:
        ValueError: There is no model in it.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        # By hand and not by LightningCLI, which would import every class that the file names.
        model = _section(content, "model", "init_args", "model")
        if not model:
            raise ValueError("there is no model.init_args.model, the sizes of a DynamicCPModule")
        if model.get("moe"):
            model["moe"] = _made(MoEConfig, "model.model.moe", model["moe"])
        self.model = _made(ModelConfig, "model.model", model)
        self.strategy = _section(content, "trainer", "strategy", "init_args")
        self._trainer = _section(content, "trainer")
        data = _section(content, "data", "init_args")
        self.max_length, self.tokenizer = data.get("max_length"), data.get("tokenizer")

    @classmethod
    def read(cls, files: Sequence[str], options: Sequence[str] = ()) -> FitConfig:
        """Reads what ``fit --config file ... options`` would: later ones override earlier ones."""
        content: dict[str, Any] = {}
        for file in files:
            loaded = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8")) or {}
            if not isinstance(loaded, dict):
                raise ValueError(f"{file} holds a {type(loaded).__name__}, no mapping")
            content = _merged(content, loaded)
        for option, after in zip(options, [*options[1:], ""], strict=False):
            if option.startswith("--"):
                name, _, value = option[2:].partition("=")
                content = _merged(content, _nested(name.split("."), yaml.safe_load(value or after)))
        return cls(content)

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


def _made[T](cls: type[T], option: str, values: Mapping[str, Any]) -> T:
    known = {f"{option}.{name}" for name in get_type_hints(cls)}
    for name in values:
        if f"{option}.{name}" not in known:
            raise ValueError(no_option(f"{option}.{name}", known))
    return cls(**values)


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two configs as fit merges them: mappings key by key, the second one's values otherwise."""
    both = {
        key: _merged(first[key], value)
        for key, value in second.items()
        if isinstance(value, dict) and isinstance(first.get(key), dict)
    }
    return first | second | both


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    """An option as a config: on a command line ``init_args`` of a class can be left out."""
    for section in (["model"], ["data"], ["trainer", "strategy"]):
        inner = keys[len(section) :]
        if (
            keys[: len(section)] == section
            and inner
            and inner[0] not in ("class_path", "init_args")
        ):
            keys = [*section, "init_args", *inner]
    for key in reversed(keys):
        value = {key: value}
    return dict(value)
