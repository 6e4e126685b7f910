"""The run to predict: its options, those of a config of ``fit`` included, and what follows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.padding import PackPadding, longest_that_fits, resolve_cap
from lightning_dcp.config.parallel import Execution, ParallelSizes, cp_sizes_of_pool
from lightning_dcp.planning import (
    CPU,
    H100,
    H200,
    LLAMA_8B,
    CostModel,
    DevicePreset,
    ModelSizes,
    PlanSettings,
    cost_model_of_run,
)
from lightning_dcp.planning.cost.calibration_file import Calibration, read_calibration
from lightning_dcp.tools.fit_config import FitConfig
from lightning_dcp.tools.models import ModelOptions

GIB = 2**30
DEVICES = {"h100": H100, "h200": H200, "cpu": CPU}


@dataclass(frozen=True, kw_only=True)
class RunOptions(ModelOptions):
    """The run. Where --model is a config of fit, it says what is not given here."""

    num_ranks: int | None = None
    """Ranks of the DPxCP pool: devices / (tensor parallel x pipeline parallel size)."""
    max_seqlen_per_dp_cp_rank: int | None = None
    """The most rows (tokens, padding included) that a rank holds of one micro-batch."""
    tp_size: int | None = None
    """Tensor-parallel size; 1 by default."""
    pipeline_model_parallel_size: int | None = None
    """Stages that share the layers; 1 by default."""
    expert_model_parallel_size: int | None = None
    """Ranks that share the experts; 1 by default."""
    context_parallel_size: int | None = None
    """CP size of the static run to compare with; none for the smallest that holds every sample."""
    pad_to_length: int | None = None
    """Rows of a rank that every micro-batch is padded to."""
    pad_to_length_bucket: int | None = None
    """Number that the rows of a micro-batch are rounded up to a multiple of."""
    fp8: bool | None = None
    """Pad as matrix products in eight bits need; no by default."""
    execution: Execution | None = None
    """lockstep: a step lasts as long as its slowest rank, as under pipeline and expert parallelism;
    free_running: only the members of a group wait for each other; none for what the engine plans
    for: free_running, or lockstep with a pipeline- or expert-parallel size above 1."""
    calibration: str | None = None
    """File that `lightning-dcp calibrate` wrote; it replaces device and sizes of the model."""
    device: Literal["h100", "h200", "cpu"] | None = None
    """Device whose data-sheet speeds are taken where there is no calibration; h200 by default."""
    recompute: bool | None = None
    """Whether the backward pass runs each layer's forward pass again (full recomputation)."""
    memory_gib: float | None = None
    """Memory of a device in GiB, to check caps against; none for that of the device or of the
    calibrated machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "num_ranks", "max_seqlen_per_dp_cp_rank", "tp_size", "pipeline_model_parallel_size",
            "expert_model_parallel_size", "context_parallel_size",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name))
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise ValueError(f"memory_gib={self.memory_gib} must be above 0")

    def filled_from(self, config: FitConfig) -> RunOptions:
        """The options with those that were left out as the config says."""
        found = config.options()
        if self.pad_to_length is not None or self.pad_to_length_bucket is not None:
            # One of the two excludes the other, wherever it comes from.
            found.pop("pad_to_length"), found.pop("pad_to_length_bucket")
        if self.device is not None:
            # A device that was asked for is not the one that was measured.
            found.pop("calibration")
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v for k, v in found.items() if given[k] is None})


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """A run to predict.

    Attributes:
        options: As the user gave them, or their fit config.
        model: Sizes of the model.
        sizes: Parallel sizes.
        cap: The most rows of a rank.
        padding: How packs are padded.
        calibration: The measurements, or None.
        planner: The planner of the fit config, or None.
    """

    options: RunOptions
    model: ModelSizes
    sizes: ParallelSizes
    cap: int
    padding: PackPadding
    calibration: Calibration | None = None
    planner: str | None = None

    @classmethod
    def read(cls, options: RunOptions) -> PredictedRun:
        """Reads the model, the fit config and the calibration.

        Raises:
            ValueError: One of them is wrong, they do not belong together, or nothing says how
                large the pool or the cap is.
        """
        config = options.fit_config()
        if config is not None:
            options = options.filled_from(config)
        model = options.sizes()
        calibration = None
        if options.calibration is not None:
            calibration = read_calibration(options.calibration, model=model)
            model = calibration.model
        tp_size, pp_size = options.tp_size or 1, options.pipeline_model_parallel_size or 1
        # A pool that was asked for, whatever devices the config has.
        if options.num_ranks is not None:
            world_size = options.num_ranks * tp_size * pp_size
        elif config is not None and config.world_size is not None:
            world_size = config.world_size
        else:
            raise ValueError(
                "how large is the pool? Give num_ranks, its DPxCP ranks, or as --model a config of "
                "fit whose trainer.devices is a number"
            )
        sizes = ParallelSizes(
            world_size=world_size,
            tensor_model_parallel_size=tp_size,
            pipeline_model_parallel_size=pp_size,
            expert_model_parallel_size=options.expert_model_parallel_size or 1,
        )
        strategy = {} if config is None else config.strategy
        cap = options.max_seqlen_per_dp_cp_rank or strategy.get("max_seqlen_per_dp_cp_rank")
        if cap is None:
            raise ValueError(
                "how large is the cap? Give max_seqlen_per_dp_cp_rank, the most rows that a rank "
                "holds, or as --model a config of fit"
            )
        padding = PackPadding(
            pad_to_length=options.pad_to_length,
            pad_to_length_bucket=options.pad_to_length_bucket,
            fp8=bool(options.fp8),
        )
        max_length = None if config is None else config.max_length
        return cls(
            options=options,
            model=model or LLAMA_8B,
            sizes=sizes,
            cap=resolve_cap(cap, sizes, padding, max_length=max_length),
            padding=padding,
            calibration=calibration,
            planner=config.planner if config is not None else None,
        )

    @property
    def preset(self) -> DevicePreset:
        """Speeds and memory of the device."""
        return DEVICES[self.options.device or "h200"]

    @property
    def memory_bytes(self) -> float:
        """Memory of a device."""
        if self.options.memory_gib is not None:
            return self.options.memory_gib * GIB
        measured = self.calibration
        return self.preset.memory_bytes if measured is None else measured.memory_bytes

    def settings(
        self,
        planner: str,
        *,
        context_parallel_size: int | None = None,
        cap: int | None = None,
        tp_size: int | None = None,
    ) -> PlanSettings:
        """How a planner plans this run, or one with another cap or tp_size on as many devices.

        Raises:
            ValueError: The calibration is for another tensor-parallel size, or ``tp_size`` does not
                divide the devices.
        """
        sizes = self.sizes
        if tp_size is not None:
            sizes = replace(sizes, tensor_model_parallel_size=tp_size)
        return PlanSettings.of_run(
            sizes,
            max_seqlen_per_dp_cp_rank=cap or self.cap,
            planner=planner,
            context_parallel_size=context_parallel_size,
            cost_model=self._cost_model(sizes),
            execution=self.options.execution,
            padding=self.padding,
        )

    def _cost_model(self, sizes: ParallelSizes) -> CostModel:
        if self.calibration is not None:
            # Measured times hold for the split of weights that was measured.
            tp_size = sizes.tensor_model_parallel_size
            self.calibration.check_tensor_parallel(tp_size, str(self.options.calibration))
            return self.calibration.cost_model
        return cost_model_of_run(
            self.model, sizes, self.preset, full_recompute=bool(self.options.recompute)
        )

    def describe(self) -> str:
        """The model, and where its times come from, in a line."""
        model = self.model
        experts = f", {model.num_experts} experts" if model.num_experts else ""
        source = self.options.calibration or f"{self.preset.name} data sheets"
        return (
            f"{model.num_layers} layers of width {model.hidden_size}{experts}, vocabulary "
            f"{model.vocab_size:,}; times from {source}"
        )

    def notes(self) -> list[str]:
        """What a reader of the predictions has to know."""
        if self.calibration is None:
            return ["times are estimates, not measured: see lightning-dcp calibrate"]
        measured, num_ranks = self.calibration.num_ranks, self.sizes.dp_cp_size
        if num_ranks <= measured:
            return []
        note = (
            f"{self.options.calibration} was measured on a pool of {measured} DPxCP ranks; what "
            f"larger groups of num_ranks={num_ranks} take is extrapolated"
        )
        return [note]

    def state_bytes(self, settings: PlanSettings) -> float:
        """Bytes that weights, gradients and optimizer states take on each device.

        Weights, float32 gradients, and a share of the distributed optimizer's two moments and, for
        bfloat16 weights, of its float32 ones, over the ranks of the pool. Untied embeddings.
        """
        model, stages = self.model, self.sizes.pipeline_model_parallel_size
        ep_size = self.sizes.expert_model_parallel_size
        shared = model.shared_weights + model.hidden_size * model.vocab_size
        experts = 0.0
        if model.num_experts:
            experts = model.expert_weights / model.num_experts_per_tok * model.num_experts
        weights = (shared + experts / ep_size) / (settings.tp_size * stages)
        sharded = (shared + experts) / (settings.tp_size * stages * settings.num_ranks)
        if self.calibration is not None and self.calibration.precision == "32-true":
            # Bytes a weight: 4 and its gradient's 4; two moments of 4, sharded.
            return 8.0 * weights + 8.0 * sharded
        # 2 and its gradient's 4; two moments and the float32 weight, sharded.
        return 6.0 * weights + 12.0 * sharded

    def check_memory(self) -> None:
        """Refuses a cap whose activations no memory holds.

        Raises:
            ValueError: The activations alone are more than a device's memory, or, where
                ``memory_gib`` is given, more than weights and optimizer leave of it.
        """
        settings = self.settings("balanced")
        cost_model, memory = settings.cost_model, self.memory_bytes
        needed = cost_model.activation_bytes(self.cap)
        counted = self.options.memory_gib is not None
        # The data sheet's memory is a guess of the user's device: only what no split of the states
        # could make fit is refused then.
        states = self.state_bytes(settings) if counted else 0.0
        if needed + states <= memory:
            return
        beside = (
            f" beside {states / GIB:.1f} GiB of weights and optimizer states" if counted else ""
        )
        fits = cost_model.rows_that_fit(max(0.0, memory - states))
        advice = f"at most {fits} rows fit" if fits else "no row fits"
        raise ValueError(
            f"max_seqlen_per_dp_cp_rank={self.cap} needs {needed / GIB:.1f} GiB of activations"
            f"{beside}, a device has {memory / GIB:.1f} GiB: {advice}. Lower the cap, use "
            "recompute or a larger tp_size, or set memory_gib if the device has more"
        )


def static_cp_sizes(longest: int, settings: PlanSettings) -> list[int]:
    """CP sizes of a static run on which ``longest`` tokens keep the cap, ascending."""
    cap, tp_size = settings.max_seqlen_per_dp_cp_rank, settings.tp_size
    return [
        size
        for size in cp_sizes_of_pool(settings.num_ranks)
        if settings.num_ranks % size == 0
        and longest <= longest_that_fits(cap, size, tp_size, settings.padding)
    ]
