"""Predictions come back in the order of the data, whatever the plan, and are stored as parquet."""

from __future__ import annotations

import functools

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.imports import RequirementCache
from torch.utils.data import DataLoader, Dataset

import reference
import trainers
from distributed import run_distributed
from lightning_dcp import (
    DynamicCPModule,
    PolicyLoss,
    PredictionWriter,
    SyntheticDataModule,
    prediction_writer,
)
from lightning_dcp.data import collate_jagged
from lightning_dcp.engine import full_model_state

BATCHES = (0, 2, 3)
PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
STATIC = {"dynamic_context_parallel": False, "context_parallel_size": 4}


def data():
    """Three batches, the last with fewer samples than ranks; every fifth token is no target."""
    made = []
    for index in BATCHES:
        batch = trainers.jagged(trainers.random_batch(trainers.LENGTHS[index], index))
        ids = batch["input_ids"]
        batch["loss_mask"] = torch.nested.nested_tensor_from_jagged(
            torch.arange(len(ids.values())) % 5 != 4, ids.offsets()
        )
        made.append(batch)
    return trainers.Batches([], made)


def as_arrays(outputs):
    return {
        name: [row.numpy() for row in value.unbind()] if value.is_nested else value.numpy()
        for name, value in outputs.items()
    }


def predict(cap, strategy, options):
    module = trainers.module(**options)
    trainer = trainers.trainer(cap, strategy)
    outputs = trainer.predict(module, data())
    trainer.strategy.setup_environment()
    module.configure_model()
    state = full_model_state(module, trainer.strategy.context)
    weights = {name.removeprefix("model."): value.numpy() for name, value in state.items()}
    trainer.strategy.teardown()
    return [as_arrays(one) for one in outputs], weights


@functools.cache
def expected(temperature):
    """Log-probabilities and entropies of every sample of every batch, at the token they are of."""
    (single,) = run_distributed(predict, 1, 256, {}, {})
    weights = {name: torch.tensor(value) for name, value in single[1].items()}
    wanted = []
    for index, batch in zip(BATCHES, data().val, strict=True):
        samples = {"log_probs": [], "entropies": []}
        masks = batch["loss_mask"].unbind()
        lists = trainers.random_batch(trainers.LENGTHS[index], index)
        for ids, mask in zip(map(torch.tensor, lists), masks, strict=True):
            logits = reference.forward(weights, trainers.CONFIG, ids)[:-1] / temperature
            log_probs = logits.log_softmax(1)
            at = torch.zeros(len(ids))
            at[1:] = log_probs.gather(1, ids[1:, None])[:, 0] * mask[1:]
            entropy = torch.zeros(len(ids))
            entropy[1:] = -(log_probs.exp() * log_probs).sum(1) * mask[1:]
            samples["log_probs"].append(at.numpy())
            samples["entropies"].append(entropy.numpy())
        wanted.append(samples)
    return wanted


def check(outputs, temperature=1.0):
    wanted = expected(temperature)
    assert len(outputs) == len(wanted)
    for found, one in zip(outputs, wanted, strict=True):
        assert set(found) == {"log_probs", "entropies"}
        for name, rows in one.items():
            assert [len(row) for row in found[name]] == [len(row) for row in rows]
            for row, wanted_row in zip(found[name], rows, strict=True):
                np.testing.assert_allclose(row, wanted_row, rtol=1e-5, atol=1e-5)
                assert ((row == 0) == (wanted_row == 0)).all()


