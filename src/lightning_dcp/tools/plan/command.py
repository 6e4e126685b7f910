"""``lightning-dcp plan``: what each planner would make of some lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.files import whole_file
from lightning_dcp.config.padding import PackPadding, longest_that_fits
from lightning_dcp.planning import Execution, Plan, has_megatron_scheduler
from lightning_dcp.tools.options import parse_options
from lightning_dcp.tools.plan.costs import GIB, CostOptions, Costs
from lightning_dcp.tools.plan.figures import LEGEND, Figures, Setting, table
from lightning_dcp.tools.plan.lengths import Batches, LengthOptions, read_batches
from lightning_dcp.tools.plan.splits import holding_sizes
from lightning_dcp.tools.plan.suggest import Suggestion, suggest
from lightning_dcp.tools.plots import check_plot, plot_plans

FORMAT_VERSION = 1
_DESCRIPTION = (
    "Predicts what static and dynamic context parallelism would make of global batches of your "
    "lengths on a pool of ranks. Runs on any machine: nothing is trained."
)
# A progress bar from so many samples on.
_MANY = 4096


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """The pool of ranks."""

    num_ranks: int
    """Ranks of the DPxCP pool: devices / (tensor parallel x pipeline parallel size)."""
    max_seqlen_per_dp_cp_rank: int
    """The most rows (tokens, padding included) that a rank holds of one micro-batch."""
    tp_size: int = 1
    """Tensor-parallel size."""
    context_parallel_size: int | None = None
    """CP size of the static run to compare with; none for the smallest that holds every sample."""
    pad_to_length: int | None = None
    """Rows of a rank that every micro-batch is padded to."""
    pad_to_length_bucket: int | None = None
    """Number that the rows of a micro-batch are rounded up to a multiple of."""
    execution: Execution | None = None
    """lockstep: a step lasts as long as its slowest rank, as under pipeline and expert parallelism;
    free_running: only the members of a group wait for each other; none for what the engine plans
    for: free_running, or lockstep with a pipeline- or expert-parallel size above 1."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "max_seqlen_per_dp_cp_rank", "tp_size"):
            check_at_least(name, getattr(self, name))
        if self.context_parallel_size is not None:
            check_at_least("context_parallel_size", self.context_parallel_size)
        self.padding.check_cap(self.max_seqlen_per_dp_cp_rank, self.num_ranks, self.tp_size)

    @property
    def padding(self) -> PackPadding:
        """How packs are padded."""
        return PackPadding(
            pad_to_length=self.pad_to_length, pad_to_length_bucket=self.pad_to_length_bucket
        )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What to give out besides the table."""

    plot: str | None = None
    """PNG file for a picture of the first global batch: ranks over time, static above dynamic."""
    json: str | None = None
    """JSON file for all figures and the plans of the first global batch."""
    suggest: bool = False
    """Also try static DP x CP splits, caps that fit the memory and suggest_tp_sizes on as many
    devices, and recommend one."""
    suggest_tp_sizes: list[int] | None = None
    """Tensor-parallel sizes that suggest tries; none for tp_size alone."""

    def __post_init__(self) -> None:
        if self.suggest_tp_sizes is not None and not self.suggest:
            raise ValueError(f"suggest_tp_sizes={self.suggest_tp_sizes} needs --suggest")
        for size in self.suggest_tp_sizes or ():
            check_at_least("suggest_tp_sizes", size)
        check_plot("plot", self.plot)


def main(args: Sequence[str]) -> None:
    """Runs the command.

    Args:
        args: The command line, after ``plan``.

    Raises:
        ValueError: The user gave something that cannot work.
        ModuleNotFoundError: An option needs a package that is not installed.
    """
    pool, lengths, cost, output = parse_options(
        args,
        command="plan",
        description=_DESCRIPTION,
        classes=(PoolOptions, LengthOptions, CostOptions, OutputOptions),
    )
    costs = Costs.read(cost)
    cap = pool.max_seqlen_per_dp_cp_rank
    costs.check_cap(cap, pool.tp_size, pool.num_ranks)
    longest = longest_that_fits(cap, pool.num_ranks, pool.tp_size, pool.padding)
    batches = read_batches(lengths, longest=longest)
    figures = compare_planners(pool, batches, costs)
    print(_report(pool, batches, costs, figures))
    suggestion = None
    if output.suggest:
        suggestion = suggest(
            costs,
            batches,
            num_ranks=pool.num_ranks,
            tp_size=pool.tp_size,
            tp_sizes=output.suggest_tp_sizes or [pool.tp_size],
            cap=cap,
            execution=_execution(pool, costs),
            padding=pool.padding,
        )
        print(f"\n{suggestion.text()}")
    if output.plot is not None:
        _plot(output.plot, figures)
    if output.json is not None:
        text = json.dumps(_values(pool, batches, costs, figures, suggestion), indent=1)
        with whole_file(output.json) as file:
            file.write_text(text + "\n", encoding="utf-8")


def compare_planners(pool: PoolOptions, batches: Batches, costs: Costs) -> list[Figures]:
    """Plans every batch with every planner that is there; the figures of ``static`` come first.

    Args:
        pool: The pool.
        batches: The global batches.
        costs: Gives the cost model.

    Raises:
        ValueError: ``context_parallel_size`` does not divide the pool or hold the longest sample.
    """
    static_size = pool.context_parallel_size or min(
        holding_sizes(
            int(batches.lengths.max()),
            num_ranks=pool.num_ranks,
            cap=pool.max_seqlen_per_dp_cp_rank,
            tp_size=pool.tp_size,
            padding=pool.padding,
        )
    )
    planners = ["static", "longest_sequence", "balanced"]
    if has_megatron_scheduler():
        planners.append("megatron")
    figures = [
        Figures(
            setting=Setting(
                planner=planner,
                num_ranks=pool.num_ranks,
                cap=pool.max_seqlen_per_dp_cp_rank,
                tp_size=pool.tp_size,
                context_parallel_size=static_size if planner == "static" else None,
                cost_model=costs.cost_model(pool.tp_size),
                execution=_execution(pool, costs),
                padding=pool.padding,
            )
        )
        for planner in planners
    ]
    hidden = len(batches.lengths) < _MANY
    for index in tqdm(range(len(batches)), desc="Planning", unit="batch", disable=hidden):
        for one in figures:
            one.add(batches[index])
    return figures


def _execution(pool: PoolOptions, costs: Costs) -> Execution:
    return pool.execution or costs.options.execution


def _report(pool: PoolOptions, batches: Batches, costs: Costs, figures: Sequence[Figures]) -> str:
    lengths = batches.lengths
    tp = f", tensor parallel {pool.tp_size}" if pool.tp_size > 1 else ""
    planned = (
        f"planned: {len(lengths):,} samples of {lengths.min():,} to {lengths.max():,} tokens, mean "
        f"{lengths.mean():,.0f}, in {len(batches):,} global batches of "
        f"{batches.global_batch_size:,}"
    )
    of_pool = (
        f"pool: {pool.num_ranks} DPxCP ranks, max_seqlen_per_dp_cp_rank="
        f"{pool.max_seqlen_per_dp_cp_rank}{tp}, {_execution(pool, costs)}"
    )
    if not pool.padding.is_tight:
        of_pool += f", rows padded to {pool.pad_to_length or pool.pad_to_length_bucket}"
        of_pool += "" if pool.pad_to_length else " or a multiple"
    notes = [f"note: {note}" for note in costs.notes(pool.num_ranks)]
    model = f"model: {costs.describe()}"
    memory = (
        f"memory: {costs.state_bytes(pool.tp_size, pool.num_ranks) / GIB:.1f} GiB a device for "
        f"weights, gradients and optimizer states, of {costs.memory_bytes / GIB:.1f}"
    )
    head = [f"lengths: {batches.counts}", planned, of_pool, model, memory, *notes]
    return "\n".join([*head, "", table(figures), "", LEGEND])


def _plot(path: str, figures: Sequence[Figures]) -> None:
    by_name = {one.setting.planner: one for one in figures}
    shown = (by_name["static"], by_name["balanced"])
    plans = [(one.setting.label, one.first_plan) for one in shown if one.first_plan is not None]
    setting = shown[0].setting
    plot_plans(path, plans, setting.cost_model, setting.execution)


def _values(
    pool: PoolOptions,
    batches: Batches,
    costs: Costs,
    figures: Sequence[Figures],
    suggestion: Suggestion | None,
) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "num_ranks": pool.num_ranks,
        "max_seqlen_per_dp_cp_rank": pool.max_seqlen_per_dp_cp_rank,
        "tp_size": pool.tp_size,
        "pad_to_length": pool.pad_to_length,
        "pad_to_length_bucket": pool.pad_to_length_bucket,
        "execution": _execution(pool, costs),
        "model": costs.model.fingerprint,
        "num_batches": len(batches),
        "global_batch_size": batches.global_batch_size,
        "num_samples": len(batches.lengths),
        "num_tokens": int(batches.lengths.sum()),
        "lengths": str(batches.counts),
        "planners": [one.values(figures[0]) for one in figures],
        "suggestion": None if suggestion is None else suggestion.values(),
        "first_batch": {
            "lengths": batches[0].tolist(),
            "plans": {
                one.setting.planner: _steps(one.first_plan)
                for one in figures
                if one.first_plan is not None
            },
        },
    }


def _steps(plan: Plan) -> list[list[dict[str, Any]]]:
    return [
        [
            {"first_rank": g.first_rank, "size": g.size, "sample_ids": list(g.sample_ids)}
            for g in step.groups
        ]
        for step in plan.steps
    ]
