"""What is wrong or different on one rank ends the step on all of them: never a hang."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import trainers
from distributed import run_distributed
from lightning_dcp import SFT, DynamicCPModule

IDS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
WRONG = 2  # The rank of three that is not like the others.


def on_wrong(right, wrong):
    return wrong if dist.get_rank() == WRONG else right


def floats(*values):
    pairs = zip(IDS, values, strict=True)
    rows = [torch.full((len(ids),), float(value)) for ids, value in pairs]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def batch(ids=IDS, **extras):
    return trainers.jagged(ids) | extras


def message_of(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fit(*train, module=None, **options):
    data = trainers.Batches(list(train), options.pop("val", None))
    return message_of(trainers.trainer(48, **options).fit, module or trainers.module(), data)


# -- other contents ---------------------------------------------------------------------------


def other_contents():
    swapped = [IDS[1], IDS[0], IDS[2]]
    labels, other = trainers.jagged(IDS)["input_ids"], trainers.jagged(swapped)["input_ids"]
    pairs = {
        "nothing": (batch(), batch()),
        "ids": (batch(), batch([[1, 2, 3, 4], [5, 6, 7, 8], [9, 11]])),
        "order": (batch(), batch(swapped)),
        "lengths": (batch(), batch([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]])),
        "labels": (batch(labels=labels), batch(labels=other)),
        "loss_mask": (batch(loss_mask=floats(1, 1, 1)), batch(loss_mask=floats(1, 0, 1))),
        "a key more": (batch(), batch(weights=torch.ones(3))),
        "a key less": (batch(weights=torch.ones(3)), batch()),
        "of tokens": (batch(rewards=floats(0.5, 1, 2)), batch(rewards=floats(0.5, 1, 2.1))),
        "of samples": (batch(rewards=torch.arange(3)), batch(rewards=torch.arange(3).flip(0))),
        "type": (batch(rewards=torch.ones(3)), batch(rewards=torch.ones(3).bfloat16())),
    }
    return {name: fit(on_wrong(*pair)) for name, pair in pairs.items()}


def test_other_contents_on_one_rank_name_the_key_and_the_ranks():
    found = {
        "nothing": "no error",
        "ids": "'input_ids' of rank 2 is not that of rank 0",
        "order": "'input_ids' of rank 2 is not that of rank 0",
        "lengths": "'input_ids' of rank 2 is not that of rank 0",
        "labels": ": 'labels' of rank 2 is not that of rank 0",
        "loss_mask": ": 'loss_mask' of rank 2 is not that of rank 0",
        "a key more": "'weights' is on rank 2 alone",
        "a key less": "'weights' is missing on rank 2",
        "of tokens": "'rewards' of rank 2 is not that of rank 0",
        "of samples": "'rewards' of rank 2 is not that of rank 0",
        "type": "'rewards' of rank 2 is not that of rank 0",
    }
    results = run_distributed(other_contents, 3, timeout=60)
    assert results[0] == results[1] == results[2]
    assert set(results[0]) == set(found)
    for name, message in results[0].items():
        assert found[name] in message, name
        assert name == "nothing" or "The ranks hold different global batches" in message


# -- errors of one rank before the step -------------------------------------------------------


class Batches(torch.utils.data.Dataset):
    """Three batches, the second of which fails on one rank."""

    def __init__(self, error=None):
        self.error = error

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if self.error is not None and index == 1:
            raise self.error
        return batch()


class FailsInHook(DynamicCPModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        if dist.get_rank() == WRONG:
            raise KeyError("my hook")
        return batch


class FailsInCheck(SFT):
    def check(self, batch, *, vocab_size=None):
        if dist.get_rank() == WRONG:
            raise IndexError("my check")


class RefusesKeys(dict):
    def __getitem__(self, key):
        raise RuntimeError("my batch")


def errors_of_one_rank():
    ids = trainers.jagged(IDS)["input_ids"]
    short = torch.nested.nested_tensor_from_jagged(ids.values()[1:], ids.offsets())
    failing = on_wrong(None, KeyError("my loader"))
    loaders = {
        workers: DataLoader(Batches(failing), batch_size=None, num_workers=workers)
        for workers in (0, 1)
    }
    found = {
        "short ids": fit(on_wrong(batch(), {"input_ids": short})),
        "short labels": fit(on_wrong(batch(labels=ids), batch(labels=short))),
        "hook": fit(batch(), module=FailsInHook(trainers.CONFIG)),
        "check": fit(batch(), module=trainers.module(objective=FailsInCheck())),
        "keys": fit(on_wrong(batch(), RefusesKeys(batch()))),
    }
    for workers, loader in loaders.items():
        run = trainers.trainer(48)
        found[f"{workers} workers"] = message_of(run.fit, trainers.module(), loader)
        run = trainers.trainer(48)
        found[f"validate, {workers} workers"] = message_of(run.validate, trainers.module(), loader)
    return found


def test_an_error_of_one_rank_before_the_step_is_one_on_all():
    found = {
        "short ids": ("refused its batch", "'input_ids' has 9 rows of values, but by its offsets"),
        "short labels": ("refused its batch", "'labels' has 9 rows of values, but by its offsets"),
        "hook": ("could not take a batch over", "KeyError: 'my hook'"),
        "check": ("refused its batch", "IndexError: my check"),
        "keys": ("could not load a batch", "RuntimeError: my batch"),
        "0 workers": ("could not load a batch", "KeyError: 'my loader'"),
        "1 workers": ("could not load a batch", "KeyError: 'my loader' (in a worker of its loader"),
    }
    found |= {f"validate, {name}": found[name] for name in ("0 workers", "1 workers")}
    results = run_distributed(errors_of_one_rank, 3, timeout=60)
    assert set(results[0]) == set(found)
    for rank, result in enumerate(results):
        for name, (doing, text) in found.items():
            if rank != WRONG:
                assert f"OtherRankError: Rank 2 {doing}: " in result[name], name
                assert text in result[name]
            else:
                # Its own error, with the traceback of a worker.
                assert "Rank 2" not in result[name]
                assert text.split(" (in")[0].split(": ")[-1] in result[name]
                assert ("Original Traceback" in result[name]) == ("1 workers" in name)


# -- errors of one rank within the step -------------------------------------------------------


class FailsInStep(DynamicCPModule):
    fails = ""

    def micro_batch_step(self, micro_batch):
        if self.fails == "before the model" and dist.get_rank() == 1:
            raise KeyError("mine")
        loss, num_tokens = super().micro_batch_step(micro_batch)
        if dist.get_rank() != 1:
            return loss, num_tokens
        if self.fails == "raises":
            raise KeyError("mine")
        return {
            "shape": (loss.expand(2), num_tokens),
            "detached": (loss.detach(), num_tokens),
            "no tuple": loss,
        }[self.fails]

    def predict_micro_batch(self, micro_batch):
        outputs = super().predict_micro_batch(micro_batch)
        if dist.get_rank() != 1:
            return outputs
        log_probs = outputs["log_probs"]
        return {
            "name": {"mine": log_probs},
            "type": outputs | {"log_probs": log_probs.double()},
            "rows": outputs | {"log_probs": log_probs[:-1]},
        }[self.fails]


STEP = ("before the model", "raises", "shape", "detached", "no tuple")
PREDICT = ("name", "type", "rows")


def errors_in_the_step(strategy):
    module = FailsInStep(trainers.CONFIG)
    # One that all ranks share, and short ones.
    lengths = [72 if strategy else 140, 5, 9, 33, 2, 17, 60]
    data = trainers.jagged(trainers.random_batch(lengths, 0))
    found = {}
    for fails in (*STEP, *PREDICT):
        module.fails = fails
        for how in ("predict",) if fails in PREDICT else ("fit", "validate"):
            if (how, fails) == ("validate", "detached"):
                continue  # Nothing is wrong there without a backward pass.
            run = getattr(trainers.trainer(72, strategy), how)
            found[how, fails] = message_of(run, module, DataLoader([data], batch_size=None))
    return found


@pytest.mark.parametrize("strategy", [{}, {"pipeline_model_parallel_size": 2}], ids=str)
def test_an_error_of_one_rank_within_the_step_is_one_on_all(strategy):
    results = run_distributed(errors_in_the_step, 2, strategy, timeout=60)
    texts = {
        "before the model": "KeyError: 'mine'",
        "raises": "KeyError: 'mine'",
        "shape": "must be a scalar",
        "detached": "does not depend on the model",
        "no tuple": "must return (loss sum, number of target tokens)",
        "rows": "an output needs one row for each",
    }
    # In a pipeline the other rank makes no predictions.
    same = {"name": "'mine' (float32 ['rows']) on rank 1", "type": "'log_probs' (float64 ['rows'])"}
    for (how, fails), message in results[0].items():
        if fails in texts:
            assert message.startswith("OtherRankError: Rank 1 failed in its step: "), (how, fails)
            assert texts[fails] in message
            assert texts[fails] in results[1][how, fails]
        elif not strategy:
            assert message == results[1][how, fails]
            assert same[fails] in message
        else:
            assert message == "no error"


# -- loaders that do not end together ---------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, num_batches):
        self.num_batches = num_batches

    def __iter__(self):
        return (batch() for _ in range(self.num_batches))


class Claims(Stream):
    """Says that it has three batches."""

    def __len__(self):
        return 3


class NoLength(Stream):
    def __len__(self):
        if dist.get_rank() == WRONG:
            raise OSError("my index")
        return self.num_batches


def loaders_of_other_lengths():
    pairs = {
        "sized": ([batch()] * 3, [batch()] * 2),
        "unsized": (Stream(3), Stream(2)),
        "longer": (Stream(2), Stream(4)),
        "empty": (Stream(2), Stream(0)),
        "claims": (Claims(3), Claims(2)),
        "one without": ([batch()] * 3, Stream(3)),
        "no length": (NoLength(3), NoLength(3)),
    }
    found = {}
    for name, pair in pairs.items():
        for how in ("fit", "validate", "test", "predict"):
            trainer = trainers.trainer(48)
            loader = on_wrong(*pair)
            if name != "no length":
                loader = DataLoader(loader, batch_size=None)
            found[name, how] = message_of(getattr(trainer, how), trainers.module(), loader)
    trainer = trainers.trainer(48, val_check_interval=1, num_sanity_val_steps=1)
    val = DataLoader(on_wrong(Stream(3), Stream(2)), batch_size=None)
    train = DataLoader(Stream(2), batch_size=None)
    found["unsized", "val of fit"] = message_of(trainer.fit, trainers.module(), train, val)
    return found


def test_loaders_of_other_lengths_stop_together():
    results = run_distributed(loaders_of_other_lengths, 3, timeout=120)
    for rank, result in enumerate(results):
        for (name, how), message in result.items():
            if name == "no length":
                text = "OSError: my index"
                whole = f"OtherRankError: Rank 2 could not ask its loader for its length: {text}"
                assert message == (text if rank == WRONG else whole)
                continue
            assert message == results[0][name, how]
            if name in ("sized", "one without"):
                counts = "2 batches" if name == "sized" else "no length"
                assert f"have different lengths (ranks 0, 1: 3 batches; rank 2: {counts})" in (
                    message
                ), how
            else:
                assert "The loaders of the ranks do not end together" in message, (name, how)
                ranks, end = {
                    "longer": ("ranks 0, 1", 2),
                    "empty": ("rank 2", 0),
                }.get(name, ("rank 2", 2))
                assert f"{ranks}: no more batches after {end}" in message
                others = "rank 2" if name == "longer" else "ranks 0, 1"
                text = "a first batch" if name == "empty" else "3 samples of 10 tokens after"
                assert f"{others}: {text}" in message
