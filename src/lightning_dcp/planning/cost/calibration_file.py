"""The file that ``lightning-dcp calibrate`` writes, and that ``plan`` and the strategy read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_dcp.config.model_sizes import ModelSizes
from lightning_dcp.planning.cost.model import CostModel

FORMAT_VERSION = 1
_KIND = "lightning-dcp calibration"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A measured cost model, and what it was measured on.

    Attributes:
        cost_model: The fitted cost model.
        model: Sizes of the model that was measured.
        num_ranks: Ranks of the DPxCP pool; larger CP groups were not measured.
        tensor_model_parallel_size: Ranks that shared each layer's weights.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        memory_bytes: Memory of a device, or a process's part of the machine's without GPUs.
        r_squared: The part of the variance that the cost model explains of micro-batches that it
            was not fitted to.
        machine: Facts about the machine and its software, for people.
    """

    cost_model: CostModel
    model: ModelSizes
    num_ranks: int
    tensor_model_parallel_size: int
    precision: str
    memory_bytes: float
    r_squared: float
    machine: Mapping[str, str]

    def check_tensor_parallel(self, tp_size: int, source: str) -> None:
        """Refuses another tensor-parallel size than the measured one.

        Args:
            tp_size: The size that it is going to be used for.
            source: Name of the file, for the error.

        Raises:
            ValueError: It was measured with another.
        """
        measured = self.tensor_model_parallel_size
        if tp_size != measured:
            raise ValueError(
                f"{source} was measured with tensor_model_parallel_size={measured}, this is for "
                f"{tp_size}: calibrate with --tensor_model_parallel_size {tp_size}"
            )

    def to_json(self) -> str:
        """The text of the file."""
        version = {"format_version": FORMAT_VERSION}
        content = {"kind": _KIND, **version, **asdict(self)}
        # The cost model once was a file of its own: it has a version too.
        content["cost_model"] = version | content["cost_model"]
        return json.dumps(content, indent=2) + "\n"


def read_calibration(
    path: str, *, model: ModelSizes | None = None, tp_size: int | None = None
) -> Calibration:
    """Reads a calibration file and checks that it is for this model and tensor-parallel size.

    Args:
        path: The file.
        model: Sizes of the model that it is going to be used for; not checked if not given.
        tp_size: Tensor-parallel size that it is going to be used for; not checked if not given.

    Raises:
        ValueError: There is no such file, it is no calibration or one of another format version,
            or it is for another model or tensor-parallel size.
    """
    content = _read(path)
    _check_fields(content["cost_model"], CostModel, path)
    try:
        calibration = Calibration(
            cost_model=CostModel(**content["cost_model"]),
            model=ModelSizes(**content["model"]),
            num_ranks=int(content["num_ranks"]),
            tensor_model_parallel_size=int(content["tensor_model_parallel_size"]),
            precision=str(content["precision"]),
            memory_bytes=float(content["memory_bytes"]),
            r_squared=float(content["r_squared"]),
            machine=dict(content["machine"]),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; calibrate again") from error
    measured, priced = calibration.model, calibration.cost_model.model
    if measured.fingerprint != priced:
        raise ValueError(
            f"{path}: its cost model is for the model {priced or '(unknown)'}, but the sizes in "
            f"it are those of {measured.fingerprint}: it was changed by hand; calibrate again"
        )
    if model is not None and model != measured:
        raise ValueError(
            f"{path} is the calibration of another model: {_differences(measured, model)}. "
            "Calibrate with this model"
        )
    if tp_size is not None:
        calibration.check_tensor_parallel(tp_size, path)
    return calibration


def _read(path: str) -> dict[str, Any]:
    try:
        content: Any = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; write it with lightning-dcp calibrate"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON: {error}; write one with lightning-dcp calibrate"
        ) from error
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        found = f"kind={content.get('kind')!r}" if isinstance(content, dict) else "no object"
        raise ValueError(
            f"{path} is no calibration: it must hold a JSON object with kind={_KIND!r}, found "
            f"{found}; write one with lightning-dcp calibrate"
        )
    del content["kind"]
    _check_fields(content, Calibration, path)
    return content


def _check_fields(content: Any, kind: type[CostModel | Calibration], path: str) -> None:
    """Takes the version out of an object of the file, which must hold the fields of ``kind``."""
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold a JSON object")
    version = content.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version={version!r}, this release reads {FORMAT_VERSION}: "
            "calibrate again"
        )
    names = {f.name for f in fields(kind)}
    # Both ways: CostModel's defaults, those of an 8B model, would stand in for missing fields.
    if content.keys() != names:
        missing, unknown = sorted(names - content.keys()), sorted(content.keys() - names)
        raise ValueError(f"{path}: missing {missing}, unknown {unknown}: calibrate again")


def _differences(measured: ModelSizes, used: ModelSizes) -> str:
    theirs, ours = asdict(measured), asdict(used)
    return ", ".join(
        f"{name}={theirs[name]} there and {ours[name]} here"
        for name in theirs
        if theirs[name] != ours[name]
    )
