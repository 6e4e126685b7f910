"""A drawn plan has a box for each micro-batch, over the ranks of its group."""

from __future__ import annotations

import matplotlib as mpl
import pytest

mpl.use("Agg")

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure

from lightning_dcp.planning import plan_global_batch
from lightning_dcp.planning.draw import draw_plan

PLAN = plan_global_batch(
    [900, 800, 400, 300, 200, 100, 100, 50], num_ranks=4, max_seqlen_per_dp_cp_rank=512
)


def test_a_box_a_micro_batch_up_to_the_predicted_time():
    axes = draw_plan(PLAN)
    (boxes,) = [c for c in axes.collections if isinstance(c, PatchCollection)]
    assert len(boxes.get_paths()) == sum(len(step.groups) for step in PLAN.steps)
    # The last box ends when the plan is predicted to end; the axis goes a little further.
    assert axes.get_xlim()[1] == pytest.approx(1.01 * PLAN.report.predicted_seconds)
    assert axes.get_title(loc="left").startswith("balanced: ")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2", "3"]
    sizes = {text.get_text() for text in axes.figure.legends[0].get_texts()}
    assert sizes == {f"CP {size}" for size in PLAN.cp_sizes()} | {"idle"}


def test_axes_and_labels_of_the_users_own():
    axes = Figure().subplots()
    drawn = draw_plan(PLAN, axes=axes, title="mine", rank_labels=["a", "b", "c", "d"])
    assert drawn is axes
    assert not axes.figure.legends
    assert axes.get_title(loc="left").startswith("mine: ")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c", "d"]


def test_not_one_label_a_rank():
    with pytest.raises(ValueError, match="2 labels for 4 ranks"):
        draw_plan(PLAN, rank_labels=["a", "b"])
