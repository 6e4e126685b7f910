"""What an objective cannot use is an error on every rank, before the step, that names the key."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from objectives_reference import batch_of

import trainers
from distributed import run_distributed
from lightning_dcp.objectives import SFT, Objective, PolicyLoss, TopKDistillation

STEPS = []


class Counts(type(trainers.module())):
    """Says whether a micro-batch ran."""

    def micro_batch_step(self, micro_batch):
        STEPS.append(1)
        return super().micro_batch_step(micro_batch)


def message_of(batch, objective, function="fit"):
    module = Counts(trainers.CONFIG, seed=1, objective=objective)
    try:
        data = trainers.Batches([batch], [batch])
        getattr(trainers.trainer(48), function)(module, data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def changed(**changes):
    batch = batch_of(0)
    for key, value in changes.items():
        if value is None:
            del batch[key]
        else:
            batch[key] = value
    return batch


def like(key, change):
    """``key`` of the batch with its values changed."""
    value = batch_of(0)[key]
    return torch.nested.nested_tensor_from_jagged(change(value.values()), value.offsets())


class Pairs(Objective):
    """Gives two losses a row."""

    def __call__(self, outputs, micro_batch):
        return outputs.log_probs()[:, None].expand(-1, 2)


def bad_batches():
    dense = torch.zeros(len(trainers.LENGTHS[0]))
    distillation, policy = TopKDistillation(), PolicyLoss(kl_coefficient=1.0)
    cases = {
        "missing": (changed(old_log_probs=None), policy),
        "missing ref": (changed(ref_log_probs=None), policy),
        "another key": (changed(), SFT(sample_weight="weights")),
        "dense": (changed(old_log_probs=dense), policy),
        "jagged": (changed(), SFT(sample_weight="token_weight")),
        "wide": (changed(advantages=like("advantages", lambda v: v[:, None])), policy),
        "narrow": (changed(teacher_ids=like("teacher_ids", lambda v: v[:, 0])), distillation),
        "k": (changed(teacher_ids=like("teacher_ids", lambda v: v[:, :2])), distillation),
        "float ids": (changed(teacher_ids=like("teacher_ids", torch.Tensor.float)), distillation),
        "int": (
            changed(advantages=like("advantages", lambda v: torch.ones(v.shape).int())),
            policy,
        ),
        "vocabulary": (changed(teacher_ids=like("teacher_ids", lambda v: v + 61)), distillation),
    }
    found = {name: message_of(*case) for name, case in cases.items()}
    rank_1_lacks = changed(advantages=None) if dist.get_rank() == 1 else changed()
    found["one rank"] = message_of(rank_1_lacks, policy)
    found["validate"] = message_of(changed(advantages=None), policy, "validate")
    num_steps = len(STEPS)
    found["pairs"] = message_of(changed(), Pairs())
    return found, num_steps


def test_batches_that_an_objective_cannot_use():
    (found, num_steps), other = run_distributed(bad_batches, 2)
    assert num_steps == other[1] == 0
    for one in (found.pop("pairs"), other[0].pop("pairs")):
        assert "Pairs gave losses of shape" in one
    of_one_rank = found.pop("one rank")
    assert "PolicyLoss needs 'advantages'" in other[0].pop("one rank")
    assert "Rank 1 refused its batch: ValueError: PolicyLoss needs 'advantages'" in of_one_rank
    assert found == other[0]
    assert found["missing"].startswith("ValueError: PolicyLoss needs 'old_log_probs' in every")
    assert "extra keys: 'advantages', 'ref_log_probs'" in found["missing"]
    assert "'ref_log_probs'" in found["missing ref"]
    assert (
        "SFT needs 'weights' in every batch: a dense tensor [num_samples]" in found["another key"]
    )
    assert "as a jagged tensor [num_samples, length*], floating point" in found["dense"]
    assert "found it dense, of shape [10]" in found["dense"]
    assert "found it jagged with one value a token" in found["jagged"]
    assert "found it jagged with [1] a token" in found["wide"]
    assert "as a jagged tensor [num_samples, length*, k], integers" in found["narrow"]
    assert "'teacher_ids' has 2 ids a token, 'teacher_values' 3 values" in found["k"]
    assert found["float ids"].startswith("TypeError: TopKDistillation needs 'teacher_ids'")
    assert "found torch.int32" in found["int"]
    assert "'teacher_ids' of sample 0 holds id" in found["vocabulary"]
    assert "ids 0 to 60" in found["vocabulary"]
    assert "'advantages'" in found["validate"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SFT(label_smoothing=1.0), "label_smoothing=1.0"),
        (lambda: SFT(z_loss=-1.0), "z_loss=-1.0"),
        (lambda: SFT(token_weight="w", z_loss=0.1), "token_weight='w'"),
        (lambda: PolicyLoss(temperature=0.0), "temperature=0.0"),
        (lambda: PolicyLoss(temperature=float("nan")), "temperature=nan"),
        (lambda: PolicyLoss(clip_low=1.0), "clip_low=1.0"),
        (lambda: PolicyLoss(clip_high=-0.1), "clip_high=-0.1"),
        (lambda: PolicyLoss(kl_coefficient=float("inf")), "kl_coefficient=inf"),
        (lambda: TopKDistillation(teacher_values="probs"), "teacher_values='probs'"),
        (lambda: TopKDistillation(teacher_values="log_probs", temperature=2.0), "temperature=2.0"),
        (lambda: TopKDistillation(temperature=-1.0), "temperature=-1.0"),
    ],
)
def test_options_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_objective_of_another_kind():
    with pytest.raises(TypeError, match="objective must be an Objective, found a str"):
        trainers.module(objective="sft")
    with pytest.raises(TypeError):
        Objective()
