"""Bad input gets a clear error on every rank, before work starts or at the batch; never a hang."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.compile import from_compiled

import trainers
from distributed import run_distributed
from lightning_dcp import DynamicCPModule, DynamicCPStrategy


def message_of(function, *args, **kwargs):
    """The error that ``function`` ends with, as `Type: text`."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fit_with(strategy, trainer_options, module=None, batch=None):
    trainer = trainers.trainer(48, strategy, **trainer_options)
    data = trainers.batches(2) if batch is None else trainers.Batches([batch])
    return message_of(trainer.fit, module or trainers.module(), data)


def refused(strategy=None, trainer_options=None, world=2):
    """The message, after a check that every rank gives the same one."""
    messages = run_distributed(fit_with, world, strategy or {}, trainer_options or {})
    assert len(set(messages)) == 1
    return messages[0]


@pytest.mark.parametrize(
    ("cap", "error", "found"),
    [
        (None, ValueError, "needs max_seqlen_per_dp_cp_rank"),
        (0, ValueError, "=0 must be 1 or more"),
        (-4096, ValueError, "=-4096 must be 1 or more"),
        ("4096", TypeError, "found '4096'"),
        (True, TypeError, "found True"),
    ],
)
def test_a_cap_that_is_missing_or_no_positive_int(cap, error, found):
    with pytest.raises(error, match="max_seqlen_per_dp_cp_rank") as caught:
        DynamicCPStrategy(max_seqlen_per_dp_cp_rank=cap)
    assert found in str(caught.value)


@pytest.mark.parametrize("name", ["pad_to_length", "pad_to_length_bucket"])
@pytest.mark.parametrize(
    ("value", "error", "found"),
    [
        (0, ValueError, "=0 must be 1 or more"),
        (-512, ValueError, "=-512 must be 1 or more"),
        (4097, ValueError, "=4097 is larger than max_seqlen_per_dp_cp_rank=4096"),
        (512.0, TypeError, "=512.0 is a float"),
        (True, TypeError, "=True is a bool"),
    ],
)
def test_lengths_to_pad_to_that_cannot_work(name, value, error, found):
    with pytest.raises(error, match=name + found):
        DynamicCPStrategy(max_seqlen_per_dp_cp_rank=4096, **{name: value})


def test_two_lengths_to_pad_to():
    with pytest.raises(ValueError, match=r"pad_to_length=8 .* pad_to_length_bucket=4: leave one"):
        DynamicCPStrategy(8, pad_to_length=8, pad_to_length_bucket=4)


def test_a_bucket_that_is_larger_than_the_cap_on_a_whole_pool():
    message = refused({"pad_to_length_bucket": 47})
    assert "pad_to_length_bucket=47 with tp_size=1, CP sizes up to 2 pads the rows" in message
    assert "to a multiple of 94, over max_seqlen_per_dp_cp_rank=48" in message


def test_a_length_to_pad_to_that_a_pool_cannot_cut():
    assert "pad_to_length=47 is no multiple of 2" in refused({"pad_to_length": 47})


def test_a_planner_beside_static_context_parallelism():
    with pytest.raises(ValueError, match="dynamic_context_parallel=False"):
        DynamicCPStrategy(8, planner="balanced", dynamic_context_parallel=False)


def test_a_world_that_tensor_parallelism_does_not_divide():
    message = refused({"tensor_model_parallel_size": 2}, world=3)
    assert message.startswith("ValueError: The world size 3 is not a multiple of")
    assert "devices" in message


def test_a_context_parallel_size_that_does_not_divide_the_pool():
    message = refused({"context_parallel_size": 2}, world=3)
    assert "pool of 3 ranks" in message
    assert "context_parallel_size=2" in message


def test_heads_that_tensor_parallelism_does_not_divide():
    message = refused({"tensor_model_parallel_size": 3}, world=3)
    assert message == (
        "ValueError: tensor_model_parallel_size=3 does not divide num_attention_heads=4."
    )


