import json
import logging
import os
import pickle
from itertools import chain

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from distributed import run_distributed
from lightning_dcp.data import TextDataModule, collate_jagged

NUM_DOCUMENTS = 40


@pytest.fixture
def corpus(tmp_path):
    """Forty documents of 1 to 40 letters, one file."""
    path = tmp_path / "corpus.jsonl"
    lines = [{"text": chr(65 + index) * (index + 1)} for index in range(NUM_DOCUMENTS)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def make(data, **options):
    folder = data if isinstance(data, str) else data[0]
    defaults = {
        "global_batch_size": 8,
        "num_workers": 0,
        "cache_dir": os.path.join(os.path.dirname(folder), "cache"),
    }
    return TextDataModule(data, **defaults | options)


def ready(data, stage="fit", **options):
    module = make(data, **options)
    module.prepare_data()
    module.setup(stage)
    return module


def batches(loader, epoch=0):
    loader.sampler.set_epoch(epoch)
    return [[row.tolist() for row in batch["input_ids"].unbind()] for batch in loader]


def test_batches_hold_the_documents(corpus):
    module = ready(corpus, shuffle=False)
    rows = [row for batch in batches(module.train_dataloader()) for row in batch]
    assert rows == [[65 + index] * (index + 1) + [256] for index in range(NUM_DOCUMENTS)]
    batch = next(iter(module.train_dataloader()))
    assert set(batch) == {"input_ids"}
    ids = batch["input_ids"]
    assert (ids.layout, ids.dtype, ids.size(0)) == (torch.jagged, torch.int64, 8)
    assert ids.is_contiguous()


def test_without_eos(corpus):
    module = ready(corpus, shuffle=False, append_eos=False)
    assert batches(module.train_dataloader())[0][0] == [66, 66]
    assert module.train_counts.dropped_short == 1


# A forkserver's child gets all as a spawned one does, pickled, but has the imports already.
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_give_the_batches_that_none_give(corpus, context):
    reference = ready(corpus).train_dataloader()
    loader = ready(corpus, num_workers=2).train_dataloader()
    assert loader.persistent_workers
    loader.multiprocessing_context = context
    for epoch in (0, 1):
        assert batches(loader, epoch) == batches(reference, epoch)


def test_epochs_and_seeds_shuffle_differently_and_the_same_everywhere(corpus):
    loader, other = ready(corpus).train_dataloader(), ready(corpus).train_dataloader()
    torch.manual_seed(1)
    first, second = batches(loader, 0), batches(loader, 1)
    torch.manual_seed(2)
    assert (batches(other, 0), batches(other, 1)) == (first, second)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second))
    assert batches(ready(corpus, seed=1).train_dataloader()) != first
    fixed = ready(corpus, shuffle=False).train_dataloader()
    assert batches(fixed, 0) == batches(fixed, 1)


def test_works_under_the_samplers_that_lightning_may_put_in(corpus):
    dataset = ready(corpus).train_dataloader().dataset
    samplers = [
        DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True),
        RandomSampler(dataset),
        SequentialSampler(dataset),
    ]
    for sampler in samplers:
        loader = DataLoader(dataset, 8, sampler=sampler, collate_fn=collate_jagged)
        rows = [row.tolist() for batch in loader for row in batch["input_ids"].unbind()]
        assert sorted(map(len, rows)) == list(range(2, NUM_DOCUMENTS + 2))


def test_only_training_drops_an_incomplete_batch(corpus):
    module = ready(corpus, val_data=corpus, global_batch_size=24)
    assert [len(batch) for batch in batches(module.train_dataloader())] == [24]
    assert [len(batch) for batch in batches(module.val_dataloader())] == [24, 16]
    assert batches(module.test_dataloader()) == batches(module.val_dataloader())
    assert module.val_counts.samples == NUM_DOCUMENTS


def test_without_validation_data(corpus):
    module = ready(corpus)
    assert module.val_dataloader() == module.test_dataloader() == []
    assert module.val_counts is None


