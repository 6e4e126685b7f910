"""``lightning-dcp compare``: static against dynamic, one config, the same everything else."""

from __future__ import annotations

import dataclasses
import json as json_module
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.files import whole_file
from lightning_dcp.tools.compare.comparison import (
    Comparison,
    TimedStep,
    compare_steps,
    describe,
)
from lightning_dcp.tools.fit_config import FitConfig
from lightning_dcp.tools.option_errors import short_errors
from lightning_dcp.tools.options import new_parser
from lightning_dcp.tools.plots import check_plot

Mode = Literal["static", "dynamic"]

_DESCRIPTION = (
    "Compares static and dynamic context parallelism on one config: runs of both kinds in turn on "
    "the same ranks, from one checkpoint, on the same samples; one option differs."
)
_OF_FIT = ("--trainer", "--model", "--data", "--seed_everything")
# What compare gives each run.
_SET_HERE = (
    "trainer.max_steps", "trainer.max_epochs", "trainer.limit_val_batches", "trainer.logger",
    "trainer.default_root_dir", "trainer.strategy.dynamic_context_parallel",
)  # fmt: skip


def main(args: Sequence[str]) -> None:
    """Runs the command with the command line after its name."""
    own, config, overrides = _split(args)
    parser = new_parser("compare", _DESCRIPTION)
    # For --help: `_split` has taken them out.
    parser.add_argument("--config", help="A config of fit; the later of several overrides.")
    parser.add_argument("--trainer", help="As of fit, like --model and --data: --trainer.devices 2")
    parser.add_function_arguments(compare, skip={"config", "overrides"})
    with short_errors(parser):
        given = parser.parse_args(own).as_dict()
    del given["config"], given["trainer"]
    try:
        compare(config, overrides=overrides, **given)
    # A failed run: told_once would take it for a fault of ours and show a traceback.
    except RuntimeError as error:
        sys.exit(f"lightning-dcp compare: {error}")


def compare(
    config: list[str] | str,
    steps: int = 20,
    warmup_steps: int = 5,
    rounds: int = 2,
    context_parallel_size: int | None = None,
    ckpt_path: str | None = None,
    json: str | None = None,
    plot: str | None = None,
    overrides: Sequence[str] = (),
) -> Comparison:
    """Compares static and dynamic context parallelism on one config.

    Both kinds of run start from one checkpoint and see the same samples, global batches, topology,
    cap, optimizer and precision; ``dynamic_context_parallel`` alone differs. They are run in turn
    on the same ranks, and warm-up steps are left out. Nothing is logged, validated or saved
    meanwhile: the config's logger, and its callbacks that save, stop early or show progress, are
    left out; its other callbacks run.

    Args:
        config: Config files as ``lightning-dcp fit`` takes them; later ones override earlier ones.
        steps: Measured steps of each run.
        warmup_steps: Steps before them that are not measured.
        rounds: Runs of each kind: static, dynamic, static, dynamic and so on.
        context_parallel_size: CP size of the static runs; that of the config by default, or the
            whole pool where the config names none.
        ckpt_path: The checkpoint that all runs start from; by default one is made, of the model's
            initial weights after one step.
        json: Write the comparison and every measured step to this file.
        plot: Draw step times and CP sizes into this PNG file; needs the extra ``plot``.
        overrides: Options of ``fit``, which override the config files.

    Returns:
        The comparison, which is also printed.

    Raises:
        ValueError: A number that is too small, or a config file that does not exist.
        RuntimeError: A run failed; the message ends with what it printed.
    """
    config = [config] if isinstance(config, str) else config
    _check(config, overrides, steps, warmup_steps, rounds)
    check_plot("plot", plot)
    with tempfile.TemporaryDirectory(prefix="lightning-dcp-compare-") as folder:
        runner = _Runner(config, overrides, Path(folder), context_parallel_size)
        start = ckpt_path or runner.make_checkpoint()
        runs: dict[Mode, list[list[TimedStep]]] = {"static": [], "dynamic": []}
        for number in range(rounds):
            # In turn, so that a slow spell of the machine falls on both.
            for mode in ("static", "dynamic"):
                print(f"round {number + 1} of {rounds}: {mode}", flush=True)
                timed = runner.run(mode, f"{mode}-{number}", start, warmup_steps + steps)
                runs[mode].append(timed[warmup_steps:])
    comparison = compare_steps(runs["static"], runs["dynamic"])
    print(describe(comparison))
    if json is not None:
        _write_json(json, comparison, runs)
    if plot is not None:
        from lightning_dcp.tools.compare.plot import draw_comparison

        draw_comparison(comparison, runs["static"], runs["dynamic"], plot)
    return comparison