@pytest.mark.parametrize(
    ("strategy", "options", "found"),
    [
        ({}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({}, {"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='value'"),
        ({"virtual_pipeline_model_parallel_size": 2}, {}, "virtual_pipeline_model_parallel_size=2"),
        ({"expert_model_parallel_size": 2}, {}, "expert_model_parallel_size=2"),
        ({}, {"sync_batchnorm": True}, "sync_batchnorm"),
    ],
)
def test_options_that_cannot_be_honoured(strategy, options, found):
    message = refused(strategy, options)
    assert found in message
    assert message != "no error"


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_precisions_that_are_not_there(precision):
    with pytest.raises(NotImplementedError, match="bf16-mixed"):
        Trainer(accelerator="cpu", devices=1, strategy=DynamicCPStrategy(8), precision=precision)


def refused_modules():
    class Plain(LightningModule):
        pass

    class Manual(DynamicCPModule):
        @property
        def automatic_optimization(self):
            return False

    class Two(DynamicCPModule):
        def configure_optimizers(self):
            return [self.trainer.strategy.build_optimizer() for _ in range(2)]

    class Torch(DynamicCPModule):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    class NoTuple(DynamicCPModule):
        def micro_batch_step(self, micro_batch):
            return super().micro_batch_step(micro_batch)[0]

    class NoScalar(DynamicCPModule):
        def micro_batch_step(self, micro_batch):
            loss, num_tokens = super().micro_batch_step(micro_batch)
            return loss.expand(2), num_tokens

    class Detached(DynamicCPModule):
        def micro_batch_step(self, micro_batch):
            loss, num_tokens = super().micro_batch_step(micro_batch)
            return loss.detach(), num_tokens

    modules = {
        "plain": Plain(),
        **{
            kind.__name__: kind(trainers.CONFIG)
            for kind in (Manual, Two, Torch, NoTuple, NoScalar, Detached)
        },
    }
    return {
        name: fit_with({}, {"gradient_clip_val": None}, module) for name, module in modules.items()
    }


def test_modules_that_cannot_be_trained():
    results = run_distributed(refused_modules, 2)
    assert results[0] == results[1]
    found = results[0]
    assert "DynamicCPStrategy runs a DynamicCPModule, found Plain" in found["plain"]
    assert "automatic_optimization=False" in found["Manual"]
    assert "exactly one optimizer" in found["Two"]
    assert "build_optimizer" in found["Torch"]
    assert "must return (loss sum, number of target tokens)" in found["NoTuple"]
    assert "must be a scalar" in found["NoScalar"]
    assert "does not depend on the model" in found["Detached"]


def bad_batches():
    ids = trainers.jagged([[1, 2, 3], [4, 5]])["input_ids"]
    wrong = {
        "too long": trainers.jagged([[1] * 5, [1] * 97]),
        "empty sequence": trainers.jagged([[1, 2], []]),
        "no sequence": {
            "input_ids": torch.nested.nested_tensor_from_jagged(
                torch.empty(0, dtype=torch.int64), offsets=torch.tensor([0])
            )
        },
        "vocabulary": trainers.jagged([[1, 2], [3, 61]]),
        "dense": {"input_ids": torch.ones(2, 3, dtype=torch.int64)},
        "extra": {"input_ids": ids, "advantages": torch.zeros(3)},
        "list": [[1, 2, 3]],
    }
    return {name: fit_with({}, {}, batch=batch) for name, batch in wrong.items()}


def test_batches_that_cannot_be_trained_on():
    results = run_distributed(bad_batches, 2)
    assert results[0] == results[1]
    found = results[0]
    assert "sample 1 has length 97, but at most 96 tokens fit 2" in found["too long"]
    assert "max_seqlen_per_dp_cp_rank" in found["too long"]
    assert "Sample 1 of the batch is empty" in found["empty sequence"]
    assert "batch is empty" in found["no sequence"]
    assert "'input_ids' of sample 1 holds id 61 at position 1" in found["vocabulary"]
    assert "must be a jagged NestedTensor" in found["dense"]
    assert "'advantages'" in found["extra"]
    assert "must be a dict" in found["list"]


def one_rank_is_wrong():
    rank = dist.get_rank()
    different = trainers.jagged([[1, 2, 3], [4, 5]] if rank == 0 else [[1, 2], [3, 4, 5]])
    refused_by_one = trainers.jagged([[1, 2], [3, 99 if rank == 2 else 4]])
    return {
        "different": fit_with({}, {}, batch=different),
        "refused": fit_with({}, {}, batch=refused_by_one),
    }


def test_an_error_of_one_rank_is_an_error_of_all():
    results = run_distributed(one_rank_is_wrong, 3)
    for rank, found in enumerate(results):
        assert "The ranks hold different global batches" in found["different"]
        assert "'input_ids' of ranks 1, 2 is not that of rank 0" in found["different"]
        assert "holds id 99" in found["refused"]
        assert ("Rank 2 refused its batch" in found["refused"]) == (rank != 2)


class SmallVocabulary(trainers.Batches):
    vocab_size = 300


def vocabulary_of_the_data():
    data = SmallVocabulary([trainers.jagged([[1, 2]])])
    return message_of(trainers.trainer(48).fit, trainers.module(), data)


def test_a_tokenizer_that_is_too_large_for_the_model():
    for message in run_distributed(vocabulary_of_the_data, 2):
        assert "Set the model's vocab_size to 300" in message


def auto_without_length():
    return message_of(
        trainers.trainer(name="dynamic_cp").fit, trainers.module(), trainers.batches(1)
    )


def test_an_automatic_cap_without_a_longest_sequence():
    for message in run_distributed(auto_without_length, 2):
        assert "max_seqlen_per_dp_cp_rank='auto'" in message


def foreign_strategy():
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False
    )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    return message_of(trainer.fit, trainers.module(), trainers.batches(1))


def test_another_strategy_is_named():
    assert "needs Trainer(strategy=DynamicCPStrategy" in run_distributed(foreign_strategy, 1)[0]


def test_a_compiled_module_is_refused():
    # Lightning itself lets such modules pass to any DDPStrategy, which ours derives from.
    module = from_compiled(torch.compile(trainers.module()))
    with pytest.raises(NotImplementedError, match=r"torch\.compile made: give the module itself"):
        trainers.trainer(devices=1).fit(module)
