"""Value heads and losses of whole sequences: every layout gives the numbers of one process.

A sum over a CP group whose gradient is taken once a rank, or not at all on some, a pair that is
counted on every rank, a value's gradient that is summed over tensor-parallel ranks, or a value that
stands at the wrong token would all show up here.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from parity import CLIP, DENSE, SETTINGS, Layout, Run, compare, start_of

import reference
from distributed import run_distributed
from lightning_dcp import DPO, DynamicCPModule, ValueLoss
from lightning_dcp.config.padding import row_alignment
from lightning_dcp.planning.plan import Group, Step
from lightning_dcp.planning.planners.balanced import plan_balanced
from lightning_dcp.planning.planners.static import plan_static

CONFIG = replace(DENSE, qk_layernorm=False)
CRITIC = replace(CONFIG, head="value")
OBJECTIVES = {
    "value": ValueLoss(),
    "clipped": ValueLoss(clip=0.3),
    "masked": ValueLoss(mask="value_mask"),
    "dpo": DPO(beta=0.05, label_smoothing=0.1),
    "mean": DPO(beta=2.0, average_log_prob=True, reference_per="sample"),
    "free": DPO(beta=0.02, reference_free=True),
}
# A sample's pair is the one as far from the other end. The last pair of the last batch is without a
# target: its margin is that of the references.
LENGTHS = [
    [70, 5, 9, 33, 2, 17, 12, 24, 1, 8],
    [3, 48, 7, 7, 21, 95, 13, 2],
    [11, 6, 30, 1, 1, 60, 19, 5],
]


def config_of(name):
    return CRITIC if isinstance(OBJECTIVES[name], ValueLoss) else CONFIG


@functools.cache
def samples(index):
    """What the objectives read of each sample; NaN where nothing may look."""
    generator = torch.Generator().manual_seed(index)
    lengths = LENGTHS[index]
    made = []
    for sample, n in enumerate(lengths):
        pair = min(sample, len(lengths) - 1 - sample)
        mask = torch.rand(n, generator=generator) < 0.7
        before_target = torch.cat((mask[1:], torch.tensor([False])))
        value_mask = torch.rand(n, generator=generator) < 0.3
        returns = torch.randn(n, generator=generator)
        returns[~before_target & ~value_mask] = torch.nan
        reference_log_probs = torch.randn(n, generator=generator) - 4
        reference_log_probs[~mask] = torch.nan
        reference_log_probs[0] = torch.nan
        made.append(
            {
                "input_ids": torch.randint(0, 61, (n,), generator=generator),
                "loss_mask": mask,
                "returns": returns,
                "old_values": torch.randn(n, generator=generator) * 0.2,
                "value_mask": value_mask,
                "token_reference": reference_log_probs,
                "sample_reference": torch.randn((), generator=generator) - 4,
                "pair_id": torch.tensor((1 << 62) - pair),
                "is_chosen": torch.tensor((sample == pair) == (pair % 3 != 0)),
            }
        )
    return made


def batch_of(name, index):
    made = samples(index)
    whole = "sample_reference" if name == "mean" else "token_reference"
    batch = {}
    for key, first in made[0].items():
        values = [sample[key] for sample in made]
        batch[key] = (
            torch.nested.nested_tensor(values, layout=torch.jagged)
            if first.dim()
            else torch.stack(values)
        )
    batch["reference_log_probs"] = batch[whole]
    return batch


def plan_pairs(planner, cp, request):
    """A planner that plans pairs as if each were one sample, long enough for any CP size."""
    align = row_alignment(request.num_ranks, request.settings.tp_size)
    padded = [-(-length // align) * align for length in request.lengths]
    last = len(padded) - 1
    units = tuple(padded[one] + padded[last - one] for one in range(len(padded) // 2))
    settings = replace(request.settings, context_parallel_size=cp)
    steps = planner(replace(request, lengths=units, settings=settings))

    def members(group):
        ids = [sample for unit in group.sample_ids for sample in (unit, last - unit)]
        return Group(group.first_rank, group.size, tuple(sorted(ids)))

    return [Step(tuple(members(group) for group in step.groups)) for step in steps]


class Bare(DynamicCPModule):
    """Knows its parallel state without a Trainer."""

    _strategy = None


def layout_of(world, tp, cap, cp):
    planner = functools.partial(plan_pairs, plan_static if cp else plan_balanced, cp)
    return Layout(world, cap, tp=tp, planner=planner)


def train(layout, names):
    """Trains three steps with each objective on this rank."""
    found, context = {}, None
    try:
        for name in names:
            run = Run(layout, config_of(name), context=context)
            context = run.context
            module = Bare(config_of(name), objective=OBJECTIVES[name])
            module._strategy = SimpleNamespace(context=context)
            module.model = run.model
            found[name] = run.train(
                [batch_of(name, index) for index in range(len(LENGTHS))],
                module.micro_batch_step,
                target_extras=[extra.key for extra in OBJECTIVES[name].extras],
                check=OBJECTIVES[name].check,
            )
            run.engine.close()
    finally:
        if context is not None:
            context.destroy()
    return found


def value_loss(name, outputs, index):
    """Token by token, from the definition."""
    total, num = torch.zeros(()), 0
    for values, sample in zip(outputs, samples(index), strict=True):
        for i in range(len(values)):
            counted = (
                sample["value_mask"][i]
                if name == "masked"
                else i + 1 < len(values) and sample["loss_mask"][i + 1]
            )
            if not counted:
                continue
            loss = (values[i, 0] - sample["returns"][i]) ** 2
            if name == "clipped":
                old = sample["old_values"][i]
                near = min(max(values[i, 0], old - 0.3), old + 0.3)
                loss = max(loss, (near - sample["returns"][i]) ** 2)
            total, num = total + loss / 2, num + 1
    return total, num


def log_ratio(name, logits, sample):
    """A sequence's log-probability less the reference's, or its mean."""
    ids, mask = sample["input_ids"], sample["loss_mask"]
    targets = [i for i in range(1, len(ids)) if mask[i]]
    log_probs = [logits[i - 1].double().log_softmax(0)[ids[i]] for i in targets]
    if name == "dpo":
        log_probs = [
            one - sample["token_reference"][i] for one, i in zip(log_probs, targets, strict=True)
        ]
    total = sum(log_probs, torch.zeros((), dtype=torch.float64))
    if name == "mean":
        return total / max(len(targets), 1) - sample["sample_reference"]
    return total


def pair_loss(name, outputs, index):
    """Pair by pair, from the definition."""
    objective, made = OBJECTIVES[name], samples(index)
    ratios = [log_ratio(name, *both) for both in zip(outputs, made, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for one in range(len(made) // 2):
        other = len(made) - 1 - one
        assert made[one]["pair_id"] == made[other]["pair_id"]
        chosen, rejected = (one, other) if made[one]["is_chosen"] else (other, one)
        margin = objective.beta * (ratios[chosen] - ratios[rejected])
        right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
        total = total - (1 - objective.label_smoothing) * right - objective.label_smoothing * wrong
    return total, len(made) // 2


@functools.cache
def expected(name):
    """The reference's numbers, from the initial weights that one process of ours has."""
    config = config_of(name)
    batches = [
        [sample["input_ids"].tolist() for sample in samples(index)] for index in range(len(LENGTHS))
    ]
    loss = value_loss if config is CRITIC else pair_loss
    return reference.train(
        start_of(config),
        config,
        batches,
        clip=CLIP,
        batch_loss=functools.partial(loss, name),
        **SETTINGS,
    )