def _split(args: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The options of compare, the configs of fit, and its other options."""
    own: list[str] = []
    config: list[str] = []
    overrides: list[str] = []
    target = own
    for arg in args:
        name, _, value = arg.partition("=")
        if name in ("-c", "--config"):
            target = config
        elif arg.startswith("--"):
            target = overrides if re.split(r"[.+=]", arg)[0] in _OF_FIT else own
        if target is not config:
            target.append(arg)
        elif (files := value if name in ("-c", "--config") else arg) != "":
            listed = yaml.safe_load(files)
            config += listed if isinstance(listed, list) else [files]
    return own, config, overrides


def _check(
    config: list[str], overrides: Sequence[str], steps: int, warmup_steps: int, rounds: int
) -> None:
    if not config:
        raise ValueError("compare needs --config FILE, as lightning-dcp fit takes it.")
    for path in config:
        if not Path(path).is_file():
            raise ValueError(f"--config {path}: there is no such file.")
    for override in overrides:
        name = override.partition("=")[0].replace(".init_args", "").removeprefix("--")
        if name in _SET_HERE:
            raise ValueError(f"compare sets {name} itself: leave --{name} out (--steps, --rounds).")
    check_at_least("steps", steps)
    check_at_least("rounds", rounds)
    check_at_least("warmup_steps", warmup_steps, 0)


class _Runner:
    """Trains in processes of its own, with the config and a few overrides."""

    def __init__(
        self,
        config: list[str],
        overrides: Sequence[str],
        folder: Path,
        context_parallel_size: int | None,
    ) -> None:
        self._config = [*(f"--config={path}" for path in config), *overrides]
        self._folder = folder
        self._static_size = context_parallel_size or static_size(config, overrides)

    def make_checkpoint(self) -> str:
        """One step from the initial weights, so that both kinds resume alike."""
        path = self._folder / "start.ckpt"
        # jsonargparse gives callbacks.path to the callback that was added last.
        save = ["--trainer.callbacks+=lightning_dcp.tools.compare.callbacks.SaveAtEnd"]
        self._fit("start", 1, [*save, f"--trainer.callbacks.path={path}"])
        return str(path)

    def run(self, mode: Mode, name: str, ckpt_path: str, steps: int) -> list[TimedStep]:
        """Trains ``steps`` steps from the checkpoint.

        Returns:
            Every step, warm-up included.

        Raises:
            RuntimeError: The run failed, or ended before it had made its steps.
        """
        times = self._folder / f"{name}.json"
        strategy = "--trainer.strategy.init_args"
        overrides = [f"{strategy}.dynamic_context_parallel={str(mode == 'dynamic').lower()}"]
        if mode == "static":
            # A planner of the config chooses CP sizes, which a static run refuses.
            overrides.append(f"{strategy}.planner=null")
            overrides.append(f"{strategy}.context_parallel_size={self._static_size}")
        overrides += [
            "--trainer.callbacks+=lightning_dcp.tools.compare.callbacks.StepTimes",
            f"--trainer.callbacks.path={times}",
            f"--ckpt_path={ckpt_path}",
        ]
        # The step that made the checkpoint counts for max_steps.
        self._fit(name, 1 + steps, overrides)
        timed = [TimedStep.from_json(record) for record in json_module.loads(times.read_text())]
        if len(timed) < steps:
            raise RuntimeError(
                f"The {mode} run made {len(timed)} of {steps} steps: the data ends before. Use "
                "fewer --steps or --warmup_steps, or more data."
            )
        return timed

    def _fit(self, name: str, max_steps: int, overrides: list[str]) -> None:
        command = [
            sys.executable, "-m", "lightning_dcp.tools.compare.measured_fit", "fit", *self._config,
            f"--trainer.max_steps={max_steps}",
            # max_steps alone ends the run.
            "--trainer.max_epochs=-1",
            "--trainer.limit_val_batches=0",
            f"--trainer.default_root_dir={self._folder / name}",
            *overrides,
        ]  # fmt: skip
        done = subprocess.run(command, text=True, capture_output=True, env=dict(os.environ))
        if done.returncode:
            # A mistake in the options, which fit has told in a line or two.
            _, told, mistake = done.stderr.partition("lightning-dcp fit: error: ")
            if told:
                raise ValueError(mistake.removesuffix("(--traceback shows where)\n").strip())
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise RuntimeError(f"`{' '.join(command[1:])}` failed:\n{tail}")


def static_size(config: list[str], overrides: Sequence[str] = ()) -> int:
    """CP size of the static runs: the config's, or the whole pool.

    Raises:
        ValueError: The pool cannot be told from the config.
    """
    fit = FitConfig.read(config, overrides)
    size = int(fit.strategy.get("context_parallel_size") or 1)
    if size > 1:
        return size
    if fit.world_size is None:
        raise ValueError(
            "The static runs need a CP size: give --context_parallel_size, or a number of "
            "trainer.devices."
        )
    split = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return fit.world_size // math.prod(int(fit.strategy.get(name) or 1) for name in split)


def _write_json(path: str, comparison: Comparison, runs: dict[Mode, list[list[TimedStep]]]) -> None:
    content: dict[str, Any] = {
        "comparison": dataclasses.asdict(comparison),
        "runs": {
            mode: [[dataclasses.asdict(step) for step in run] for run in rounds]
            for mode, rounds in runs.items()
        },
    }
    with whole_file(path) as file:
        file.write_text(json_module.dumps(content, indent=1))
