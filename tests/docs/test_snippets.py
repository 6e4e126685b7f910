"""The docs' snippets run as printed, and what pages say of names, options and files is so.

`python` blocks with a main guard are scripts; a page's other ones run one after another in one
namespace. The guide's commands run in test_guide.py, the README's script in the test of the CLI.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import runpy
import shlex
import sys
import tomllib
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

import lightning_dcp as dcp
import trainers
from command_line import run
from distributed import run_distributed
from lightning_dcp.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GUARD = 'if __name__ == "__main__":'
CONFIG = replace(trainers.CONFIG, qk_layernorm=True)


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def script_of(page: str) -> str:
    (script,) = (block for block in blocks(page) if GUARD in block)
    return script


def namespace_of(page: str) -> dict[str, Any]:
    """What a page's blocks without a main guard define, run one after another."""
    # Dataclasses look their module up.
    namespace: dict[str, Any] = {"__name__": __name__}
    for block in blocks(page):
        if GUARD not in block:
            exec(compile(block, page, "exec"), namespace)
    return namespace


@pytest.mark.parametrize(
    "page", [path.name for path in PAGES[2:] if path.name != "notebooks.md" and blocks(path.name)]
)
def test_a_pages_snippets_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace_of(page)


# -- on two processes -------------------------------------------------------------------------


