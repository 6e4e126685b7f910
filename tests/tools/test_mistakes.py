"""A user's mistake is told once, by the right rank; anything else keeps its traceback."""

from __future__ import annotations

import pytest

from lightning_dcp.tools import mistakes
from lightning_dcp.tools.mistakes import told_once


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """What rank 0 and the processes that it started share."""
    monkeypatch.setenv("LIGHTNING_DCP_TOLD", str(tmp_path))
    monkeypatch.setattr(mistakes, "PATIENCE", 0.0)
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "LIGHTNING_DCP_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def told(capsys, error: Exception) -> str:
    with pytest.raises(SystemExit) as stopped, told_once("fit"):
        raise error
    assert stopped.value.code == 1
    return capsys.readouterr().err


def test_what_all_ranks_raise_is_told_by_rank_0_alone(folder, monkeypatch, capsys):
    assert told(capsys, ValueError("bad")).startswith("lightning-dcp fit: error: bad\n")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert told(capsys, ValueError("bad")) == ""
    assert told(capsys, ValueError("another")).startswith("lightning-dcp fit (rank 1): error: ano")


def test_what_another_rank_told_first_is_not_told_again(folder, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "(rank 1)" in told(capsys, FileNotFoundError("gone"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert told(capsys, FileNotFoundError("gone")) == ""
    # Nor is what the end of that rank broke in this one.
    assert told(capsys, RuntimeError("connection closed by peer")) == ""


@pytest.mark.parametrize("error", [RuntimeError("ours"), KeyError("ours")])
def test_another_error_keeps_its_traceback(folder, error):
    with pytest.raises(type(error), match="ours"), told_once("fit"):
        raise error


def test_a_traceback_can_be_had(folder, monkeypatch):
    monkeypatch.setenv("LIGHTNING_DCP_TRACEBACK", "1")
    with pytest.raises(TypeError, match="bad"), told_once("fit"):
        raise TypeError("bad")


def test_one_process_ends_with_the_message(folder, monkeypatch):
    monkeypatch.delenv("LIGHTNING_DCP_TOLD")
    with pytest.raises(SystemExit, match="lightning-dcp plan: error: bad"), told_once("plan"):
        raise NotImplementedError("bad")