def test_held_out_documents_depend_on_the_text_alone(corpus, tmp_path):
    module = ready(corpus, val_fraction=0.3, global_batch_size=4, shuffle=False)
    held_out = {row[0] for batch in batches(module.val_dataloader()) for row in batch}
    assert module.train_counts.documents + module.val_counts.documents == NUM_DOCUMENTS
    assert 3 <= module.val_counts.documents <= 21
    trained = {row[0] for row in (x["input_ids"].tolist() for x in module.train_set)}
    assert held_out.isdisjoint(trained)

    folder = tmp_path / "other"
    folder.mkdir()
    for index in reversed(range(NUM_DOCUMENTS)):
        (folder / f"{99 - index}.txt").write_text(chr(65 + index) * (index + 1))
    other = ready(f"{folder}/*.txt", val_fraction=0.3, global_batch_size=4)
    assert {row[0] for batch in batches(other.val_dataloader()) for row in batch} == held_out


@pytest.mark.parametrize(
    ("policy", "samples", "tokens", "expected"),
    [
        # Documents of 2 to 41 tokens. Split: 11, 21, 31 and 41 lose a piece of 1.
        ("split", 9 + 19 + 29 + 39 + 4, 860 - 4, {"split": 31}),
        ("truncate", 40, 54 + 31 * 10, {"truncated": 31}),
        ("drop", 9, 54, {"dropped_long": 31}),
    ],
)
def test_long_documents(corpus, policy, samples, tokens, expected):
    module = ready(corpus, max_length=10, long_documents=policy)
    counts = {"split": 0, "truncated": 0, "dropped_long": 0, "dropped_short": 0} | expected
    counts |= {"documents": 40, "samples": samples, "tokens": tokens, "replaced_bytes": 0}
    assert vars(module.train_counts) == counts | {"dropped_tokens": 860 - tokens}
    assert module.train_dataloader().dataset.lengths.max() == 10
    assert len(module.train_dataloader()) == samples // 8


def test_labels_of_a_user_dataset_ride_along(corpus):
    module = ready(corpus)
    sample = module.train_dataloader().dataset[3]
    batch = collate_jagged([sample | {"labels": sample["input_ids"]}])
    assert batch["labels"].offsets() is batch["input_ids"].offsets()


def test_a_worker_gets_the_path_and_not_the_tokens(tmp_path):
    (tmp_path / "big.txt").write_text("x" * 1_000_000)
    module = ready(str(tmp_path / "big.txt"), max_length=500_000, global_batch_size=1)
    dataset = module.train_dataloader().dataset
    assert len(dataset[0]["input_ids"]) == 500_000
    assert len(pickle.dumps(dataset)) < 10_000


def test_the_standard_library(tmp_path):
    module = ready(["{stdlib}/asyncio/*.py"], cache_dir=str(tmp_path), max_length=512)
    assert module.train_counts.documents > 20
    assert module.train_counts.tokens > 100_000
    sample = module.train_dataloader().dataset[0]["input_ids"]
    assert '"""The asyncio package' in module.tokenizer.decode(sample)