def weighted_batches() -> trainers.Batches:
    data = trainers.batches(num=1)
    (batch,) = data.train
    rows = [torch.linspace(0.5, 1.5, len(ids)) for ids in batch["input_ids"].unbind()]
    batch["token_weight"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return data


def smoothed(logits, log_probs, of_target):
    return -0.9 * of_target - 0.1 * log_probs.mean(-1) + 1e-4 * logits.logsumexp(-1) ** 2


def entropy(log_probs):
    return -(log_probs.exp() * log_probs).sum(-1)


# Of a sequence's rows: logits, log-softmax, the target's log-probability, the weight; to losses.
PLAIN = {
    "FocalLoss": lambda logits, all_, own, weight: -weight * (1 - own.exp()) ** 2 * own,
    "smoothed": lambda logits, all_, own, weight: smoothed(logits, all_, own),
    "FromLogits": lambda logits, all_, own, weight: smoothed(logits, all_, own),
    "WeightedSmoothed": lambda logits, all_, own, weight: weight * smoothed(logits, all_, own),
    "SmoothedWithEntropyBonus": lambda logits, all_, own, weight: (
        smoothed(logits, all_, own) - 0.01 * entropy(all_)
    ),
    "MyModule": lambda logits, all_, own, weight: -own,
    "MeanPerSequence": lambda logits, all_, own, weight: -own / max(len(own), 1),
}


def plain_logits(read: dict[str, Any], config: dcp.ModelConfig):
    return partial(
        read["logits"],
        layers=config.num_layers,
        heads=config.num_attention_heads,
        groups=config.query_groups,
        vocab_size=config.vocab_size,
    )


def losses_of_objectives() -> dict[str, list[tuple[float, float]]]:
    """By name (loss, norm of the gradients) of a step, and of the plain formula."""
    pages = namespace_of("objectives.md") | namespace_of("custom-objective.md")
    read = namespace_of("models.md")
    found = {}
    for name, plain in PLAIN.items():
        made = pages[name]
        cls = made if name == "MyModule" else dcp.DynamicCPModule
        objective = made() if inspect.isclass(made) else made
        options = {} if name == "MyModule" else {"objective": objective}
        module = cls(
            model=CONFIG,
            optimizer=dcp.OptimizerSettings(lr=0.0),
            lr_schedule=dcp.LRSchedule(kind="constant"),
            fused_loss=name != "FromLogits",
            **options,
        )
        data, run = weighted_batches(), trainers.trainer()
        run.fit(module, data)
        ours = (float(module.last_step.loss), float(run.callback_metrics["grad_norm"]))

        weights = {
            key: value.detach().clone().requires_grad_()
            for key, value in module.model.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        total, count = torch.zeros(()), 0
        (batch,) = data.train
        for ids, weight in zip(
            batch["input_ids"].unbind(), batch["token_weight"].unbind(), strict=True
        ):
            logits = plain_logits(read, CONFIG)(weights, ids)[:-1]
            log_probs = logits.log_softmax(-1)
            own = log_probs.gather(1, ids[1:, None])[:, 0]
            total = total + plain(logits, log_probs, own, weight[1:]).sum()
            count += 1 if name == "MeanPerSequence" else len(own)
        (total / count).backward()
        norm = torch.stack([one.grad.norm() for one in weights.values()]).norm()
        found[name] = [ours, (float(total.detach() / count), float(norm))]
    return found


def read_whole(folder: str) -> dict[str, list[np.ndarray]]:
    """Log-probabilities: by `predict`, by the page's plain model, and in runs from its weights."""
    read, path = namespace_of("models.md"), os.path.join(folder, "trained.ckpt")
    module, data, run = trainers.module(model=CONFIG), trainers.batches(3, 1), trainers.trainer()
    run.fit(module, data)
    run.save_checkpoint(path)

    weights = read["load_weights"](path)
    (batch,) = data.val
    plain = []
    for ids in batch["input_ids"].unbind():
        log_probs = plain_logits(read, CONFIG)(weights, ids)[:-1].log_softmax(-1)
        plain.append(log_probs.gather(1, ids[1:, None])[:, 0].numpy())

    def predicted(module, **strategy):
        module.predict_everywhere = True
        (outputs,) = trainers.trainer(strategy=strategy).predict(module, data)
        return [row[1:].numpy() for row in outputs["log_probs"].unbind()]

    return {
        "predict": predicted(module),
        "plain": plain,
        "TP 2": predicted(read["start_from"](CONFIG, path), tensor_model_parallel_size=2),
        "PP 2": predicted(read["take_weights"](CONFIG, path), pipeline_model_parallel_size=2),
    }


def logged_names(folder: str) -> list[str]:
    pages = namespace_of("logging.md")
    moe = dcp.MoEConfig(
        num_experts=4, aux_loss_coeff=0.01, seq_aux_loss_coeff=0.01, z_loss_coeff=0.01
    )
    module = pages["Module"](replace(CONFIG, moe=moe, mtp_num_layers=2))
    run = trainers.trainer(
        logger=CSVLogger(folder),
        callbacks=[LearningRateMonitor()],
        log_every_n_steps=1,
        max_steps=2,
    )
    data = trainers.batches(2, 1)
    run.fit(module, data)
    names = set(run.callback_metrics)
    run.test(module, data, verbose=False)
    return sorted(names | set(run.callback_metrics))


def callbacks_of_pages() -> tuple[list[bool], float]:
    """Whether a step of each epoch moved the embedding, and the page's metric."""
    later = namespace_of("callbacks.md")["EmbeddingLater"]()
    module, moved = namespace_of("logging.md")["WithAccuracy"](CONFIG), []

    def look(run: Any, module: Any) -> None:
        (embedding,) = (w for name, w in module.model.named_parameters() if "embedding" in name)
        moved.append(embedding.detach().clone())

    run = trainers.trainer(
        callbacks=[later, LambdaCallback(on_train_start=look, on_train_epoch_end=look)],
        max_epochs=2,
    )
    run.fit(module, trainers.batches(1))
    changed = [not torch.equal(one, two) for one, two in pairwise(moved)]
    return changed, float(run.callback_metrics["share_of_likely"])


def scheduler_of_step_lr() -> tuple[str, float]:
    module, run = namespace_of("logging.md")["WithStepLR"](CONFIG), trainers.trainer()
    run.fit(module, trainers.batches(1))
    (config,) = run.lr_scheduler_configs
    return type(config.scheduler).__name__, config.interval


def moments_of_later_fits() -> tuple[float, float]:
    """The first weight of a model after two fits of a batch each, and after one fit of both."""
    batches = trainers.batches(2).train
    looped, once = trainers.module(), trainers.module()
    for batch in batches:
        trainers.trainer().fit(looped, trainers.Batches([batch]))
    trainers.trainer().fit(once, trainers.Batches(batches))
    return tuple(float(next(one.model.parameters()).flatten()[0]) for one in (looped, once))


class Sampler:
    """Gives one batch again and again, and notes after how many steps each was asked for."""

    def __init__(self, run: Any):
        self.run, self.steps = run, []
        (self.batch,) = trainers.batches(1).train

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.steps.append(self.run.global_step)
        return self.batch

    def __len__(self) -> int:
        return 3


class Endless(torch.utils.data.IterableDataset):
    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def __iter__(self):
        return (self.sampler[index] for index in range(3))


def when_batches_are_asked_for() -> dict[str, list[int]]:
    found = {}
    for kind in ("with a length", "without"):
        run = trainers.trainer()
        sampler = Sampler(run)
        data = sampler if kind == "with a length" else Endless(sampler)
        run.fit(trainers.module(), torch.utils.data.DataLoader(data, batch_size=None))
        found[kind] = sampler.steps
    return found


def run_script(page: str, folder: str) -> str:
    path = Path(folder) / f"{page}.{os.environ['RANK']}.py"
    path.write_text(script_of(page))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def everything(folder: str) -> dict[str, Any]:
    """One start of two processes for all of it."""
    return {
        "objectives": losses_of_objectives(),
        "whole": read_whole(folder),
        "logged": logged_names(folder),
        "scheduler": scheduler_of_step_lr(),
        "callbacks": callbacks_of_pages(),
        "fits": moments_of_later_fits(),
        "asked": when_batches_are_asked_for(),
        "reinforcement": run_script("reinforcement-learning.md", folder),
    }


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory):
    return run_distributed(everything, 2, str(tmp_path_factory.mktemp("docs")), timeout=600.0)


def test_the_pages_callbacks_do_what_they_say(on_two_processes):
    for found in on_two_processes:
        changed, share = found["callbacks"]
        assert changed == [False, True]
        assert 0 <= share < 1


@pytest.mark.parametrize("name", PLAIN)
def test_an_objective_of_ones_own_is_its_formula(on_two_processes, name):
    for found in on_two_processes:
        ours, plain = found["objectives"][name]
        assert ours == pytest.approx(plain, rel=1e-4)


def test_a_trained_model_is_read_whole(on_two_processes):
    for found in on_two_processes:
        plain = found["whole"]["plain"]
        for how in ("predict", "TP 2", "PP 2"):
            for ours, expected in zip(found["whole"][how], plain, strict=True):
                np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_the_table_has_every_name_that_is_logged(on_two_processes):
    text = (ROOT / "docs" / "logging.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    printed = {name for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    logged = set(on_two_processes[0]["logged"])
    # DPO alone logs pairs; `Module` of the page logs one more.
    assert logged == printed - {"pairs", "DPO"} | {"padding_free_tokens"}


def test_another_scheduler(on_two_processes):
    assert on_two_processes[0]["scheduler"] == ("StepLR", "step")


def test_a_loader_that_samples_learns(on_two_processes):
    lines = {
        re.search(r"reward of the first batch .*", found["reinforcement"])[0]
        for found in on_two_processes
    }
    (line,) = lines  # Both ranks sampled the same.
    first, last = map(float, re.findall(r"\d\.\d\d", line))
    assert last > first + 0.2


def test_a_loader_with_a_length_is_asked_after_the_step(on_two_processes):
    for found in on_two_processes:
        assert found["asked"] == {"with a length": [0, 1, 2], "without": [0, 0, 1]}


def test_a_loop_of_fits_forgets_adams_moments(on_two_processes):
    looped, once = on_two_processes[0]["fits"]
    assert looped != pytest.approx(once, rel=1e-5)


# -- processes of their own -------------------------------------------------------------------


def output_of(*command: str, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_loop_without_lightning_runs_under_torchrun(tmp_path):
    (tmp_path / "loop.py").write_text(script_of("engine.md"))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    out = output_of(*torchrun, "--nproc-per-node", "2", "loop.py", cwd=tmp_path)
    losses = [float(one) for one in re.findall(r"step \d+ loss (\S+)", out)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1
    assert float(re.findall(r"validation loss (\S+)", out)[0]) < losses[0] - 1
    sizes = set(re.findall(r"(\d): \d+", out))
    assert sizes == {"1", "2"}


def test_the_notebooks_cell_runs_and_what_the_page_says_is_so(tmp_path):
    (cell,) = blocks("notebooks.md")
    more = """
print("metrics", sorted(trainer.callback_metrics), "steps", trainer.global_step)
print("predicted", len(predictions), sorted(predictions[0]))
model.model = None
print("untrained", new_trainer().validate(model, data, verbose=False))
"""
    (tmp_path / "cell.py").write_text(cell + more)
    out = output_of(sys.executable, "cell.py", cwd=tmp_path)
    assert re.search(r"metrics \[.*'train_loss'.* steps 20", out)
    assert "predicted 20 ['entropies', 'log_probs', 'sample_id']" in out
    trained, untrained = map(float, re.findall(r"val_loss\D+(\d\.\d+)", out))
    assert trained < untrained - 0.1


# -- what pages say ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_files_and_names_are_there(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in target or (page.parent / target).exists(), target
    for path in re.findall(r"`((?:configs|tests|benchmarks|docs|requirements)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"\bdcp\.([A-Za-z_]+)", text):
        assert hasattr(dcp, name), f"lightning_dcp.{name}"
    for target in re.findall(r"\bmake ([a-z]+)`", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_the_architectures_folders_and_files_are_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "lightning_dcp"
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py|/[a-z_]+))`", text)
    assert len(paths) > 20
    for path in paths:
        assert (package / path).exists() or (ROOT / path).exists(), path


def test_the_architecture_has_every_layer_of_the_import_contract():
    text = (ROOT / "docs" / "architecture.md").read_text()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(one["layers"] for one in contracts["contracts"] if one["type"] == "layers")
    for name in re.findall(r"lightning_dcp\.(\w+)", " ".join(layers)):
        assert re.search(rf"`{name}(/|\.py)?`", text), name


def test_the_index_has_every_page():
    text = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES[2:]:
        assert page.name == "index.md" or f"({page.name})" in text


def commands() -> list[list[str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [shlex.split(line, comments=True) for line in lines]
    return [command for command in found if command and command[0] == "lightning-dcp"]


def test_the_commands_have_the_options_that_pages_name(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    helps = {}
    for _, name, *args in commands():
        if name not in helps:
            with pytest.raises(SystemExit):
                main([name, "--help"])
            helps[name] = capsys.readouterr().out
        # Help lists an option of options by its own name alone.
        for option in (arg.split(".")[0] for arg in args if arg.startswith("--")):
            assert re.search(rf"{re.escape(option)}\b", helps[name]), f"{name} {option}"


def test_yaml_names_arguments_that_there_are():
    found = 0
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            for value in yaml.safe_load(block).values():
                module, _, name = value["class_path"].rpartition(".")
                accepted = inspect.signature(getattr(import_module(module), name)).parameters
                assert set(value["init_args"]) <= set(accepted)
                found += 1
    assert found
