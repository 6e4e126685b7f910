"""A file is there whole, or as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dcp.config.files import whole_file


def test_the_file_takes_its_place_at_the_end(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with whole_file(path) as file:
        file.write_text("1")
        assert not path.exists()
        assert file.suffix == path.suffix
    assert path.read_text() == "1"
    assert list(path.parent.iterdir()) == [path]


def _fail_halfway(file: Path) -> None:
    file.write_text("ne")
    raise KeyError


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyError), whole_file(path) as file:
        _fail_halfway(file)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "a").write_text("")
    path = tmp_path / "a" / "b.txt"
    with pytest.raises(ValueError, match=r"a/b\.txt cannot be written"), whole_file(path) as file:
        file.write_text("1")
