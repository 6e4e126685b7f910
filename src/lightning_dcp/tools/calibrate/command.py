"""``lightning-dcp calibrate``: times micro-batches of a model and fits the cost model to them."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.files import whole_file
from lightning_dcp.parallel import ParallelSizes
from lightning_dcp.planning import (
    CostModel,
    MeasuredMicroBatch,
    ModelSizes,
    cost_model_of_run,
    fit_cost_model,
    predict,
    preset_of,
    r_squared,
)
from lightning_dcp.planning.cost.calibration_file import Calibration
from lightning_dcp.precision import MegatronPrecision
from lightning_dcp.tools.calibrate.measuring import (
    TimingJob,
    measure,
    shapes_to_time,
)
from lightning_dcp.tools.calibrate.plot import plot_calibration
from lightning_dcp.tools.calibrate.processes import run_on, started_by_launcher
from lightning_dcp.tools.models import ModelOptions
from lightning_dcp.tools.options import parse_options
from lightning_dcp.tools.plots import check_plot
from lightning_dcp.tools.tables import aligned

_DESCRIPTION = (
    "Times micro-batches of your model on this machine, forward and backward, and fits the cost "
    "model that planners minimise. Starts a process for each device itself; on several machines "
    "start it with torchrun."
)
# R2 of held-out micro-batches below which a note is due.
_GOOD = 0.95
# One in so many micro-batches is kept out of the fit.
_HELD_OUT = 4


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(ModelOptions):
    """The model, what to time, and where the result goes."""

    max_seqlen_per_dp_cp_rank: int
    """The most rows (tokens, padding included) that a rank holds: that of the runs to predict."""
    output: str = "calibration.json"
    """The file to write, for plan --calibration and DynamicCPStrategy(cost_model=...)."""
    plot: str | None = None
    """PNG file for a picture of predicted against measured times."""
    num_processes: int | None = None
    """Processes to start on this machine; none for one a GPU, or two without a GPU."""
    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's weights."""
    precision: Literal["32-true", "bf16-mixed", "bf16-true"] | None = None
    """As the Trainer's; none for bf16-mixed on GPUs, 32-true on the CPU."""
    shortest: int = 64
    """Tokens of the shortest samples."""
    repeats: int = 10
    """How often each micro-batch is timed, after a round that does not count."""
    quantile: float = 0.1
    """Of the times of a micro-batch, the one that counts: 0.5 is the median. Other work on the
    machine only ever adds time, so that a low one is steadier where there is some."""
    seed: int = 0
    """Of the packs, the token ids and the choice of held-out micro-batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "max_seqlen_per_dp_cp_rank", "tensor_model_parallel_size", "shortest", "repeats",
        ):  # fmt: skip
            check_at_least(name, getattr(self, name))
        if self.num_processes is not None:
            check_at_least("num_processes", self.num_processes)
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile={self.quantile} must be 0 to 1")
        check_at_least("seed", self.seed, 0)
        if self.shortest > self.max_seqlen_per_dp_cp_rank:
            raise ValueError(
                f"shortest={self.shortest} is above max_seqlen_per_dp_cp_rank="
                f"{self.max_seqlen_per_dp_cp_rank}: no sample would fit one rank"
            )
        check_plot("plot", self.plot)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A calibration and what it was made from.

    Attributes:
        calibration: What goes into the file.
        fitted: Micro-batches that the cost model was fitted to.
        held_out: Those that it was not.
    """

    calibration: Calibration
    fitted: tuple[MeasuredMicroBatch, ...]
    held_out: tuple[MeasuredMicroBatch, ...]

    def report(self) -> str:
        """How good the fit is, and the figures that it gave."""
        cost_model = self.calibration.cost_model
        rows = [("micro-batches", "number", "R2", "median error", "worst error")]
        for name, part in (("fitted", self.fitted), ("held out", self.held_out)):
            errors = np.abs(predict(cost_model, part) / np.array([m.seconds for m in part]) - 1.0)
            rows.append(
                (
                    name,
                    str(len(part)),
                    f"{r_squared(cost_model, part):.4f}",
                    f"{np.median(errors):.1%}",
                    f"{errors.max():.1%}",
                )
            )
        return (
            f"{aligned(rows)}\n\n"
            f"a row {1e6 * cost_model.seconds_per_row:.3g} us, a pair of rows "
            f"{1e9 * cost_model.seconds_per_pair:.3g} ns, a micro-batch "
            f"{1e3 * cost_model.fixed_seconds:.3g} ms, a further rank of its group "
            f"{1e3 * cost_model.hop_seconds_within:.3g} ms and "
            f"{1e6 * cost_model.kv_seconds_per_row_within:.3g} us a row, hidden up "
            f"to {cost_model.overlap:.0%} of the attention's time"
        )


