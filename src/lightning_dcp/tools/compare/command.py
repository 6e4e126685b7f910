"""``lightning-dcp compare``: static against dynamic, one config, the same everything else."""

from __future__ import annotations

import dataclasses
import json as json_module
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentParser

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.config.files import whole_file
from lightning_dcp.tools.compare.comparison import (
    Comparison,
    TimedStep,
    compare_steps,
    describe,
)
from lightning_dcp.tools.fit_config import FitConfig
from lightning_dcp.tools.plots import check_plot

Mode = Literal["static", "dynamic"]

_DESCRIPTION = (
    "Compares static and dynamic context parallelism on one config: runs of both kinds in turn on "
    "the same ranks, from one checkpoint, on the same samples; one option differs."
)


def main(args: Sequence[str]) -> None:
    """Runs the command with the command line after its name."""
    parser = ArgumentParser(prog="lightning-dcp compare", description=_DESCRIPTION)
    parser.add_function_arguments(compare)
    try:
        compare(**parser.parse_args(list(args)).as_dict())
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

    Returns:
        The comparison, which is also printed.

    Raises:
        ValueError: A number that is too small, or a config file that does not exist.
        RuntimeError: A run failed; the message ends with what it printed.
    """
    config = [config] if isinstance(config, str) else config
    _check(config, steps, warmup_steps, rounds)
    check_plot("plot", plot)
    with tempfile.TemporaryDirectory(prefix="lightning-dcp-compare-") as folder:
        runner = _Runner(config, Path(folder), context_parallel_size)
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


def _check(config: list[str], steps: int, warmup_steps: int, rounds: int) -> None:
    if not config:
        raise ValueError("compare needs --config FILE, as lightning-dcp fit takes it.")
    for path in config:
        if not Path(path).is_file():
            raise ValueError(f"--config {path}: there is no such file.")
    check_at_least("steps", steps)
    check_at_least("rounds", rounds)
    check_at_least("warmup_steps", warmup_steps, 0)


class _Runner:
    """Trains in processes of its own, with the config and a few overrides."""

    def __init__(self, config: list[str], folder: Path, context_parallel_size: int | None) -> None:
        self._config = [f"--config={path}" for path in config]
        self._folder = folder
        self._static_size = context_parallel_size or static_size(config)

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
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise RuntimeError(f"`{' '.join(command[1:])}` failed:\n{tail}")


def static_size(config: list[str]) -> int:
    """CP size of the static runs: the config's, or the whole pool.

    Raises:
        ValueError: The pool cannot be told from the config.
    """
    content: dict[str, Any] = {}
    for path in config:
        content = _merged(content, yaml.safe_load(Path(path).read_text()) or {})
    fit = FitConfig(content)
    size = int(fit.strategy.get("context_parallel_size") or 1)
    if size > 1:
        return size
    if fit.world_size is None:
        raise ValueError(
            "The static runs need a CP size: give --context_parallel_size, or a number of "
            f"trainer.devices in the config, found {content.get('trainer', {}).get('devices')!r}."
        )
    split = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return fit.world_size // math.prod(int(fit.strategy.get(name) or 1) for name in split)


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two configs as fit merges them: mappings key by key, the second one's values otherwise."""
    both = {
        key: _merged(first[key], value)
        for key, value in second.items()
        if isinstance(value, dict) and isinstance(first.get(key), dict)
    }
    return first | second | both


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
