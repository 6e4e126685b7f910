"""A mistake on the command line: one short error that names what comes near."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from distributed import run_distributed
from lightning_dcp.cli import main

CONFIG = f"--config={Path(__file__).parents[2] / 'configs' / 'quickstart.yaml'}"
STRATEGY = "--trainer.strategy"
CASES = [
    (
        ["--trainer.max_stepss=5"],
        "no option --trainer.max_stepss; did you mean --trainer.max_st",
    ),
    (["--trainr.max_steps=5"], "did you mean --trainer.max_steps?"),
    ([f"{STRATEGY}.max_seqlen=5"], f"did you mean {STRATEGY}.max_seqlen_per_dp_cp_rank?"),
    (["--model.model.num_layrs=5"], "did you mean --model.model.num_layers"),
    (["--model.model.moe.num_expert_s=5"], "did you mean --model.model.moe.num_experts"),
    (["--model.objective=DPO", "--model.objective.betaa=3"], "mean --model.objective.beta?"),
    (["--data=TextDataModul"], "no class TextDataModul; did you mean lightning_dcp.TextDataModule"),
    (["--trainer.callbacks+=lightning_dcp.StepReprot"], "did you mean lightning_dcp.StepReport"),
    ([f"{STRATEGY}.planner=balancd"], "megatron, found balancd; did you mean balanced?"),
    (["--model.model.num_layers=five"], "--model.model.num_layers: expected int, found five"),
    ([f"{STRATEGY}=lightning_dcp.DynamicCPStrategy"], "needs max_seqlen_per_dp_cp_rank"),
    ([f"{STRATEGY}.max_seqlen_per_dp_cp_rank=0"], "max_seqlen_per_dp_cp_rank=0 must be 1 or more"),
    (["--ckpt_path=nowhere.ckpt"], "--ckpt_path nowhere.ckpt: there is no such file"),
    # Before processes are started.
    ([f"{STRATEGY}.tensor_model_parallel_size=3"], "world size 4 is not a multiple of"),
    ([f"{STRATEGY}.sequence_parallel=true"], "tensor_model_parallel_size is 1"),
    (["--trainer.devices=2"], "on 2 ranks holds 2048 at most"),
    (
        [STRATEGY, "dynamic_cp", f"{STRATEGY}.max_seqlen_per_dp_cp_rank=512"],
        "on 4 ranks holds 2048",
    ),
    (["--trainer.accumulate_grad_batches=2"], "accumulate_grad_batches=2"),
]


def told(cases: list[list[str]]) -> list[str]:
    """What the command says to each, one after the other; none may start processes."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    texts = []
    with mock.patch.object(subprocess, "Popen", side_effect=AssertionError("a process")):
        for case in cases:
            err = io.StringIO()
            with contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stopped:
                main(["fit", CONFIG, *case])
            code = stopped.value.code
            texts.append(err.getvalue() + (code if isinstance(code, str) else ""))
    return texts


def test_a_mistake_is_one_short_error_before_processes_start():
    (texts,) = run_distributed(told, 1, [case for case, _ in CASES], init_process_group=False)
    for text, (_, found) in zip(texts, CASES, strict=True):
        assert found in text
        error = text[text.index("lightning-dcp fit: error: ") :]
        assert len(error.splitlines()) <= 3, error
        assert "Traceback" not in text


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ([], "expected a command, fit, validate, test, predict, plan, calibrate, compare"),
        (["fti"], "found fti; did you mean fit?"),
        (["plan"], "the lengths come from nowhere"),
        (["plan", "--max_lenght=5"], "no option --max_lenght; did you mean --max_length?"),
        (["plan", "--lengths.hihg=5"], "no option --lengths.hihg; did you mean --lengths.high?"),
        (["plan", "--lengths.kind=long_tial"], "found long_tial; did you mean long_tail?"),
        (["plan", CONFIG], "--model is a class there: give a config of fit as --model FILE"),
        (["calibrate"], "give --max_seqlen_per_dp_cp_rank, or a --config file"),
        (["calibrate", "--repeats=x"], "--repeats: expected int, found x"),
        (["calibrate", "--repeat=5"], "no option --repeat; did you mean --repeats?"),
        (["compare"], "needs --config FILE"),
        (["compare", "--confg=a.yaml"], "no option --confg; did you mean --config?"),
        (["compare", CONFIG, "--trainer.max_steps", "3"], "compare sets trainer.max_steps itself"),
        (["compare", CONFIG, "--model.model.num_layrs=2"], "did you mean --model.model.num_layers"),
    ],
)
def test_our_own_commands_do_the_same(args, found):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert found in str(stopped.value.code)
    assert len(str(stopped.value.code).splitlines()) <= 3
