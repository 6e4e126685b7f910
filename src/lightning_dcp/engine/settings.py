"""Where a run's cost model comes from: its device, or a file that all ranks must share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_dcp.config.model_sizes import ModelSizes
from lightning_dcp.planning import CostModel, DevicePreset, preset_of
from lightning_dcp.planning.cost.calibration_file import read_calibration


def preset_of_device(device: torch.device) -> DevicePreset:
    """Data-sheet speeds of a device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return preset_of(device.type, name)


def read_cost_model(
    path: str, *, model: ModelSizes, tp_size: int, group: dist.ProcessGroup
) -> CostModel:
    """The cost model of a calibration file, the same on all ranks; a collective.

    Args:
        path: What ``lightning-dcp calibrate`` wrote.
        model: Sizes of the model that is trained.
        tp_size: Its tensor-parallel size.
        group: A gloo group of all ranks.

    Raises:
        ValueError: This rank or another could not read the file, or it holds something else there;
            on every rank.
    """
    cost_model: CostModel | None = None
    error: ValueError | None = None
    try:
        cost_model = read_calibration(path, model=model, tp_size=tp_size).cost_model
    except ValueError as refused:
        error = refused
    found: list[Any] = [None] * dist.get_world_size(group)
    mine = (str(cost_model), None if error is None else str(error))
    dist.all_gather_object(found, mine, group=group)
    if error is not None:
        raise error
    for rank, (theirs, message) in enumerate(found):
        if message is not None:
            raise ValueError(f"Rank {rank} refused cost_model={path!r}: {message}")
        if theirs != found[0][0]:
            raise ValueError(
                f"cost_model={path!r} holds other figures on rank {rank} than on rank 0; ranks "
                "would plan differently: put the same file on every machine"
            )
    assert cost_model is not None
    return cost_model
