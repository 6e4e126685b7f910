import logging
from itertools import chain

import numpy as np
import pytest
import torch

from distributed import run_distributed
from lightning_dcp.data import LengthDistribution, SyntheticDataModule

OPTIONS = {
    "global_batch_size": 6,
    "num_batches": 4,
    "num_val_batches": 2,
    "num_workers": 0,
}


def ready(**options):
    if "length_file" not in options:
        options = {"lengths": LengthDistribution("uniform", 3, 30)} | options
    module = SyntheticDataModule(**OPTIONS | options)
    module.prepare_data()
    module.setup("fit")
    return module


def rows(loader):
    return [[row.tolist() for row in batch["input_ids"].unbind()] for batch in loader]


def test_shapes_and_sizes():
    module = ready(vocab_size=50)
    assert (len(module.train_dataloader()), len(module.val_dataloader())) == (4, 2)
    for batch in module.train_dataloader():
        ids = batch["input_ids"]
        assert (ids.layout, ids.dtype, ids.size(0)) == (torch.jagged, torch.int64, 6)
        assert ids.is_contiguous()
        assert ids.values().min() >= 0
        assert ids.values().max() < 50
        assert set(ids.offsets().diff().tolist()) <= set(range(3, 31))
    assert rows(module.test_dataloader()) == rows(module.val_dataloader())
    assert rows(module.val_dataloader())[0] != rows(module.train_dataloader())[0]
    assert ready(num_val_batches=0).val_dataloader() == []


def test_a_sample_depends_on_the_seed_and_its_index_alone():
    reference = rows(ready().train_dataloader())
    torch.manual_seed(1)
    np.random.seed(1)
    assert rows(ready().train_dataloader()) == reference
    assert rows(ready(num_workers=2).train_dataloader()) == reference
    longer = list(chain(*rows(ready(num_batches=9, global_batch_size=5).train_dataloader())))
    assert longer[:24] == list(chain(*reference))
    assert rows(ready(seed=1).train_dataloader()) != reference
    loader = ready(num_workers=1).train_dataloader()
    assert rows(loader) == rows(loader) == reference  # every epoch, with workers that stay


def test_workers_that_get_everything_pickled():
    loader = ready(num_workers=1).train_dataloader()
    loader.multiprocessing_context = "forkserver"
    assert rows(loader) == rows(ready().train_dataloader())


def _rows_of_a_rank():
    torch.manual_seed(torch.distributed.get_rank())
    return rows(ready().train_dataloader())


def test_two_ranks_get_the_same_batches():
    first, second = run_distributed(_rows_of_a_rank, 2)
    assert first == second == rows(ready().train_dataloader())


def test_lengths_from_a_file(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("length,count\n5,3\n20,1\n")
    module = ready(length_file=str(path), num_batches=400)
    lengths = module.train_dataloader().dataset.lengths
    # Four standard deviations of a share of 0.75 among 2,400 are 0.035.
    assert set(lengths) == {5, 20}
    assert np.mean(lengths == 5) == pytest.approx(0.75, abs=0.036)


def test_clipped_lengths_are_counted_and_reported(tmp_path, caplog):
    path = tmp_path / "lengths.csv"
    path.write_text("length,count\n1,1\n5,1\n70,1\n")
    with caplog.at_level(logging.INFO):
        module = ready(length_file=str(path), max_length=16)
        module.setup("validate")
    datasets = (module.train_dataloader().dataset, module.val_dataloader().dataset)
    lengths = np.concatenate([dataset.lengths for dataset in datasets])
    assert set(lengths) == {2, 5, 16}
    assert module.num_clipped == np.sum(lengths != 5)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"Synthetic data: {module.num_clipped} of 36 lengths were clipped to [2, 16]"
    ]


@pytest.mark.parametrize("vocab_size", [2, 64])
def test_there_is_something_to_learn(vocab_size):
    """Three in four tokens follow from the one before, on data the counts have not seen."""
    module = ready(
        vocab_size=vocab_size, lengths=LengthDistribution("constant", 2000), num_batches=10
    )
    counts = np.zeros((vocab_size, vocab_size))
    for row in chain(*rows(module.train_dataloader())):
        np.add.at(counts, (row[:-1], row[1:]), 1)
    best = counts.argmax(axis=1)
    held_out = [np.array(row) for row in chain(*rows(module.val_dataloader()))]
    hits = np.mean([np.mean(best[row[:-1]] == row[1:]) for row in held_out])
    assert hits == pytest.approx(0.75 + 0.25 / vocab_size, abs=0.1)
    assert hits >= 0.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 1}, "vocab_size=1 must be 2 or more"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"num_batches": 0}, "num_batches=0"),
        ({"num_val_batches": -1}, "num_val_batches=-1"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"min_length": 0}, "min_length=0"),
        ({"seed": -1}, "seed=-1"),
        (
            {"lengths": LengthDistribution(), "length_file": "x.csv"},
            r"lengths=LengthDistribution\(.*\) and length_file='x.csv': give only one",
        ),
        ({"max_length": 4, "min_length": 5}, "max_length=4 is below min_length=5"),
    ],
)
def test_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        SyntheticDataModule(**options)


def test_errors_of_a_length_file_come_from_setup(tmp_path):
    module = SyntheticDataModule(length_file=str(tmp_path / "missing.csv"))
    module.prepare_data()
    with pytest.raises(ValueError, match=r"length_file: there is no file '.*missing.csv'"):
        module.setup("fit")
    with pytest.raises(RuntimeError, match="call setup"):
        module.train_dataloader()
