"""One function decides whose attention serves a model, and says why one cannot."""

from __future__ import annotations

import pytest

from lightning_dcp.model.attention import backends
from lightning_dcp.model.attention.backends import BACKENDS, choose_backend


@pytest.mark.parametrize(
    ("name", "have_te", "cpu_mode", "chosen"),
    [
        ("auto", True, False, "te"),
        ("auto", True, True, "torch"),
        ("auto", False, False, "torch"),
        ("torch", True, False, "torch"),
        ("te", True, False, "te"),
    ],
)
def test_auto_takes_transformer_engine_where_it_can_run(
    monkeypatch, name, have_te, cpu_mode, chosen
):
    monkeypatch.setattr(backends, "HAVE_TE", have_te)
    assert choose_backend(name, cpu_mode=cpu_mode) is BACKENDS[chosen]


def test_a_backend_that_is_not_there_or_cannot_run_here_says_so(monkeypatch):
    with pytest.raises(ValueError, match="attention_backend='flash' is none of auto, torch, te"):
        choose_backend("flash", cpu_mode=True)
    for have_te, missing in ((True, "the run is on the CPU"), (False, "it is not installed")):
        monkeypatch.setattr(backends, "HAVE_TE", have_te)
        with pytest.raises(ValueError, match=f"and {missing}. Leave it at 'auto'"):
            choose_backend("te", cpu_mode=True)
