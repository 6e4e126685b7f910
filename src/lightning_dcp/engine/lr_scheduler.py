"""A torch scheduler for Megatron-Core's optimizer."""

from __future__ import annotations

from typing import Any, override

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_dcp.config.schedule import LRSchedule


def lr_scheduler(schedule: LRSchedule, optimizer: Optimizer, total_steps: int | None) -> LambdaLR:
    """A torch scheduler of a course of the learning rate.

    Args:
        schedule: The course.
        optimizer: What it sets the learning rates of.
        total_steps: Of the whole fit; None means no decay.
    """
    return _SameForAllGroups(optimizer, lambda step: schedule.factor(step, total_steps))


class _SameForAllGroups(LambdaLR):
    """One factor for all parameter groups, however many there are.

    Megatron-Core's optimizer has more groups on a rank with experts, or with more than one chunk of
    the model, so that a run that goes on in another layout has another number of them.
    """

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        num_groups = len(self.base_lrs)
        of_groups = {
            key: [state_dict[key][0]] * num_groups for key in ("base_lrs", "_last_lr", "lr_lambdas")
        }
        super().load_state_dict(state_dict | of_groups)
