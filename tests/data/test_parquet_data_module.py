"""Columns of parquet files become keys of the batch, what PredictionWriter wrote among them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning_utilities.core.imports import RequirementCache

from lightning_dcp import ParquetDataModule, PredictionWriter
from lightning_dcp.data import collate_jagged, parquet

LENGTHS = [3, 1, 5, 2, 4]


def batch():
    generator = np.random.default_rng(0)
    return collate_jagged(
        [
            {
                "input_ids": generator.integers(0, 9, length),
                "log_probs": torch.from_numpy(generator.random(length, np.float32)),
                "routed_experts": torch.from_numpy(
                    generator.integers(0, 9, (length - index % 2, 3, 2)).astype(np.uint8)
                ),
                "advantages": float(index),
                "sample_id": 10 + index,
            }
            for index, length in enumerate(LENGTHS)
        ]
    )


@pytest.fixture
def path(tmp_path):
    """A file of two row groups as ``predict`` leaves it."""
    writer = PredictionWriter(str(tmp_path / "a" / "one.parquet"))
    made = batch()
    samples = {
        key: list(value.unbind()) if value.is_nested else list(value) for key, value in made.items()
    }
    for rows in (slice(0, 3), slice(3, 5)):
        part = collate_jagged(
            [
                dict(zip(samples, values, strict=True))
                for values in zip(*(value[rows] for value in samples.values()), strict=True)
            ]
        )
        writer._write(part)
    writer.on_predict_end(None, None)
    return str(writer.path)


def rows(value):
    return [one.tolist() for one in value.unbind()] if value.is_nested else value.tolist()


def test_what_predict_wrote_comes_back_key_by_key(path):
    module = ParquetDataModule(
        path, columns={"log_probs": "old_log_probs"}, global_batch_size=2, num_workers=0
    )
    module.setup()
    assert module.max_length == 5
    read = list(module.predict_dataloader())
    assert [len(one["sample_id"]) for one in read] == [2, 2, 1]
    wanted = batch()
    wanted["old_log_probs"] = wanted.pop("log_probs")
    assert set(read[0]) == set(wanted)
    for key, value in wanted.items():
        assert [row for one in read for row in rows(one[key])] == rows(value)
        assert read[0][key].dtype == value.dtype


def test_training_batches_are_shuffled_by_seed_and_full(path):
    def ids(**options):
        module = ParquetDataModule([path], global_batch_size=2, num_workers=0, **options)
        module.setup("fit")
        return [one["sample_id"].tolist() for one in module.train_dataloader()]

    assert ids(shuffle=False) == [[10, 11], [12, 13]]
    assert ids(seed=1) == ids(seed=1)
    assert len({str(ids(seed=seed)) for seed in range(5)}) > 1


def test_samples_without_an_id_get_their_index(path):
    module = ParquetDataModule(path, leave_out=["sample_id"], global_batch_size=5, num_workers=0)
    module.setup("predict")
    (read,) = module.predict_dataloader()
    assert read["sample_id"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"columns": {"logprobs": "old_log_probs"}}, "no column 'logprobs', only"),
        ({"leave_out": ["input_ids"]}, "there must be 'input_ids'"),
        ({"columns": {"log_probs": "advantages"}}, "and none twice"),
        ({"global_batch_size": 6}, "has 5 samples, fewer than global_batch_size=6"),
        ({"data": "nowhere/*.parquet"}, "nowhere"),
    ],
)
def test_what_cannot_be_read(path, options, found):
    with pytest.raises(ValueError, match=found):
        ParquetDataModule(**{"data": path, "global_batch_size": 2, **options}).setup("fit")


def test_missing_values_ragged_lists_and_other_columns(tmp_path):
    cases = {
        "null": ({"input_ids": [[1, 2], None]}, "lacks 1 values"),
        "hole": ({"input_ids": [[1, None]]}, "lacks values"),
        "ragged": ({"input_ids": [[1]], "routes": [[[1, 2]]]}, "not fixed"),
    }
    for name, (columns, found) in cases.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        with pytest.raises(ValueError, match=found):
            ParquetDataModule(str(tmp_path / f"{name}.parquet"), global_batch_size=1).setup()
    with pytest.raises(ValueError, match="or other types"):
        ParquetDataModule(str(tmp_path / "*.parquet"), global_batch_size=1).setup()


def test_without_pyarrow_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(parquet, "PYARROW_AVAILABLE", RequirementCache("no-such-pyarrow"))
    with pytest.raises(ModuleNotFoundError, match="no-such-pyarrow"):
        ParquetDataModule("x.parquet")
