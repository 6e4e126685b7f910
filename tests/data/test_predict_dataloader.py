"""Every sample once, in order, with its id, also in a last batch that is not full."""

from __future__ import annotations

import pytest

from lightning_dcp.data import SyntheticDataModule, TextDataModule


def seen_in(module):
    """(id, tokens) of every sample, and the samples of each batch."""
    module.setup("predict")
    samples, sizes = [], []
    for batch in module.predict_dataloader():
        ids = batch["sample_id"].tolist()
        samples += zip(ids, [row.tolist() for row in batch["input_ids"].unbind()], strict=True)
        sizes.append(len(ids))
    return samples, sizes


def tokens_of(loader):
    return [row.tolist() for batch in loader for row in batch["input_ids"].unbind()]


def text(folder, **options):
    for index in range(7):
        (folder / f"{index}.txt").write_text("ab" * (index + 1))
    settings = {"global_batch_size": 3, "num_workers": 0, "cache_dir": str(folder / "cache")}
    return TextDataModule([f"{folder}/*.txt"], **settings, **options)


def test_text_comes_in_the_order_of_the_files(tmp_path):
    samples, sizes = seen_in(text(tmp_path))
    assert sizes == [3, 3, 1]
    assert [sample for sample, _ in samples] == list(range(7))
    assert [bytes(ids[:-1]).decode() for _, ids in samples] == ["ab" * (i + 1) for i in range(7)]


def test_fewer_samples_than_a_batch(tmp_path):
    assert seen_in(text(tmp_path, max_length=4, long_documents="drop"))[1] == [1]


def test_the_held_out_samples(tmp_path):
    module = text(tmp_path, val_fraction=0.5, predict_split="val")
    samples, _ = seen_in(module)
    held_out = tokens_of(module.val_dataloader())
    assert 0 < len(samples) < 7
    assert [ids for _, ids in samples] == held_out


def synthetic(**options):
    sizes = {"global_batch_size": 4, "num_batches": 2, "num_val_batches": 1, "num_workers": 0}
    return SyntheticDataModule(**sizes, max_length=20, **options)


@pytest.mark.parametrize(("split", "count"), [("train", 8), ("val", 4)])
def test_synthetic_samples(split, count):
    module = synthetic(predict_split=split)
    samples, _ = seen_in(module)
    assert [sample for sample, _ in samples] == list(range(count))
    loader = module.train_dataloader() if split == "train" else module.val_dataloader()
    assert [ids for _, ids in samples] == tokens_of(loader)


def test_a_split_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="predict_split='test' is none of train, val"):
        synthetic(predict_split="test")
    module = text(tmp_path, predict_split="val")
    module.setup("predict")
    with pytest.raises(ValueError, match="no validation data"):
        module.predict_dataloader()
    with pytest.raises(RuntimeError, match="call setup"):
        synthetic().predict_dataloader()
