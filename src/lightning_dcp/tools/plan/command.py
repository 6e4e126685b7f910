"""``lightning-dcp plan``: what each planner would make of some lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tqdm import tqdm

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.files import whole_file
from lightning_dcp.config.padding import longest_that_fits
from lightning_dcp.planning import has_megatron_scheduler
from lightning_dcp.tools.options import parse_options
from lightning_dcp.tools.plan.lengths import Batches, LengthOptions, read_batches
from lightning_dcp.tools.plan.plot import plot_first_plans
from lightning_dcp.tools.plan.results import LEGEND, PlannerResult, table
from lightning_dcp.tools.plan.run import GIB, PredictedRun, RunOptions, static_cp_sizes
from lightning_dcp.tools.plan.suggest import Suggestion, suggest
from lightning_dcp.tools.plots import check_plot

FORMAT_VERSION = 1
_DESCRIPTION = (
    "Predicts what static and dynamic context parallelism would make of global batches of your "
    "lengths on a pool of ranks. Runs on any machine: nothing is trained."
)
# Bytes and an end of document, padded to what hardware likes.
_BYTE_VOCABULARY = 512
# A progress bar from so many samples on.
_MANY = 4096
_PICTURED = ("static", "balanced")


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
    """Runs the command with the command line after its name."""
    options, lengths, output = parse_options(
        args,
        command="plan",
        description=_DESCRIPTION,
        classes=(RunOptions, LengthOptions, OutputOptions),
    )
    run = PredictedRun.read(options)
    config = options.fit_config()
    if lengths.tokenizer is None and config is not None:
        lengths = replace(lengths, tokenizer=config.tokenizer)
    run.check_memory()
    sizes = run.sizes
    longest = longest_that_fits(
        run.cap, sizes.dp_cp_size, sizes.tensor_model_parallel_size, run.padding
    )
    batches = read_batches(lengths, longest=longest)
    results = compare_planners(run, batches)
    print(_report(run, batches, results, _notes(run, lengths)))
    suggestion = None
    if output.suggest:
        suggestion = suggest(run, batches, output.suggest_tp_sizes)
        print(f"\n{suggestion.text()}")
    if output.plot is not None:
        plot_first_plans(output.plot, [one for one in results if one.planner in _PICTURED])
    if output.json is not None:
        text = json.dumps(_values(run, batches, results, suggestion), indent=1)
        with whole_file(output.json) as file:
            file.write_text(text + "\n", encoding="utf-8")


def compare_planners(run: PredictedRun, batches: Batches) -> list[PlannerResult]:
    """Plans every batch with every planner that is there; the result of ``static`` comes first.

    Raises:
        ValueError: ``context_parallel_size`` does not divide the pool or hold the longest sample.
    """
    static_size = run.options.context_parallel_size or min(
        static_cp_sizes(int(batches.lengths.max()), run.settings("static", context_parallel_size=1))
    )
    # static first: ratios are to it.
    planners = ["static", "longest_sequence", "balanced"]
    if has_megatron_scheduler():
        planners.append("megatron")
    results = [
        PlannerResult(settings=run.settings(planner, context_parallel_size=static_size))
        for planner in planners
    ]
    hidden = len(batches.lengths) < _MANY
    # Batch by batch: what slows the machine slows all planners alike.
    for index in tqdm(range(len(batches)), desc="Planning", unit="batch", disable=hidden):
        for one in results:
            one.add(batches[index])
    return results


def _notes(run: PredictedRun, lengths: LengthOptions) -> list[str]:
    of_bytes = lengths.data is not None and lengths.tokenizer is None
    if not of_bytes or run.model.vocab_size <= _BYTE_VOCABULARY:
        return run.notes()
    note = (
        f"the lengths of data are bytes, and the model has a vocabulary of {run.model.vocab_size:,}"
        ": give its --tokenizer. A text has some four bytes a token, so that these figures are of "
        "another workload"
    )
    return [note, *run.notes()]


def _report(
    run: PredictedRun, batches: Batches, results: Sequence[PlannerResult], notes: Sequence[str]
) -> str:
    lengths, padding, settings = batches.lengths, run.padding, results[0].settings
    planned = (
        f"planned: {len(lengths):,} samples of {lengths.min():,} to {lengths.max():,} tokens, mean "
        f"{lengths.mean():,.0f}, in {len(batches):,} global batches of "
        f"{batches.global_batch_size:,}"
    )
    pool = (
        f"pool: {settings.num_ranks} DPxCP ranks, max_seqlen_per_dp_cp_rank={run.cap}"
        f"{f', tensor parallel {settings.tp_size}' if settings.tp_size > 1 else ''}, "
        f"{settings.execution}"
    )
    if padding.pad_to_length or padding.pad_to_length_bucket:
        pool += f", rows padded to {padding.pad_to_length or padding.pad_to_length_bucket}"
        pool += "" if padding.pad_to_length else " or a multiple"
    pool += ", padded for fp8" if padding.fp8 else ""
    pool += f", fit plans with {run.planner}" if run.planner is not None else ""
    memory = (
        f"memory: {run.state_bytes(settings) / GIB:.1f} GiB a device for weights, gradients and "
        f"optimizer states, of {run.memory_bytes / GIB:.1f}"
    )
    head = [f"lengths: {batches.counts}", planned, pool, f"model: {run.describe()}", memory]
    head += [f"note: {note}" for note in notes]
    return "\n".join([*head, "", table(results), "", LEGEND])


def _values(
    run: PredictedRun,
    batches: Batches,
    results: Sequence[PlannerResult],
    suggestion: Suggestion | None,
) -> dict[str, Any]:
    settings = results[0].settings
    return {
        "format_version": FORMAT_VERSION,
        "num_ranks": settings.num_ranks,
        "max_seqlen_per_dp_cp_rank": run.cap,
        "tp_size": settings.tp_size,
        "pad_to_length": run.padding.pad_to_length,
        "pad_to_length_bucket": run.padding.pad_to_length_bucket,
        "fp8": run.padding.fp8,
        "execution": settings.execution,
        "model": run.model.fingerprint,
        "num_batches": len(batches),
        "global_batch_size": batches.global_batch_size,
        "num_samples": len(batches.lengths),
        "num_tokens": int(batches.lengths.sum()),
        "lengths": str(batches.counts),
        "planners": [one.values(results[0]) for one in results],
        "suggestion": None if suggestion is None else suggestion.values(),
        "first_batch": {
            "lengths": batches[0].tolist(),
            "plans": {
                one.planner: [[asdict(g) for g in step.groups] for step in one.first_plan.steps]
                for one in results
                if one.first_plan is not None
            },
        },
    }
