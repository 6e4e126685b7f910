"""Value heads and losses of whole sequences: every layout gives the numbers of one process.

A sum over a CP group whose gradient is taken once a rank, or not at all on some, a pair that is
counted on every rank, a value's gradient that is summed over tensor-parallel ranks, or a value that
stands at the wrong token would all show up here.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import reference
from distributed import run_distributed
from lightning_dcp import DPO, DynamicCPModule, ModelConfig, OptimizerSettings, ValueLoss
from lightning_dcp.config.padding import row_alignment
from lightning_dcp.engine import (
    DynamicCPEngine,
    PlanSettings,
    build_optimizer,
    full_model_state,
    wrap_ddp,
)
from lightning_dcp.model import build_gpt_model
from lightning_dcp.model.global_names import merge_over_tp
from lightning_dcp.parallel import ParallelSizes, install_cp_hooks, setup_parallel
from lightning_dcp.planning.plan import Group, Step
from lightning_dcp.planning.planners.balanced import plan_balanced
from lightning_dcp.planning.planners.static import plan_static

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    vocab_size=61,
    make_vocab_size_divisible_by=8,
    init_method_std=0.2,
)
CRITIC = dataclasses.replace(CONFIG, head="value")
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
# An epsilon well above the rounding of gradients that are nearly zero: see test_parity.
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "adam_eps": 1e-5}
CLIP = 0.5


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
    settings = dataclasses.replace(request.settings, context_parallel_size=cp)
    steps = planner(dataclasses.replace(request, lengths=units, settings=settings))

    def members(group):
        ids = [sample for unit in group.sample_ids for sample in (unit, last - unit)]
        return Group(group.first_rank, group.size, tuple(sorted(ids)))

    return [Step(tuple(members(group) for group in step.groups)) for step in steps]


class Bare(DynamicCPModule):
    """Knows its parallel state without a Trainer."""

    _strategy = None


def train(tp, cap, cp, names):
    """Trains three steps with each objective; numbers are whole, as on one process."""
    sizes = ParallelSizes(world_size=dist.get_world_size(), tensor_model_parallel_size=tp)
    context = setup_parallel(sizes)
    planner = functools.partial(plan_pairs, plan_static if cp else plan_balanced, cp)
    engine = DynamicCPEngine(
        context, PlanSettings.of_run(context.sizes, max_seqlen_per_dp_cp_rank=cap, planner=planner)
    )
    try:
        return {name: train_one(name, engine, context) for name in names}
    finally:
        engine.close()
        context.destroy()


def train_one(name, engine, context):
    config, objective = config_of(name), OBJECTIVES[name]
    module = Bare(config, objective=objective)
    module._strategy = SimpleNamespace(context=context)
    model = module.model = build_gpt_model(config, context, seed=1)
    install_cp_hooks(model)
    start = full_model_state(model, context)
    ddp = wrap_ddp(model, context)
    optimizer = build_optimizer(ddp, context, OptimizerSettings(**SETTINGS), clip_grad=CLIP)
    losses, counts, norms, grads, evals, cp_sizes = [], [], [], [], [], set()
    for index in range(len(LENGTHS)):
        planned = engine.prepare(
            batch_of(name, index),
            vocab_size=config.vocab_size,
            target_extras=[extra.key for extra in objective.extras],
            check=objective.check,
        )
        cp_sizes |= set(planned.plan.cp_sizes())
        evals.append(float(engine.eval_step(planned, module.micro_batch_step).loss))
        result = engine.train_step(ddp, planned, module.micro_batch_step, force_all_reduce=True)
        losses.append(float(result.loss))
        counts.append(int(result.num_tokens))
        grads.append(
            {
                key: merge_over_tp(p.main_grad, p, context).detach().numpy().copy()
                for key, p in model.named_parameters()
            }
        )
        optimizer.step()
        norms.append(optimizer.grad_norm)
    end = full_model_state(model, context)
    found = {"losses": losses, "counts": counts, "norms": norms}
    if dist.get_rank() != 0:
        return found
    return {
        **found,
        "grads": grads,
        "evals": evals,
        "cp_sizes": sorted(cp_sizes),
        "start": {key: value.numpy() for key, value in start.items()},
        "weights": {key: value.numpy() for key, value in end.items()},
    }


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
    start = run_distributed(train, 1, 1, 256, None, [name])[0][name]["start"]
    batches = [
        [sample["input_ids"].tolist() for sample in samples(index)] for index in range(len(LENGTHS))
    ]
    loss = value_loss if config_of(name) is CRITIC else pair_loss
    wanted = reference.train(
        start,
        config_of(name),
        batches,
        clip=CLIP,
        batch_loss=functools.partial(loss, name),
        **SETTINGS,
    )
    return start, wanted


def close(found, wanted, name):
    """Equal to 1e-5, relative to the largest value of the tensor."""
    scale = max(float(np.abs(wanted).max()), 1e-6)
    difference = float(np.abs(found - wanted).max()) / scale
    assert difference < 1e-5, f"{name}: off by {difference:.2e} of {scale:.2e}"


def check(name, ranks):
    start, wanted = expected(name)
    found = ranks[0]
    for key, value in start.items():
        np.testing.assert_array_equal(found["start"][key], value, err_msg=key)
    for key in ("losses", "norms"):
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-5, err_msg=f"{name} {key}")
    np.testing.assert_allclose(found["evals"], wanted["losses"], rtol=1e-5)
    for step, (mine, theirs) in enumerate(zip(found["grads"], wanted["grads"], strict=True)):
        assert set(mine) == set(theirs)
        for key in theirs:
            close(mine[key], theirs[key], f"{name}: gradient of {key} at step {step}")
    for key, value in wanted["weights"].items():
        close(found["weights"][key], value, f"{name}: {key} after three steps")
    for other in ranks[1:]:
        assert other["losses"] == found["losses"]
        assert other["counts"] == found["counts"]
        assert other["norms"] == pytest.approx(found["norms"], rel=1e-6)


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
    results = run_distributed(train, world, tp, cap, cp, list(OBJECTIVES))
    for name in OBJECTIVES:
        check(name, [ranks[name] for ranks in results])
        assert results[0][name]["cp_sizes"] == cp_sizes
    assert results[0]["dpo"]["counts"] == [len(lengths) // 2 for lengths in LENGTHS]


def test_the_cases_reach_both_sides_of_the_clip_and_all_margins():
    start, _ = expected("clipped")
    weights = {key: torch.tensor(value) for key, value in start.items()}
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
    assert all(0.1 < loss < 5 for loss in expected("dpo")[1]["losses"])
