"""Both DataModules from YAML, as LightningCLI makes them."""

import contextlib
import io

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule

from lightning_dcp.data import LengthDistribution, SyntheticDataModule, TextDataModule


def parser():
    made = ArgumentParser(exit_on_error=False)
    made.add_argument("--config", action="config")
    made.add_subclass_arguments(LightningDataModule, "data")
    return made


def instantiate(tmp_path, yaml):
    (tmp_path / "config.yaml").write_text(yaml)
    made = parser()
    return made.instantiate(made.parse_args([f"--config={tmp_path}/config.yaml"])).data


def test_text(tmp_path):
    module = instantiate(
        tmp_path,
        f"""
        data:
          class_path: lightning_dcp.data.TextDataModule
          init_args:
            data: ["{{stdlib}}/asyncio/*.py"]
            max_length: 512
            long_documents: truncate
            global_batch_size: 4
            val_fraction: 0.2
            num_workers: 0
            cache_dir: {tmp_path}/cache
        """,
    )
    assert isinstance(module, TextDataModule)
    module.prepare_data()
    module.setup("fit")
    assert module.train_counts.truncated > 5
    assert next(iter(module.train_dataloader()))["input_ids"].size(0) == 4


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ("lengths: {kind: lognormal, low: 4, high: 64, median: 10.0}", {4, 64}),
        ("length_file: lengths.csv", {9}),
    ],
)
def test_synthetic(tmp_path, monkeypatch, lengths, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.csv").write_text("length,count\n9,1\n")
    module = instantiate(
        tmp_path,
        f"""
        data:
          class_path: lightning_dcp.data.SyntheticDataModule
          init_args: {{{lengths}, num_batches: 9, num_workers: 0}}
        """,
    )
    assert isinstance(module, SyntheticDataModule)
    module.setup("fit")
    drawn = module.train_dataloader().dataset.lengths
    assert min(expected) <= drawn.min() <= drawn.max() <= max(expected)


def test_options_of_the_command_line(tmp_path, monkeypatch):
    """jsonargparse must not read a path that exists, and put the content in its place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("some words")
    made = parser()
    text = ["--data=TextDataModule", "--data.data=words.txt", "--data.tokenizer=words.txt"]
    options = made.parse_args(text).data.init_args
    assert (options.data, options.tokenizer) == ("words.txt", "words.txt")
    made = parser()
    synthetic = ["--data=SyntheticDataModule", "--data.length_file=words.txt"]
    assert made.parse_args(synthetic).data.init_args.length_file == "words.txt"
    made = parser()
    nested = ["--data=SyntheticDataModule", "--data.lengths.kind=uniform", "--data.lengths.high=99"]
    module = made.instantiate(made.parse_args(nested)).data
    assert module._lengths == LengthDistribution("uniform", 64, 99)


def test_an_unknown_key_is_named(tmp_path):
    with pytest.raises(Exception, match="max_len"):
        instantiate(
            tmp_path,
            """
            data:
              class_path: lightning_dcp.data.TextDataModule
              init_args: {data: x, max_len: 3}
            """,
        )


@pytest.mark.parametrize(
    ("name", "help_texts"),
    [
        ("TextDataModule", ["Paths or globs of the training data", "Whether every document ends"]),
        ("SyntheticDataModule", ["Path of a length file to draw", "Training batches in an epoch"]),
    ],
)
def test_every_option_has_a_help_text(name, help_texts):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        parser().parse_args([f"--data.help=lightning_dcp.data.{name}"])
    shown = " ".join(out.getvalue().split())
    for text in help_texts:
        assert text in shown


def test_the_defaults_need_nothing():
    module = SyntheticDataModule()
    assert module.vocab_size == 256
    assert LengthDistribution().longest == 1024