@pytest.mark.parametrize(
    ("world", "tp", "cap", "cp", "cp_sizes"),
    [
        (1, 1, 256, None, [1]),
        (2, 1, 56, None, [1, 2]),
        (2, 2, 112, None, [1]),
        (4, 1, 28, None, [1, 2, 4]),
        (4, 2, 56, None, [1, 2]),
        (4, 1, 60, 2, [2]),
        (4, 1, 28, 4, [4]),
    ],
    ids=["1", "2", "2-tp2", "4", "4-tp2", "4-static2", "4-static4"],
)
def test_layout_equals_one_process(world, tp, cap, cp, cp_sizes):
    results = run_distributed(train, world, layout_of(world, tp, cap, cp), list(OBJECTIVES))
    for name in OBJECTIVES:
        found = [ranks[name] for ranks in results]
        compare(found, start_of(config_of(name)), expected(name))
        assert results[0][name]["cp_sizes"] == cp_sizes
    assert results[0]["dpo"]["counts"] == [len(lengths) // 2 for lengths in LENGTHS]


def test_the_cases_reach_both_sides_of_the_clip_and_all_margins():
    weights = {key: torch.tensor(value) for key, value in start_of(CRITIC).items()}
    far = []
    for sample in samples(0):
        values = reference.forward(weights, CRITIC, sample["input_ids"])[:, 0]
        old, returns = sample["old_values"], sample["returns"]
        near = old + (values - old).clamp(-0.3, 0.3)
        far += [
            bool((a - r) ** 2 < (b - r) ** 2)
            for a, b, r in zip(values, near, returns, strict=True)
            if not r.isnan()
        ]
    assert 5 < sum(far) < len(far) - 5
    # Margins where the loss is neither flat nor a straight line.
    assert all(0.1 < loss < 5 for loss in expected("dpo")["losses"])
