"""The model of a command: a preset, a configuration file, or numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from lightning_dcp.config.model import ModelConfig
from lightning_dcp.config.model_sizes import LLAMA_8B, QWEN3_30B_A3B, ModelSizes
from lightning_dcp.tools.fit_config import FitConfig

PRESETS = {"8b": LLAMA_8B, "30b-a3b": QWEN3_30B_A3B}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model: one of the two options."""

    model: str | list[str] | None = None
    """8b (Llama 3.1), 30b-a3b (Qwen3), a Hugging Face config.json or its folder, or a YAML file
    that `lightning-dcp fit --config` takes; the later of several overrides."""
    model_config: ModelConfig | None = None
    """Sizes of the model, e.g. --model_config.num_layers 4; --model_config.help lists them."""

    def __post_init__(self) -> None:
        if self.model is not None and self.model_config is not None:
            raise ValueError(f"model={self.model!r} and model_config: give only one of the two")

    # On a frozen class too: what is cached goes into __dict__, not through setattr.
    @cached_property
    def _found(self) -> ModelSizes | ModelConfig | FitConfig | None:
        return self.model_config if self.model is None else _read(self.model)

    def fit_config(self) -> FitConfig | None:
        """The config of ``fit`` that ``model`` names, or None if it is something else.

        Raises:
            ValueError: ``model`` names no preset and no file that describes a model.
        """
        return self._found if isinstance(self._found, FitConfig) else None

    def sizes(self) -> ModelSizes | None:
        """The model's sizes, or None if no model is given; raises as :meth:`fit_config`."""
        found = self._found
        if found is None or isinstance(found, ModelSizes):
            return found
        return (found.model if isinstance(found, FitConfig) else found).sizes

    def config(self) -> ModelConfig:
        """The config of a model to build.

        Raises:
            ValueError: No model is given, or some of its layers have experts and some have not.
        """
        found = self._found
        if found is None:
            raise ValueError("which model? Give model or model_config, see --help")
        if isinstance(found, ModelSizes):
            return ModelConfig.of_sizes(found)
        return found.model if isinstance(found, FitConfig) else found


def _read(model: str | list[str]) -> ModelSizes | FitConfig:
    if isinstance(model, str) and model in PRESETS:
        return PRESETS[model]
    paths = [Path(one).expanduser() for one in ([model] if isinstance(model, str) else model)]
    if len(paths) == 1 and paths[0].is_dir():
        paths = [paths[0] / "config.json"]
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"model={model!r} is none of {', '.join(PRESETS)}, and there is no file "
                f"{str(path)!r}"
            )
    try:
        if [path.suffix for path in paths] != [".json"]:
            return FitConfig.read([str(path) for path in paths])
        content = json.loads(paths[0].read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, no mapping")
        return ModelSizes.from_hf_config(content)
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"model={model!r}: {paths[-1]}: {error}") from error
