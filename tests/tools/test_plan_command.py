"""``lightning-dcp plan``: every kind of input, its figures, its files, and what it refuses."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import struct
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from lightning_dcp.cli import main
from lightning_dcp.config.padding import PackPadding
from lightning_dcp.data import LengthDistribution
from lightning_dcp.planning import (
    CPU,
    H200,
    LLAMA_8B,
    CostModel,
    Group,
    ModelSizes,
    Plan,
    Step,
    evaluate,
)
from lightning_dcp.planning.cost.calibration_file import Calibration
from lightning_dcp.tools.plan.lengths import LengthOptions, read_batches
from lightning_dcp.tools.plan.suggest import Candidate, recommend

POOL = ["--num_ranks=4", "--max_seqlen_per_dp_cp_rank=512"]
LONG_TAIL = ["--lengths.kind=long_tail", "--lengths.low=64", "--lengths.high=2048"]
FEW = ["--global_batch_size=16", "--num_batches=3"]


def plan(capsys, *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    code = stopped.value.code
    return code if isinstance(code, str) else capsys.readouterr().err


def planner_lines(out: str) -> dict[str, list[str]]:
    lines = [re.split(r"  +", line) for line in out.splitlines()]
    names = ("static", "longest_sequence", "balanced")
    return {line[0].split()[0]: line for line in lines if line[0].startswith(names)}


def json_of(capsys, path, *arguments: str) -> dict:
    plan(capsys, f"--json={path}", *arguments)
    assert not [file for file in path.parent.iterdir() if file.name.startswith(".")]
    return json.loads(path.read_text())


def test_a_distribution_gives_a_line_for_each_planner(capsys):
    out = plan(capsys, *POOL, *LONG_TAIL, *FEW)
    lines = planner_lines(out)
    assert list(lines) == ["static", "longest_sequence", "balanced"]
    assert lines["static"][0] == "static (CP 4)"
    assert float(lines["static"][2]) == 1.0
    assert float(lines["balanced"][2]) >= 1.0
    assert "48 samples" in out
    assert "3 global batches of 16" in out


def test_a_length_file_is_planned_whole(capsys, tmp_path):
    path = tmp_path / "lengths.csv.gz"
    with gzip.open(path, "wt") as stream:
        stream.write("length,count\n64,30\n700,9\n4000,1\n")
    values = json_of(
        capsys, tmp_path / "plan.json", *POOL, f"--length_file={path}", "--num_batches=all",
        "--global_batch_size=16",
    )  # fmt: skip
    # The sequence of 4,000 tokens is cut off at the 2,048 that the pool holds.
    assert values["num_tokens"] == 30 * 64 + 9 * 700 + 2048
    assert (values["num_samples"], values["num_batches"]) == (40, 3)
    assert "1 documents truncated" in values["lengths"]


def test_jsonl_and_text_files_are_tokenised(capsys, tmp_path):
    texts = ["a" * 99, "b" * 300, "c" * 39]
    lines = "".join(json.dumps({"content": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.txt").write_text("d" * 9)
    values = json_of(
        capsys, tmp_path / "plan.json", *POOL, f"--data={tmp_path}/*.jsonl",
        f"--data+={tmp_path}/b.txt", "--text_field=content", f"--cache_dir={tmp_path}/cache",
        "--num_batches=all",
    )  # fmt: skip
    # One token a byte, and the end of each document.
    assert sorted(values["first_batch"]["lengths"]) == [10, 40, 100, 301]


def test_bytes_beside_a_vocabulary_of_tokens_are_noted(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 99)
    data = [f"--data={tmp_path}/a.txt", f"--cache_dir={tmp_path}/cache", "--num_batches=1"]
    note = "the lengths of data are bytes, and the model has a vocabulary of 128,256"
    assert note in plan(capsys, *POOL, *data, "--model=8b")
    assert "bytes" not in plan(capsys, *POOL, *data, "--model_config.vocab_size=257")


def candidate(rate, tp_size=1, *, static=False, gib=20.0):
    settings = SimpleNamespace(
        tp_size=tp_size, num_ranks=8 // tp_size, planner="static" if static else "balanced",
        max_seqlen_per_dp_cp_rank=1024, context_parallel_size=4 if static else None,
    )  # fmt: skip
    result = SimpleNamespace(settings=settings, tokens_per_second=rate)
    return Candidate(result=result, bytes_per_device=gib * 2**30)


@pytest.mark.parametrize(
    ("found", "best"),
    [
        # Nothing for 0.01 %: neither more tensor parallelism nor a full memory.
        ([candidate(100), candidate(90, static=True), candidate(100.01, 2, static=True)], 0),
        ([candidate(100), candidate(99, static=True, gib=72.5), candidate(90, static=True)], 0),
        ([candidate(100), candidate(99, static=True)], 1),
        ([candidate(100), candidate(90, static=True), candidate(120, 2, static=True)], 2),
        ([candidate(100, gib=72.5), candidate(80), candidate(80, static=True)], 0),
    ],
)
def test_suggest_takes_less_where_more_gives_little(found, best):
    run = SimpleNamespace(memory_bytes=80.0 * 2**30)
    assert recommend(run, found).best is found[best]


def test_packs_of_few_shapes(capsys, tmp_path):
    options = [*POOL, *LONG_TAIL, *FEW, "--pad_to_length_bucket=64"]
    found = json_of(capsys, tmp_path / "plan.json", *options, "--suggest")
    assert found["pad_to_length_bucket"] == 64
    lengths = tuple(found["first_batch"]["lengths"])
    for planner, steps in found["first_batch"]["plans"].items():
        made = Plan(
            steps=tuple(
                Step(tuple(Group(g["first_rank"], g["size"], tuple(g["sample_ids"])) for g in step))
                for step in steps
            ),
            lengths=lengths,
            num_ranks=4,
            max_seqlen_per_dp_cp_rank=512,
            planner=planner,
            padding=PackPadding(pad_to_length_bucket=64),
        )
        made.validate()
    assert "rows padded to 64 or a multiple" in plan(capsys, *options)


def test_what_padding_cannot_do(capsys):
    assert "pad_to_length_bucket=513 is larger than max_seqlen_per_dp_cp_rank=512" in refused(
        capsys, *POOL, *LONG_TAIL, "--pad_to_length_bucket=513"
    )
    assert "pad_to_length=512 fixes" in refused(
        capsys, *POOL, *LONG_TAIL, *FEW, "--pad_to_length=512", "--suggest"
    )


@pytest.mark.parametrize(
    ("options", "execution"),
    [
        ([], "free_running"),
        (["--pipeline_model_parallel_size=2"], "lockstep"),
        (["--expert_model_parallel_size=2"], "lockstep"),
        (["--pipeline_model_parallel_size=2", "--execution=free_running"], "free_running"),
    ],
)
def test_plans_for_what_the_parallel_sizes_run(capsys, tmp_path, options, execution):
    found = json_of(capsys, tmp_path / "plan.json", *POOL, *LONG_TAIL, *FEW, *options)
    assert found["execution"] == execution


@pytest.mark.parametrize("planner", ["static", "longest_sequence", "balanced"])
@pytest.mark.parametrize("execution", ["lockstep", "free_running"])
def test_the_json_holds_what_evaluate_says(capsys, tmp_path, planner, execution):
    values = json_of(
        capsys, tmp_path / "plan.json", *POOL, *LONG_TAIL, "--global_batch_size=24",
        "--num_batches=1", "--model=8b", "--device=h200", f"--execution={execution}",
    )  # fmt: skip
    steps = tuple(
        Step(tuple(Group(g["first_rank"], g["size"], tuple(g["sample_ids"])) for g in step))
        for step in values["first_batch"]["plans"][planner]
    )
    made = Plan(
        steps=steps,
        lengths=tuple(values["first_batch"]["lengths"]),
        num_ranks=4,
        max_seqlen_per_dp_cp_rank=512,
    )
    report = evaluate(made, CostModel.from_sizes(LLAMA_8B, H200), execution=execution)
    (found,) = [line for line in values["planners"] if line["planner"] == planner]
    for name in (
        "tokens_per_second", "quality", "predicted_seconds", "bound_seconds", "idle_share",
        "padding_share", "communication_share", "peak_activation_bytes",
    ):  # fmt: skip
        assert found[name] == pytest.approx(getattr(report, name), rel=1e-9, abs=1e-12), name
    assert found["micro_batches_per_rank"] == len(steps)
    sizes = {int(size): count for size, count in found["micro_batches_by_cp_size"].items()}
    assert sizes == made.cp_sizes()


def test_the_same_seed_gives_the_same_figures(capsys, tmp_path):
    def timeless(seed: int) -> list:
        path = tmp_path / f"{seed}.json"
        values = json_of(capsys, path, *POOL, *LONG_TAIL, *FEW, f"--seed={seed}")
        return [
            {k: v for k, v in line.items() if not k.startswith("planning_seconds")}
            for line in values["planners"]
        ]

    assert timeless(1) == timeless(1)
    assert timeless(1) != timeless(2)


def test_options_can_come_from_a_file(capsys, tmp_path):
    config = tmp_path / "plan.yaml"
    options = {
        "num_ranks": 4,
        "max_seqlen_per_dp_cp_rank": 512,
        "lengths": {"kind": "constant", "low": 100},
        "global_batch_size": 8,
        "num_batches": 1,
    }
    config.write_text(yaml.safe_dump(options))
    assert "8 samples of 100 to 100 tokens" in plan(capsys, f"--config={config}")


def test_the_picture_is_a_png_of_a_readable_size(capsys, tmp_path):
    path = tmp_path / "new" / "plan.png"
    plan(capsys, *POOL, *LONG_TAIL, *FEW, f"--plot={path}")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert 1000 <= width <= 3000
    assert 400 <= height <= 3000
    assert len(data) > 10_000
    assert [file.name for file in path.parent.iterdir()] == ["plan.png"]


def test_suggest_recommends_what_fits_the_memory(capsys, tmp_path):
    memory = 100.0
    values = json_of(
        capsys, tmp_path / "plan.json", "--num_ranks=8", "--max_seqlen_per_dp_cp_rank=2048",
        "--lengths.low=512", "--lengths.high=16384", *FEW, "--model=8b", f"--memory_gib={memory}",
        "--suggest", "--suggest_tp_sizes=[1,2,3]",
    )  # fmt: skip
    suggestion = values["suggestion"]
    best, candidates = suggestion["recommended"], suggestion["candidates"]
    assert best in candidates
    assert len({c["max_seqlen_per_dp_cp_rank"] for c in candidates}) > 2
    assert {c["tp_size"] for c in candidates} == {1, 2}
    for candidate in candidates:
        assert candidate["bytes_per_device"] <= memory * 2**30
        assert candidate["num_ranks"] * candidate["tp_size"] == 8
        # Every candidate holds the longest sample, which all of them were given.
        held = candidate["context_parallel_size"] or candidate["num_ranks"]
        assert candidate["max_seqlen_per_dp_cp_rank"] * held >= max(
            values["first_batch"]["lengths"]
        )
    # Tensor parallelism's communication has no price: a few percent are no reason for it.
    rates = {c["tp_size"]: 0.0 for c in candidates}
    for c in candidates:
        rates[c["tp_size"]] = max(rates[c["tp_size"]], c["tokens_per_second"])
    assert best["tp_size"] == (1 if rates[1] * 1.1 > rates[2] else 2)
    assert best["tokens_per_second"] > rates[best["tp_size"]] / 1.02
    assert "has no price in these figures" in suggestion["reason"]
    assert f"{memory:.1f} GiB" in suggestion["reason"]


def test_a_smaller_memory_gives_smaller_caps(capsys, tmp_path):
    def caps(memory: int) -> set[int]:
        values = json_of(
            capsys, tmp_path / f"{memory}.json", "--num_ranks=8", "--lengths.low=512",
            "--max_seqlen_per_dp_cp_rank=1024", "--lengths.high=8192", *FEW, "--model=8b",
            f"--memory_gib={memory}", "--suggest",
        )  # fmt: skip
        candidates = values["suggestion"]["candidates"]
        return {candidate["max_seqlen_per_dp_cp_rank"] for candidate in candidates}

    small, large = caps(64), caps(141)
    assert small < large
    assert max(small) < max(large)


def test_the_model_is_a_preset_a_hugging_face_config_a_fit_config_or_numbers(capsys, tmp_path):
    hugging_face = {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 384, "vocab_size": 257,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hugging_face))
    numbers = {"hidden_size": 128, "num_layers": 4, "num_attention_heads": 8}
    numbers |= {"num_query_groups": 4, "ffn_hidden_size": 384}
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"model": numbers}}}))
    given = [
        [f"--model={tmp_path}"],
        [f"--model={tmp_path}/config.json"],
        [f"--model={tmp_path}/fit.yaml"],
        [f"--model_config.{name}={value}" for name, value in numbers.items()],
    ]
    models = {
        json_of(capsys, tmp_path / "plan.json", *POOL, *LONG_TAIL, *FEW, *model)["model"]
        for model in given
    }
    assert models == {ModelSizes.from_hf_config(hugging_face).fingerprint}
    values = json_of(capsys, tmp_path / "plan.json", *POOL, *LONG_TAIL, *FEW, "--model=8b")
    assert values["model"] == LLAMA_8B.fingerprint
    numbers["moe"] = {"num_experts": 8, "topk": 2, "ffn_hidden_size": 96}
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"model": numbers}}}))
    fit = json_of(capsys, tmp_path / "plan.json", *POOL, *LONG_TAIL, *FEW, *given[2])
    of_experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    assert fit["model"] == ModelSizes.from_hf_config(hugging_face | of_experts).fingerprint


@pytest.fixture
def calibration(tmp_path):
    """A calibration file of the 8B sizes, on two ranks."""
    path = tmp_path / "calibration.json"
    text = Calibration(
        cost_model=CostModel.from_sizes(LLAMA_8B, CPU),
        model=LLAMA_8B,
        num_ranks=2,
        tensor_model_parallel_size=1,
        precision="32-true",
        memory_bytes=64e9,
        r_squared=0.99,
        machine={"device": "CPU"},
    ).to_json()
    path.write_text(text)
    return path


def test_a_calibration_replaces_the_device(capsys, tmp_path, calibration):
    with_it, preset, other = (
        json_of(capsys, tmp_path / "plan.json", *POOL, *LONG_TAIL, *FEW, *options)["planners"][0]
        for options in ([f"--calibration={calibration}"], ["--device=cpu", "--model=8b"], [])
    )
    assert with_it["tokens_per_second"] == pytest.approx(preset["tokens_per_second"])
    assert with_it["tokens_per_second"] < other["tokens_per_second"] / 10
    out = plan(capsys, *POOL, *LONG_TAIL, *FEW, f"--calibration={calibration}")
    assert "measured on a pool of 2" in out
    assert "extrapolated" in out


@pytest.mark.parametrize(
    ("change", "options", "found"),
    [
        ({"format_version": 7}, [], "format_version=7, this release reads 1"),
        ({"kind": "something"}, [], "kind='something'"),
        ({"extra": 1}, [], r"unknown \['extra'\]"),
        ({"num_ranks": "many"}, [], "many"),
        ({}, ["--model=30b-a3b"], "another model: num_layers=32 there and 48 here"),
        ({}, ["--tp_size=2"], "tensor_model_parallel_size=1, this is for 2"),
    ],
)
def test_a_calibration_that_does_not_belong_is_refused(capsys, calibration, change, options, found):
    calibration.write_text(json.dumps(json.loads(calibration.read_text()) | change))
    message = refused(capsys, *POOL, *LONG_TAIL, *FEW, f"--calibration={calibration}", *options)
    assert re.search(found, message)
    assert str(calibration) in message


def test_a_calibration_that_is_no_json_or_not_there_is_refused(capsys, calibration):
    calibration.write_text("length,count\n")
    for path, found in ((calibration, "no JSON"), (calibration.parent / "none", "No such file")):
        message = refused(capsys, *POOL, *LONG_TAIL, *FEW, f"--calibration={path}")
        assert str(path) in message
        assert found in message
        assert "calibrate" in message


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tokens\n3\n", "line 1: expected the header 'length,count', found ['tokens']"),
        ("length,count\n64,1\n-5,2\n", "line 3: expected two positive integers"),
        ("length,count\n64,1\n7.5,2\n", "found '7.5,2'"),
        ("length,count\n0,2\n", "found '0,2'"),
        ("length,count\n", "no line of numbers"),
    ],
)
def test_a_file_that_is_no_length_file_is_named_with_the_line(capsys, tmp_path, text, found):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    message = refused(capsys, *POOL, f"--length_file={path}")
    assert str(path) in message
    assert found in message


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--num_ranks=0"], "num_ranks=0 must be 1 or more"),
        (["--num_ranks=2.5"], "num_ranks"),
        (["--max_seqlen_per_dp_cp_rank=-8"], "max_seqlen_per_dp_cp_rank=-8 must be 1 or more"),
        (["--max_seqlen_per_dp_cp_rank=many"], "max_seqlen_per_dp_cp_rank"),
        (["--max_seqlen_per_dp_cp_rank=1000000"], "needs 4150.4 GiB of activations"),
        (["--memory_gib=50"], "beside 67.3 GiB of weights"),
        (["--lengths.low=0"], "low=0"),
        (["--tp_size=0"], "tp_size=0"),
        (["--context_parallel_size=3"], "context_parallel_size=3"),
        (["--context_parallel_size=1"], "context_parallel_size=1"),
        (["--max_length=0"], "max_length=0"),
        (["--max_length=4096"], "at most 2048 tokens fit"),
        (["--long_sequences=error", "--lengths.high=4096"], "of 48 lengths are above 2048"),
        (["--num_batches=all"], "num_batches='all'"),
        (["--num_batches=0"], "num_batches=0"),
        (["--global_batch_size=-1"], "global_batch_size=-1"),
        (["--length_file=nowhere.csv"], "length_file and lengths"),
        (["--model=9b"], "model=['8b', '9b'] is none of 8b, 30b-a3b"),
        (["--model=8b", "--model_config.num_layers=2"], "only one of the two"),
        (["--plot=plan.svg"], ".png"),
        (["--suggest", "--memory_gib=68"], "max_seqlen_per_dp_cp_rank=512 needs"),
        (["--suggest_tp_sizes=[2]"], "--suggest"),
        (["--no_such_option=1"], "no_such_option"),
    ],
)
def test_what_cannot_work_is_refused_by_its_name(capsys, options, found):
    assert found in refused(capsys, *POOL, *LONG_TAIL, *FEW, "--model=8b", *options)


def test_no_source_of_lengths_is_refused(capsys):
    assert "from nowhere" in refused(capsys, *POOL)
    assert "there is no file 'nowhere.csv'" in refused(capsys, *POOL, "--length_file=nowhere.csv")
    assert "matches no file" in refused(capsys, *POOL, "--data=nowhere/*.jsonl")


def test_suggest_says_what_would_be_needed_where_nothing_fits(capsys):
    message = refused(
        capsys, "--num_ranks=2", "--max_seqlen_per_dp_cp_rank=2048", "--lengths.low=512",
        "--lengths.high=4096", *FEW, "--model=30b-a3b", "--suggest",
    )  # fmt: skip
    assert "no cap fits a device of 131.3 GiB" in message
    assert "expert-parallel" in message


def test_a_missing_matplotlib_is_named(capsys, monkeypatch):
    from lightning_utilities.core.imports import RequirementCache

    missing = RequirementCache("matplotlib>=999")
    monkeypatch.setattr("lightning_dcp.tools.plots.MATPLOTLIB_AVAILABLE", missing)
    message = refused(capsys, *POOL, *LONG_TAIL, *FEW, "--plot=plan.png")
    assert "matplotlib" in message
    assert "999" in message


def test_batches_of_a_policy_keep_the_tokens_that_it_keeps():
    lengths = LengthDistribution(kind="uniform", low=1, high=5000)

    def batches(policy):
        options = LengthOptions(
            lengths=lengths, long_sequences=policy, global_batch_size=10, num_batches=5
        )
        return read_batches(options, longest=1000)

    drawn = lengths.sample(50, np.random.default_rng(0))
    for policy, kept in (
        ("truncate", np.minimum(drawn, 1000)),
        ("drop", drawn[drawn <= 1000]),
    ):
        assert sorted(batches(policy).lengths) == sorted(kept)
    split = batches("split")
    assert len(split.lengths) == 50
    assert split.counts.tokens == drawn.sum()
    assert all(len(split[index]) == 10 for index in range(len(split)))


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_lists_every_command(capsys, arguments):
    main(arguments)
    out = capsys.readouterr().out
    for name in ("fit", "validate", "test", "predict", "plan", "calibrate"):
        assert re.search(rf"^  {name} +\w+", out, re.MULTILINE)


@pytest.mark.parametrize("command", ["plan", "calibrate"])
def test_every_option_of_a_command_has_a_help_text(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    options = re.split(r"\n  (?=--)", capsys.readouterr().out.split("options:")[1])[1:]
    assert len(options) > 10
    for described in options:
        words = re.sub(r"\((type|required).*", "", " ".join(described.split()))
        assert len(words.split()) > 3, described


def test_the_readmes_plan_runs_as_printed(capsys, tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    command = re.search(r"^lightning-dcp (plan (?:.*\\\n)*.*--plot plan\.png)$", text, re.MULTILINE)
    assert command is not None
    monkeypatch.chdir(tmp_path)
    main(shlex.split(command[1].replace("\\\n", " ")))
    assert "static (CP 4)" in capsys.readouterr().out
    assert (tmp_path / "plan.png").is_file()


def install_scheduler(monkeypatch, groups) -> None:
    class DefaultDynamicCPScheduler:
        def __init__(self, **options) -> None:
            self.num_ranks = options["cp_size"]

        def get_groups_and_subsamples(self, samples):
            return groups([sample for sample, _ in samples], self.num_ranks)

    name = "megatron.core.datasets.data_schedule"
    module = types.ModuleType(name)
    module.DefaultDynamicCPScheduler = DefaultDynamicCPScheduler
    monkeypatch.setitem(sys.modules, name, module)


def one_each(ids, num_ranks):
    return [[[i] for i in ids[k : k + num_ranks]] for k in range(0, len(ids), num_ranks)]


def test_megatrons_scheduler_has_a_line_where_it_is_there(capsys, tmp_path, monkeypatch):
    install_scheduler(monkeypatch, one_each)
    constant = ["--lengths.kind=constant", "--lengths.low=100", *FEW]
    values = json_of(capsys, tmp_path / "plan.json", *POOL, *constant)
    megatron = values["planners"][-1]
    assert megatron["planner"] == "megatron"
    assert megatron["micro_batches_by_cp_size"] == {"1": 48}


def test_megatrons_failure_leaves_the_others_figures(capsys, tmp_path, monkeypatch):
    def fail(ids, num_ranks):
        raise IndexError("list index out of range")

    install_scheduler(monkeypatch, fail)
    out = plan(capsys, f"--json={tmp_path}/plan.json", *POOL, *LONG_TAIL, *FEW)
    assert list(planner_lines(out)) == ["static", "longest_sequence", "balanced"]
    assert "IndexError: list index out of range" in out
    values = json.loads((tmp_path / "plan.json").read_text())["planners"]
    assert "tokens_per_second" not in values[-1]
    assert "IndexError" in values[-1]["failure"]
