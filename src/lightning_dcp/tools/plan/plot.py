"""The picture of ``plan``: a global batch under two planners, on one time axis."""

from __future__ import annotations

from lightning_dcp.planning.draw import draw_plan, label_time, legend_handles, plan_height
from lightning_dcp.tools.plan.results import PlannerResult
from lightning_dcp.tools.plots import new_figure, save_figure


def plot_first_plans(path: str, results: list[PlannerResult]) -> None:
    """Draws the first global batch's plans, all on one pool, one above the other, into a PNG."""
    shown = [(one, one.first_plan) for one in results if one.first_plan is not None]
    heights = [plan_height(plan) for _, plan in shown]
    figure = new_figure(10.0, 0.9 + sum(heights))
    all_axes = figure.subplots(
        len(shown), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    longest = 0.0
    for axes, (result, plan) in zip(all_axes, shown, strict=True):
        settings = result.settings
        draw_plan(
            plan,
            cost_model=settings.cost_model,
            execution=settings.execution,
            title=result.label,
            axes=axes,
        )
        # draw_plan leaves 1 % free behind the end; all plans share the longest axis and its label.
        longest = max(longest, axes.get_xlim()[1] / 1.01)
        axes.set_xlabel("")
    label_time(all_axes[-1], longest)
    sizes = {size for _, plan in shown for size in plan.cp_sizes()}
    handles = legend_handles(sizes, shown[0][1].num_ranks)
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    save_figure(figure, path)