@pytest.mark.parametrize(
    ("world", "cap", "strategy", "options"),
    [
        (1, 256, {}, {}),
        (1, 256, {}, {"fused_loss": False}),
        (2, 48, {}, {}),
        (4, 24, {}, {}),
        (4, 48, TP2, {}),
        (4, 48, TP2, {"fused_loss": False, "predict_everywhere": True}),
        (4, 24, STATIC, {"predict_everywhere": True}),
        (8, 24, TP2, {}),
        (4, 48, PP2, {}),
        (4, 48, PP2, {"predict_everywhere": True}),
        (8, 48, PP2 | TP2 | {"sequence_parallel": True}, {}),
    ],
    ids=[
        "1",
        "1-logits",
        "2",
        "4",
        "4-tp2",
        "4-tp2-everywhere",
        "4-static-everywhere",
        "8-tp2",
        "4-pp2",
        "4-pp2-everywhere",
        "8-pp2-tp2-sp",
    ],
)
def test_outputs_are_those_of_a_plain_model_in_the_order_of_the_data(world, cap, strategy, options):
    ranks = [outputs for outputs, _ in run_distributed(predict, world, cap, strategy, options)]
    check(ranks[0])
    for outputs in ranks[1:]:
        if "predict_everywhere" in options:
            check(outputs)
        else:
            assert outputs == [{}] * len(BATCHES)


def test_the_objectives_temperature_is_that_of_predictions():
    options = {"objective": PolicyLoss(temperature=0.7)}
    check(run_distributed(predict, 2, 48, {}, options)[0][0], 0.7)


class Outputs(DynamicCPModule):
    """Outputs of other dtypes and shapes: the target's id, and it twice."""

    def predict_micro_batch(self, micro_batch):
        labels = micro_batch.labels
        return {"ids": labels, "twice": torch.stack((labels, labels), 1).bfloat16()}


def write_ids(cap, path):
    trainer = trainers.trainer(cap, callbacks=[PredictionWriter(path)])
    outputs = trainer.predict(Outputs(trainers.CONFIG), SyntheticDataModule(**SYNTHETIC))
    return [one["sample_id"].tolist() for one in outputs if one]


SYNTHETIC = {
    "vocab_size": 61,
    "global_batch_size": 5,
    "num_batches": 3,
    "max_length": 90,
    "min_length": 1,
    "num_workers": 0,
}


def test_a_writer_stores_any_output_with_ids_in_order(tmp_path):
    path = tmp_path / "new" / "out.parquet"
    ids = run_distributed(write_ids, 4, 24, str(path))
    assert ids == [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]], [], [], []]
    file = pq.ParquetFile(path)
    # One row group a batch: the file was written as the batches came.
    assert file.num_row_groups == 3
    table = file.read().to_pydict()
    assert list(table) == ["sample_id", "input_ids", "ids", "twice"]
    assert table["sample_id"] == list(range(15))
    module = SyntheticDataModule(**SYNTHETIC)
    module.setup()
    for row, sample in enumerate(module.train_set):
        ids = sample["input_ids"].tolist()
        assert table["input_ids"][row] == ids
        assert table["ids"][row] == [0, *ids[1:]]
        assert table["twice"][row] == [[float(one)] * 2 for one in [0, *ids[1:]]]
    assert [path.name for path in path.parent.iterdir()] == ["out.parquet"]


class Samples(Dataset):
    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        sample = {"input_ids": [1, 2, 3]}
        return sample if self.ids[index] is None else {**sample, "sample_id": self.ids[index]}


class Iterates:
    """Batches from something that is no DataLoader, whose indices Lightning does not know."""

    def __init__(self, loader):
        self.batches = list(loader)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def write_all(folder):
    """What becomes of several kinds of ids: an error or the ids in the file."""

    def loader(*ids):
        return DataLoader(Samples(ids), batch_size=2, collate_fn=collate_jagged)

    def write(name, loaders):
        path = f"{folder}/{name}.parquet"
        # With Lightning's own sampler, which every rank must see whole.
        trainer = trainers.trainer(
            48, use_distributed_sampler=True, callbacks=[PredictionWriter(path)]
        )
        try:
            trainer.predict(trainers.module(), loaders, return_predictions=False)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return pq.read_table(path)["sample_id"].to_pylist() if trainer.is_global_zero else None

    none = (None,) * 5
    return {
        "ids of the batch": write("ids", loader(9, 3, 5, 1, 7)),
        "indices": write("indices", loader(*none)),
        "twice": write("twice", loader(9, 3, 5, 9, 7)),
        "no ids": write("none", Iterates(loader(*none))),
        "two": write("two", [loader(1), loader(2)]),
        "float": write("float", loader(0.5, 1.5)),
    }


