"""How far a calibrated prediction is from what then happens: static against dynamic steps.

``lightning-dcp calibrate`` measures a small model on this machine's processes. Then global batches
run under static and dynamic context parallelism in turn, as in ``dynamic_vs_static.py``, dynamic
planned with the calibrated cost model. Printed: R2 on held-out micro-batches, and the ratio of
static to dynamic step time as predicted from the plans and as measured.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median

import torch

from dynamic_vs_static import Figures, Options, check_same_work, work
from launch import run_on, spread
from lightning_dcp.planning import make_plan
from lightning_dcp.tools.calibrate.command import CalibrateOptions, Result, calibrate

PLANNERS = ("static", "balanced")


def predicted_seconds(options: Options, planner: str, num_ranks: int) -> list[float]:
    """By measured batch: the predicted time of its forward and backward passes."""
    settings = options.settings(planner, num_ranks)
    seconds = []
    for batch in options.batches()[options.warmup :]:
        plan = make_plan(torch.diff(batch["input_ids"].offsets()).numpy(), settings)
        assert plan.report is not None
        seconds.append(plan.report.predicted_seconds)
    return seconds


def measure_model(options: Options, num_ranks: int, repeats: int) -> Result:
    """The calibration of the benchmark's model."""
    return calibrate(
        CalibrateOptions(
            model_config=options.model,
            max_seqlen_per_dp_cp_rank=options.cap(num_ranks),
            num_processes=num_ranks,
            shortest=options.shortest,
            repeats=repeats,
        )
    )


def report(options: Options, figures: dict[str, Figures], num_ranks: int) -> None:
    """The predicted and the measured ratio."""
    static, dynamic = (predicted_seconds(options, planner, num_ranks) for planner in PLANNERS)
    predicted = sum(static) / sum(dynamic)
    of_static, of_dynamic = (figures[planner] for planner in PLANNERS)
    ratios = [a / b for a, b in zip(of_static.seconds, of_dynamic.seconds, strict=True)]
    measured = median(ratios)
    for name, times, found in (
        ("static", static, of_static),
        ("balanced", dynamic, of_dynamic),
    ):
        print(
            f"{name:<9} predicted {sum(times) / len(times):.3f} s a step, measured median "
            f"{median(found.seconds):.3f} s, CP sizes {dict(sorted(found.cp_sizes.items()))}"
        )
    print(
        f"static / balanced: predicted {predicted:.3f}, measured median (quartiles) "
        f"{spread(ratios)}; predicted / measured - 1 = {predicted / measured - 1:+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="pool size")
    parser.add_argument("--repeats", type=int, default=10, help="times of each micro-batch")
    parser.add_argument("--steps", type=int, default=12, help="measured global batches")
    parser.add_argument("--warmup", type=int, default=1, help="global batches before")
    parser.add_argument("--samples", type=int, default=16, help="sequences of a global batch")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of the shortest sequences")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest sequence")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the model")
    given = vars(parser.parse_args())
    num_ranks, repeats = given.pop("processes"), given.pop("repeats")
    options = Options(**given)
    result = measure_model(options, num_ranks, repeats)
    print(f"{result.report()}\n")
    options = replace(options, planners=PLANNERS, cost_model=result.calibration.cost_model)
    figures = run_on(num_ranks, work, options)
    check_same_work(figures)
    report(options, figures, num_ranks)


if __name__ == "__main__":
    main()