def test_default_cache_folder(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    ready(corpus, cache_dir=None)
    assert list((tmp_path / "xdg" / "lightning-dcp" / "text").glob("*/tokens.bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ready(corpus, cache_dir=None)
    assert list((tmp_path / "home" / ".cache/lightning-dcp/text").glob("*/tokens.bin"))


def test_reported_once(corpus, caplog):
    module = make(corpus, val_data=corpus, max_length=10)
    module.prepare_data()
    with caplog.at_level(logging.INFO):
        module.setup("fit")
        module.setup("validate")
    messages = [record.getMessage() for record in caplog.records]
    assert [message for message in messages if "data:" in message] == [
        f"Training data: {module.train_counts}",
        f"Validation data: {module.val_counts}",
    ]
    assert "documents split" in messages[0]


def test_undecodable_bytes_are_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text \xff\xff")
    module = ready(str(tmp_path / "a.txt"), global_batch_size=1)
    assert module.train_counts.replaced_bytes == 2


def test_a_tokenizer_directory(corpus, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = {"</s>": 0} | {chr(65 + index): index + 1 for index in range(NUM_DOCUMENTS)}
    backend = Tokenizer(models.BPE(letters, merges=[]))
    directory = str(tmp_path / "tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(directory)
    module = make(corpus, tokenizer=directory, shuffle=False)
    assert module.vocab_size == NUM_DOCUMENTS + 1  # before setup
    module.prepare_data()
    module.setup("fit")
    assert batches(module.train_dataloader())[0][:2] == [[1, 0], [2, 2, 0]]

    directory = str(tmp_path / "without-eos")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    with pytest.raises(ValueError, match=r"append_eos=True, but tokenizer='.*' has no end-of-text"):
        ready(corpus, tokenizer=directory)
    assert ready(corpus, tokenizer=directory, append_eos=False).train_counts.samples == 39


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": []}, r"data=\[\]: give one path"),
        ({"data": ""}, "data='': give one path"),
        ({"val_data": []}, r"val_data=\[\]: give one path"),
        ({"max_length": 4, "min_length": 5}, "max_length=4 is below min_length=5"),
        ({"min_length": 0}, "min_length=0 must be 1 or more"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"long_documents": "cut"}, "long_documents='cut' is none of split, truncate, drop, error"),
        ({"val_fraction": 1.0}, "val_fraction=1.0"),
        (
            {"val_fraction": 0.1, "val_data": "x"},
            "val_fraction=0.1 and val_data='x': give only one",
        ),
    ],
)
def test_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        TextDataModule(**{"data": "x"} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_data": "no/such.txt"}, "val_data: no/such.txt matches no file"),
        ({"text_field": "body"}, r"corpus.jsonl, line 1: there is no field 'body' .* fields: text"),
        ({"tokenizer": "no/such"}, "tokenizer='no/such' is not a directory"),
        (
            {"long_documents": "error", "max_length": 10},
            r"data: .*corpus.jsonl, line 10 has 11 tokens, above max_length=10, as 31 of 40",
        ),
        (
            {"long_documents": "drop", "max_length": 2, "min_length": 2},
            "fewer samples than global_b",
        ),
        ({"min_length": 50}, r"data: 0 samples .*nothing is left .*min_length=50"),
        ({"val_fraction": 1e-9}, r"val_fraction: 0 samples .*nothing is left \(val_fraction=1e-09"),
        ({"global_batch_size": 41}, r"data: 40 samples .*fewer samples than global_batch_size=41"),
    ],
)
def test_input_errors_come_from_setup_and_not_from_prepare_data(corpus, options, message):
    module = make(corpus, **options)
    module.prepare_data()
    with pytest.raises(ValueError, match=message):
        module.setup("fit")


def test_loaders_before_setup(corpus):
    with pytest.raises(RuntimeError, match="call setup"):
        make(corpus).train_dataloader()


def _batches_of_a_rank(corpus, prepare):
    module = make(corpus)
    if prepare and torch.distributed.get_rank() == 0:
        module.prepare_data()
    torch.distributed.barrier()
    module.setup("fit")
    torch.manual_seed(torch.distributed.get_rank())
    loader = module.train_dataloader()
    return [batches(loader, epoch) for epoch in (0, 1)]


@pytest.mark.parametrize("prepare", [True, False])
def test_two_ranks_get_the_same_batches(corpus, prepare):
    first, second = run_distributed(_batches_of_a_rank, 2, corpus, prepare)
    assert first == second
    assert first[0] != first[1]


def _error_of_a_rank(corpus):
    module = make(corpus)
    if torch.distributed.get_rank() == 0:
        module.prepare_data()
    torch.distributed.barrier()
    with pytest.raises(ValueError, match="line 41") as caught:
        module.setup("fit")
    return str(caught.value)


def test_two_ranks_raise_the_same_error(corpus):
    with open(corpus, "a") as stream:
        stream.write("\nno json")
    first, second = run_distributed(_error_of_a_rank, 2, corpus)
    assert first == second
    assert first.startswith(f"{corpus}, line 41: not valid JSON")


class Recorder(pl.LightningModule):
    """Keeps the batches it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []
        self.num_validated = 0

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].values().tolist())
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.num_validated += batch["input_ids"].size(0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(corpus, **options):
    trainer_options = options.pop("trainer", {})
    recorder = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_options,
    )
    trainer.fit(recorder, datamodule=make(corpus, **options))
    return recorder


@pytest.mark.parametrize("options", [{}, {"val_fraction": 0.3}])
def test_a_trainer_of_one_process(corpus, options):
    recorder = fit(corpus, global_batch_size=5, **options)
    half = len(recorder.seen) // 2
    assert half == (8 if not options else half)
    assert recorder.seen[:half] != recorder.seen[half:]
    assert (recorder.num_validated > 0) == bool(options)


def _fit_on_a_rank(corpus):
    rank = str(torch.distributed.get_rank())
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
    return fit(corpus, trainer={"strategy": "ddp", "devices": 2}).seen


def test_a_trainer_of_two_processes_gives_the_batches_of_one(corpus):
    """Lightning must not replace the sampler, with whatever strategy."""
    first, second = run_distributed(_fit_on_a_rank, 2, corpus)
    assert first == second == fit(corpus).seen
