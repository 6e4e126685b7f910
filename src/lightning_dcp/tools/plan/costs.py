"""The cost model of a plan, and what fits the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.planning import (
    CPU,
    H100,
    H200,
    LLAMA_8B,
    CostModel,
    DevicePreset,
    Execution,
    ModelSizes,
    execution_of,
)
from lightning_dcp.planning.cost.calibration_file import Calibration, read_calibration
from lightning_dcp.tools.models import ModelOptions

GIB = 2**30
DEVICES = {"h100": H100, "h200": H200, "cpu": CPU}


@dataclass(frozen=True, kw_only=True)
class CostOptions(ModelOptions):
    """The model and what it costs; a calibration replaces device and sizes."""

    calibration: str | None = None
    """File that `lightning-dcp calibrate` wrote; the model's options may then be left out."""
    device: Literal["h100", "h200", "cpu"] = "h200"
    """Device whose data-sheet speeds are taken where there is no calibration."""
    pipeline_model_parallel_size: int = 1
    """Stages that share the layers."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts."""
    recompute: bool = False
    """Whether the backward pass runs each layer's forward pass again (full recomputation)."""
    memory_gib: float | None = None
    """Memory of a device in GiB, to check caps against; none for that of the device or of the
    calibrated machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
            check_at_least(name, getattr(self, name))
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise ValueError(f"memory_gib={self.memory_gib} must be above 0")

    @property
    def execution(self) -> Execution:
        """Who waits for whom with these parallel sizes."""
        return execution_of(
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
        )

    @property
    def preset(self) -> DevicePreset:
        """Speeds and memory of the device."""
        return DEVICES[self.device]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Cost models of one model, by tensor-parallel size.

    Attributes:
        options: As the user gave them.
        model: Sizes of the model.
        calibration: The measurements, or None.
    """

    options: CostOptions
    model: ModelSizes
    calibration: Calibration | None

    @classmethod
    def read(cls, options: CostOptions) -> Costs:
        """Reads the model and the calibration.

        Raises:
            ValueError: One of the two is wrong, or they do not belong together.
        """
        model = options.sizes()
        if options.calibration is None:
            return cls(options=options, model=model or LLAMA_8B, calibration=None)
        calibration = read_calibration(options.calibration, model=model)
        return cls(options=options, model=calibration.model, calibration=calibration)

    @property
    def memory_bytes(self) -> float:
        """Memory of a device."""
        if self.options.memory_gib is not None:
            return self.options.memory_gib * GIB
        measured = self.calibration
        return self.options.preset.memory_bytes if measured is None else measured.memory_bytes

    def cost_model(self, tp_size: int) -> CostModel:
        """The cost model of a run.

        Args:
            tp_size: Tensor-parallel size.

        Raises:
            ValueError: The calibration is for another tensor-parallel size.
        """
        options = self.options
        if self.calibration is not None:
            self.calibration.check_tensor_parallel(tp_size, str(options.calibration))
            return self.calibration.cost_model
        return CostModel.from_sizes(
            self.model,
            options.preset,
            tp_size=tp_size,
            pp_size=options.pipeline_model_parallel_size,
            ep_size=options.expert_model_parallel_size,
            recompute=options.recompute,
        )

    def describe(self) -> str:
        """The model, and where its times come from, in a line."""
        model = self.model
        experts = f", {model.num_experts} experts" if model.num_experts else ""
        source = self.options.calibration or f"{self.options.preset.name} data sheets"
        return (
            f"{model.num_layers} layers of width {model.hidden_size}{experts}, vocabulary "
            f"{model.vocab_size:,}; times from {source}"
        )

    def notes(self, num_ranks: int) -> list[str]:
        """What a reader of predictions for a pool has to know."""
        if self.calibration is None:
            return ["times are estimates, not measured: see lightning-dcp calibrate"]
        measured = self.calibration.num_ranks
        if num_ranks <= measured:
            return []
        note = (
            f"{self.options.calibration} was measured on a pool of {measured} DPxCP ranks; what "
            f"larger groups of num_ranks={num_ranks} take is extrapolated"
        )
        return [note]

    def state_bytes(self, tp_size: int, num_ranks: int) -> float:
        """Bytes that weights, gradients and optimizer states take on each device.

        Weights, float32 gradients, and a share of the distributed optimizer's two moments and, for
        bfloat16 weights, of its float32 ones. Untied embeddings.

        Args:
            tp_size: Tensor-parallel size.
            num_ranks: Ranks of the DPxCP pool, over which the optimizer states are sharded.
        """
        options, model = self.options, self.model
        ep_size = options.expert_model_parallel_size
        stages = options.pipeline_model_parallel_size
        shared = model.shared_weights + model.hidden_size * model.vocab_size
        experts = 0.0
        if model.num_experts:
            experts = model.expert_weights / model.num_experts_per_tok * model.num_experts
        weights = (shared + experts / ep_size) / (tp_size * stages)
        sharded = (shared + experts) / (tp_size * stages * num_ranks)
        if self.calibration is not None and self.calibration.precision == "32-true":
            return 8.0 * weights + 8.0 * sharded
        return 6.0 * weights + 12.0 * sharded

    def check_cap(self, cap: int, tp_size: int, num_ranks: int) -> None:
        """Refuses a cap whose activations no memory holds.

        Args:
            cap: ``max_seqlen_per_dp_cp_rank``.
            tp_size: Tensor-parallel size.
            num_ranks: Ranks of the DPxCP pool.

        Raises:
            ValueError: The activations alone are more than a device's memory, or, where
                ``memory_gib`` is given, more than weights and optimizer leave of it.
        """
        cost_model = self.cost_model(tp_size)
        needed, memory = cost_model.activation_bytes(cap), self.memory_bytes
        counted = self.options.memory_gib is not None
        states = self.state_bytes(tp_size, num_ranks) if counted else 0.0
        if needed + states <= memory:
            return
        beside = (
            f" beside {states / GIB:.1f} GiB of weights and optimizer states" if counted else ""
        )
        fits = cost_model.rows_that_fit(max(0.0, memory - states))
        advice = f"at most {fits} rows fit" if fits else "no row fits"
        raise ValueError(
            f"max_seqlen_per_dp_cp_rank={cap} needs {needed / GIB:.1f} GiB of activations{beside}, "
            f"a device has {memory / GIB:.1f} GiB: {advice}. Lower the cap, use recompute or a "
            "larger tp_size, or set memory_gib if the device has more"
        )