def test_where_ids_come_from_and_which_are_refused(tmp_path):
    found, other = run_distributed(write_all, 2, str(tmp_path))
    assert found.pop("ids of the batch") == [9, 3, 5, 1, 7]
    assert found.pop("indices") == [0, 1, 2, 3, 4]
    assert found == {name: other[name] for name in found}
    assert "Sample 9 comes a second time, in batch 1" in found["twice"]
    assert "Give one integer a sample as 'sample_id'" in found["no ids"]
    assert "found 2 predict dataloaders" in found["two"]
    assert "torch.float32" in found["float"]
    finished = sorted(path.name for path in tmp_path.glob("[!.]*"))
    assert finished == ["ids.parquet", "indices.parquet"]
    unfinished = pq.read_table(tmp_path / ".twice.parquet.unfinished")
    assert unfinished["sample_id"].to_pylist() == [9, 3]


class NoDict(DynamicCPModule):
    def predict_micro_batch(self, micro_batch):
        return micro_batch.labels


class NoRows(DynamicCPModule):
    def predict_micro_batch(self, micro_batch):
        return {"wrong": micro_batch.labels[:-1]}


class Empty(DynamicCPModule):
    def predict_micro_batch(self, micro_batch):
        return {}


def refused():
    messages = []
    for kind in (NoDict, NoRows, Empty):
        try:
            trainers.trainer(256).predict(kind(trainers.CONFIG), data())
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_outputs_that_are_no_rows():
    (messages,) = run_distributed(refused, 1)
    assert "must return a dict" in messages[0]
    assert "found Tensor" in messages[0]
    assert "'wrong' with shape" in messages[1]
    assert "found an empty dict" in messages[2]


def test_a_writer_without_pyarrow_says_what_to_install(monkeypatch):
    monkeypatch.setattr(prediction_writer, "PYARROW_AVAILABLE", RequirementCache("no-such-pyarrow"))
    with pytest.raises(ModuleNotFoundError, match="no-such-pyarrow"):
        PredictionWriter("x.parquet").setup(None, trainers.module(), "predict")


def predict_fit_predict(folder):
    """Predict, fit, predict on one Trainer; what is made in one must not stop the next."""
    checkpoint = ModelCheckpoint(dirpath=folder, filename="last")
    trainer = trainers.trainer(48, enable_checkpointing=True, callbacks=[checkpoint])
    module = trainers.module()
    first = trainer.predict(module, data())
    trainer.fit(module, trainers.batches(1))
    second = trainer.predict(module, data())
    return [[as_arrays(one) for one in outputs] for outputs in (first, second)]


def predict_from(path, cap):
    return [
        as_arrays(one)
        for one in trainers.trainer(cap).predict(trainers.module(seed=5), data(), ckpt_path=path)
    ]


def test_predict_fit_predict_and_predict_from_the_checkpoint(tmp_path):
    before, after = run_distributed(predict_fit_predict, 2, str(tmp_path))[0]
    check(before)
    loaded = run_distributed(predict_from, 4, str(tmp_path / "last.ckpt"), 24)[0]
    for old, new, again in zip(before, after, loaded, strict=True):
        for row, new_row, again_row in zip(
            old["log_probs"], new["log_probs"], again["log_probs"], strict=True
        ):
            np.testing.assert_allclose(again_row, new_row, rtol=1e-5, atol=1e-5)
            if len(row) > 9:
                assert np.abs(new_row - row).max() > 1e-3