def main(args: Sequence[str]) -> None:
    """Runs the command with the command line after its name."""
    (options,) = parse_options(
        args, command="calibrate", description=_DESCRIPTION, classes=(CalibrateOptions,)
    )
    result = calibrate(options)
    # Under torchrun all processes come here, with the same result.
    if int(os.environ.get("RANK", "0")) != 0:
        return
    print(result.report())
    if result.calibration.r_squared < _GOOD:
        print(
            f"\nnote: held-out R2 is below {_GOOD}: predictions will be rough. Measure with fewer "
            "other processes on the machine, more --repeats, or a larger model"
        )
    text = result.calibration.to_json()
    with whole_file(options.output) as file:
        file.write_text(text, encoding="utf-8")
    print(f"\nwritten: {options.output}, for plan --calibration and DynamicCPStrategy(cost_model=)")
    if options.plot is not None:
        plot_calibration(
            options.plot,
            result.calibration.cost_model,
            fitted=result.fitted,
            held_out=result.held_out,
            title=f"R2 of held-out micro-batches: {result.calibration.r_squared:.3f}",
        )


def calibrate(options: CalibrateOptions) -> Result:
    """Measures and fits.

    Raises:
        ValueError: The options do not fit each other, or the measurements give no cost model.
    """
    config, num_processes = options.config(), _num_processes(options)
    tp_size, cap = options.tensor_model_parallel_size, options.max_seqlen_per_dp_cp_rank
    config.check_tensor_parallel(tp_size)
    sizes = ParallelSizes(world_size=num_processes, tensor_model_parallel_size=tp_size)
    cuda = torch.cuda.is_available()
    precision = options.precision or ("bf16-mixed" if cuda else "32-true")
    job = TimingJob(
        model=config,
        tp_size=tp_size,
        dtype=MegatronPrecision(precision).dtype,
        shapes=shapes_to_time(
            sizes.dp_cp_size, cap=cap, tp_size=tp_size, shortest=options.shortest, seed=options.seed
        ),
        repeats=options.repeats,
        quantile=options.quantile,
        seed=options.seed,
    )
    # Up to five figures are fitted, and a quarter of the micro-batches is held out.
    if len(job.shapes) < 2 * _HELD_OUT:
        raise ValueError(
            f"max_seqlen_per_dp_cp_rank={cap} with shortest={options.shortest} makes only "
            f"{len(job.shapes)} different micro-batches, too few to fit to: raise the one or lower "
            "the other"
        )
    measured: list[MeasuredMicroBatch] = (
        measure(job) if started_by_launcher() else run_on(num_processes, measure, job)
    )
    fitted, held_out = _split(measured, options.seed)
    cost_model = fit_cost_model(fitted, base=_unmeasured(config.sizes, sizes, precision))
    calibration = Calibration(
        cost_model=cost_model,
        model=config.sizes,
        num_ranks=sizes.dp_cp_size,
        tensor_model_parallel_size=tp_size,
        precision=precision,
        memory_bytes=_memory_bytes(num_processes),
        r_squared=r_squared(cost_model, held_out),
        machine={
            "host": platform.node(),
            "system": platform.platform(),
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
            "cpu_count": str(os.cpu_count()),
            "torch": torch.__version__,
        },
    )
    return Result(calibration=calibration, fitted=fitted, held_out=held_out)


def _num_processes(options: CalibrateOptions) -> int:
    if started_by_launcher():
        return int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if gpus and options.num_processes is not None and options.num_processes > gpus:
        raise ValueError(f"num_processes={options.num_processes}, but this machine has {gpus} GPUs")
    return options.num_processes or gpus or 2


def _split(
    measured: Sequence[MeasuredMicroBatch], seed: int
) -> tuple[tuple[MeasuredMicroBatch, ...], tuple[MeasuredMicroBatch, ...]]:
    """Holds out micro-batches of each CP size, spread over short and long ones."""
    rng = np.random.default_rng(seed)
    out = set()
    for size in dict.fromkeys(one.size for one in measured):
        of_size = [k for k, one in enumerate(measured) if one.size == size]
        of_size.sort(key=lambda k: sum(measured[k].lengths))
        out.update(of_size[int(rng.integers(_HELD_OUT)) :: _HELD_OUT])
    return (
        tuple(one for k, one in enumerate(measured) if k not in out),
        tuple(one for k, one in enumerate(measured) if k in out),
    )


def _unmeasured(model: ModelSizes, sizes: ParallelSizes, precision: str) -> CostModel:
    """What the measurements say nothing about, from data sheets."""
    cuda = torch.cuda.is_available()
    preset = preset_of("cuda", torch.cuda.get_device_name()) if cuda else preset_of("cpu")
    base = cost_model_of_run(model, sizes, preset)
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is not None and started_by_launcher():
        base = replace(base, ranks_per_node=max(1, int(local) // sizes.tensor_model_parallel_size))
    # The sizes count activations in bfloat16.
    factor = 2.0 if precision == "32-true" else 1.0
    return replace(base, activation_bytes_per_row=factor * base.activation_bytes_per_row)


def _memory_bytes(num_processes: int) -> float:
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole / int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
