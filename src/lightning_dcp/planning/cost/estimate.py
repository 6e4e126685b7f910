"""What a run is predicted to cost before anybody calibrates it: the one price of fit and plan."""

from __future__ import annotations

from lightning_dcp.config.model_sizes import ModelSizes
from lightning_dcp.config.parallel import ParallelSizes
from lightning_dcp.planning.cost.model import CostModel
from lightning_dcp.planning.cost.presets import DevicePreset


def cost_model_of_run(
    model: ModelSizes,
    sizes: ParallelSizes,
    device: DevicePreset,
    *,
    full_recompute: bool = False,
) -> CostModel:
    """The cost model of a run without a calibration, from data-sheet speeds.

    ``fit`` plans with it and ``lightning-dcp plan`` predicts with it, so that both make the same
    plan of a batch.

    Args:
        model: Sizes of the model.
        sizes: The parallel sizes.
        device: Speeds of the run's device, as ``preset_of`` finds them.
        full_recompute: Whether the backward pass runs each layer's forward pass again.
    """
    return CostModel.from_sizes(
        model,
        device,
        tp_size=sizes.tensor_model_parallel_size,
        pp_size=sizes.pipeline_model_parallel_size,
        ep_size=sizes.expert_model_parallel_size,
        recompute=full_recompute,
    )
