"""Whole Trainer runs: the numbers of one process, evaluation, checkpoints, repeated runs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from megatron.core import parallel_state

import reference
import trainers
from distributed import run_distributed
from lightning_dcp import DynamicCPModule, DynamicCPStrategy, Recompute, SyntheticDataModule
from lightning_dcp.engine import full_model_state
from lightning_dcp.loss import linear_cross_entropy
from lightning_dcp.parallel import cpu_mode_is_active
from lightning_dcp.planning import CPU, CostModel


def weights_of(module, trainer):
    """Whole weights as arrays, under the reference's names; {} except on rank 0."""
    state = full_model_state(module, trainer.strategy.context)
    return {name.removeprefix("model."): value.float().numpy() for name, value in state.items()}


class KeepsWeights(DynamicCPModule):
    """Remembers whole weights at the start and the end of training, and the losses between."""

    def on_train_start(self):
        self.start, self.losses = weights_of(self, self.trainer), []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(float(self.last_step.loss))

    def on_train_end(self):
        self.end = weights_of(self, self.trainer)


def keeping(**options):
    module = trainers.module(**options)
    return KeepsWeights(module.model_config, module.optimizer_settings, module.lr_schedule, seed=1)


def fit(tp: int, cap: int, **strategy):
    module = keeping()
    trainer = trainers.trainer(cap, {"tensor_model_parallel_size": tp, **strategy})
    trainer.fit(module, trainers.batches(3))
    assert trainer.global_step == 3
    return {"start": module.start, "end": module.end, "losses": module.losses}


@functools.cache
def expected():
    (single,) = run_distributed(fit, 1, 1, 256)
    batches = [
        trainers.random_batch(lengths, seed) for seed, lengths in enumerate(trainers.LENGTHS[:3])
    ]
    return reference.train(
        single["start"], trainers.CONFIG, batches, clip=0.5, **trainers.OPTIMIZER
    )


@pytest.mark.lightning("Trainer argument", "Trainer(accelerator=)", "works")
@pytest.mark.lightning("Trainer argument", "Trainer(devices=)", "works")
@pytest.mark.lightning("Trainer argument", "Trainer(strategy=)", "works")
@pytest.mark.parametrize(
    ("world", "tp", "cap", "strategy"),
    [
        (1, 1, 256, {}),
        (4, 1, 24, {}),
        (4, 2, 48, {}),
        (4, 1, 24, {"dynamic_context_parallel": False, "context_parallel_size": 4}),
        (2, 1, 48, {"use_distributed_optimizer": False, "overlap_grad_reduce": True}),
        (4, 1, 48, {"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True}),
        (4, 2, 96, {"pipeline_model_parallel_size": 2, "sequence_parallel": True}),
    ],
    ids=["1", "4", "4-tp2", "4-static", "2-unsharded", "4-pp2", "4-pp2-tp2-sp"],
)
def test_a_trainer_gives_the_numbers_of_one_process(world, tp, cap, strategy):
    results = run_distributed(fit, world, tp, cap, **strategy)
    wanted = expected()
    np.testing.assert_allclose(results[0]["losses"], wanted["losses"], rtol=1e-5)
    for name, weight in wanted["weights"].items():
        scale = np.abs(weight).max()
        np.testing.assert_allclose(results[0]["end"][name], weight, atol=1e-5 * scale, rtol=0)
    for other in results[1:]:
        assert other["losses"] == results[0]["losses"]


def validate_uneven():
    module = trainers.module()
    trainer = trainers.trainer(48)
    # 2 and 5 samples on 4 ranks: fewer samples than ranks, and a number they do not divide.
    made = [trainers.jagged(trainers.random_batch(trainers.LENGTHS[i], i)) for i in (3, 4)]
    data = trainers.Batches([], made)
    (metrics,) = trainer.validate(module, data, verbose=False)
    (tested,) = trainer.test(module, data, verbose=False)
    trainer.strategy.setup_environment()
    module.configure_model()
    state = weights_of(module, trainer)
    trainer.strategy.teardown()
    return {"val_loss": metrics["val_loss"], "test_loss": tested["test_loss"], "state": state}


def test_validation_weighs_batches_by_their_tokens():
    results = run_distributed(validate_uneven, 4)
    weights = {k: torch.tensor(v) for k, v in results[0]["state"].items()}
    losses = []
    for i in (3, 4):
        for ids in map(torch.tensor, trainers.random_batch(trainers.LENGTHS[i], i)):
            logits = reference.forward(weights, trainers.CONFIG, ids)[:-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"))
    wanted = float(torch.cat(losses).mean())
    for result in results:
        assert result["val_loss"] == pytest.approx(wanted, rel=1e-5)
        assert result["test_loss"] == pytest.approx(wanted, rel=1e-5)


def train_with_checkpoints(folder: str, resume: str | None, cap: int, tp: int, precision: str):
    module = keeping()
    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_epochs=1, save_top_k=-1)
    trainer = trainers.trainer(
        cap,
        {"tensor_model_parallel_size": tp},
        enable_checkpointing=True,
        callbacks=[checkpoint],
        precision=precision,
        max_epochs=2,
    )
    trainer.fit(module, trainers.batches(2), ckpt_path=resume)
    return {"end": module.end, "losses": module.losses, "steps": trainer.global_step}


@pytest.mark.parametrize(
    ("world", "tp", "cap", "precision"),
    [(2, 1, 48, "32-true"), (4, 2, 48, "32-true"), (2, 2, 96, "32-true"), (2, 1, 48, "bf16-mixed")],
)
def test_a_run_resumes_on_another_number_of_ranks(tmp_path, world, tp, cap, precision):
    first = run_distributed(train_with_checkpoints, 4, str(tmp_path / "a"), None, 24, 1, precision)[
        0
    ]
    resumed = run_distributed(
        train_with_checkpoints,
        world,
        str(tmp_path / "b"),
        str(tmp_path / "a" / "step=2.ckpt"),
        cap,
        tp,
        precision,
    )[0]
    assert resumed["steps"] == 4
    tolerance = 1e-5 if precision == "32-true" else 2e-2
    np.testing.assert_allclose(resumed["losses"], first["losses"][2:], rtol=tolerance)
    if precision == "32-true":
        for name, weight in first["end"].items():
            scale = np.abs(weight).max()
            np.testing.assert_allclose(resumed["end"][name], weight, atol=1e-5 * scale, rtol=0)


def resume_from_foreign(path: str):
    try:
        trainers.trainer(48).fit(trainers.module(), trainers.batches(1), ckpt_path=path)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "trained"


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "step=2.ckpt"
    run_distributed(train_with_checkpoints, 1, str(tmp_path), None, 256, 1, "32-true")
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["optimizer_states"] = [{"state": {}, "param_groups": []}]
    torch.save(checkpoint, path)
    for message in run_distributed(resume_from_foreign, 2, str(path)):
        assert "was not written by DynamicCPStrategy" in message


def run_several_times():
    module = trainers.module()
    trainer = trainers.trainer(48, max_epochs=1)
    data = trainers.batches(2, 2)
    outcomes = [trainer.validate(module, data, verbose=False)[0]["val_loss"]]
    for _ in range(2):
        trainer = trainers.trainer(48, max_epochs=1)
        trainer.fit(module, data)
        outcomes.append(trainer.validate(module, data, verbose=False)[0]["val_loss"])
        assert not cpu_mode_is_active()
        assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    return outcomes


def test_one_module_runs_again_and_again_and_leaves_nothing_on():
    results = run_distributed(run_several_times, 2)
    first, second, third = results[0]
    assert first > second > third
    assert results[1] == results[0]


def train_bf16():
    module = trainers.module()
    trainer = trainers.trainer(48, precision="bf16-mixed", max_epochs=4)
    losses = []
    module.on_train_batch_end = lambda *_: losses.append(float(module.last_step.loss))
    types = {}

    def look():
        masters = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        for name, tensors in (
            ("weights", list(module.parameters())),
            ("gradients", [p.main_grad for p in module.parameters()]),
            ("masters", masters),
        ):
            types[name] = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})

    module.on_train_start = look
    trainer.fit(module, trainers.batches(3))
    return losses, types


@pytest.mark.lightning("Trainer argument", "Trainer(precision=)", "works")
def test_bfloat16_trains_with_float32_masters_and_gradients():
    losses, types = run_distributed(train_bf16, 2)[0]
    assert types == {"weights": ["bfloat16"], "gradients": ["float32"], "masters": ["float32"]}
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(expected()["losses"][0], rel=2e-2)


class Weighted(DynamicCPModule):
    """A loss with a weight a sample and one a token, from the batch's extra keys."""

    def micro_batch_step(self, micro_batch):
        hidden, weight = self.hidden_states(micro_batch)
        losses = linear_cross_entropy(
            hidden, weight, micro_batch.labels, reduction="none", vocab_size=self.vocab_size
        )
        layout = micro_batch.layout
        of_sample = micro_batch.extras["sample_weight"][torch.from_numpy(layout.sequence_of_row)]
        return (losses * of_sample * micro_batch.extras["token_weight"]).sum(), (
            micro_batch.num_tokens
        )


def train_weighted(cap: int):
    batch = trainers.jagged(trainers.random_batch(trainers.LENGTHS[0], 0))
    offsets = batch["input_ids"].offsets()
    generator = torch.Generator().manual_seed(0)
    batch["sample_weight"] = torch.rand(len(offsets) - 1, generator=generator)
    batch["token_weight"] = torch.nested.nested_tensor_from_jagged(
        torch.rand(int(offsets[-1]), generator=generator), offsets
    )
    module = Weighted(trainers.CONFIG, seed=1)
    trainer = trainers.trainer(cap)
    trainer.fit(module, trainers.Batches([batch]))
    return float(module.last_step.loss)


def test_extras_reach_a_users_own_loss_in_every_layout():
    single = run_distributed(train_weighted, 1, 256)[0]
    four = run_distributed(train_weighted, 4, 24)[0]
    assert four == pytest.approx(single, rel=1e-5)
    assert abs(single - expected()["losses"][0]) > 0.1


def log_of_a_fit(folder: str):
    from lightning.pytorch.loggers import CSVLogger

    trainer = trainers.trainer(24, logger=CSVLogger(folder), log_every_n_steps=1)
    trainer.fit(trainers.module(), trainers.batches(3, 1))
    return trainer.global_step


def test_a_step_is_logged_once(tmp_path):
    run_distributed(log_of_a_fit, 4, str(tmp_path))
    (path,) = tmp_path.rglob("metrics.csv")
    header, *lines = path.read_text().splitlines()
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    steps = [row for row in rows if row["train_loss"]]
    wanted = [sum(n - 1 for n in lengths) for lengths in trainers.LENGTHS[:3]]
    assert [float(row["tokens"]) for row in steps] == wanted
    losses = [float(row["train_loss"]) for row in steps]
    np.testing.assert_allclose(losses, expected()["losses"], rtol=1e-5)
    assert all(float(row["grad_norm"]) > 0 for row in steps)
    assert {"micro_batches", "cp_size_min", "cp_size_max", "val_loss"} <= set(rows[0])
    # The share of the time that a step waited for its plan; the first has none before it.
    shares = [row["plan_wait_share"] for row in steps]
    assert shares[0] == ""
    assert all(0 <= float(share) <= 1 for share in shares[1:])
    assert sum(bool(row["val_loss"]) for row in rows) == 1


def fit_by_name():
    trainer = trainers.trainer(name="dynamic_cp")
    data = SyntheticDataModule(
        vocab_size=61, max_length=100, global_batch_size=4, num_batches=2, num_workers=0
    )
    trainer.fit(trainers.module(), data)
    return trainer.global_step, type(trainer.strategy).__name__


def test_the_registered_name_takes_its_cap_from_the_data():
    assert run_distributed(fit_by_name, 2)[0] == (2, "DynamicCPStrategy")


class WithExample(DynamicCPModule):
    @property
    def example_input_array(self):
        return trainers.jagged([[1, 2, 3]])["input_ids"]


def summarise():
    trainer = trainers.trainer(256, enable_model_summary=True)
    trainer.fit(WithExample(trainers.CONFIG), trainers.batches(1))
    return trainer.global_step


def test_a_jagged_example_input_does_not_crash_the_summary():
    assert run_distributed(summarise, 1) == [1]


def all_masked():
    batch = trainers.jagged([[1, 2, 3], [4]])
    offsets = batch["input_ids"].offsets()
    batch["loss_mask"] = torch.nested.nested_tensor_from_jagged(
        torch.zeros(4, dtype=torch.bool), offsets
    )
    module = keeping()
    trainers.trainer(48).fit(module, trainers.Batches([batch]))
    grads = sum(float(p.main_grad.abs().sum()) for p in module.parameters())
    return module.losses, grads


def test_a_batch_without_a_target_gives_zero_and_no_gradient():
    for losses, grads in run_distributed(all_masked, 2):
        assert losses == [0.0]
        assert grads == 0.0


@pytest.mark.lightning("Trainer argument", "Trainer(num_nodes=)", "works")
def test_nodes_multiply_the_world():
    trainer = Trainer(strategy=DynamicCPStrategy(8), accelerator="cpu", devices=4, num_nodes=2)
    assert trainer.world_size == 8
    assert trainer.strategy.parallel_sizes(trainer.world_size).world_size == 8


def test_strategy_needs_no_process_before_the_run_starts():
    trainer = Trainer(strategy=DynamicCPStrategy(max_seqlen_per_dp_cp_rank=8), devices=4)
    assert trainer.world_size == 4
    assert not dist.is_initialized()
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    for name, message in (
        ("context", "use it in configure_model and later hooks"),
        ("engine", "use it in the module's steps"),
        ("ddp", "wrapped for trainer.fit only"),
    ):
        with pytest.raises(RuntimeError, match=message):
            getattr(trainer.strategy, name)
    with pytest.raises(RuntimeError, match="configure_optimizers"):
        trainer.strategy.build_optimizer()


def test_a_run_that_was_not_calibrated_is_priced_by_its_own_sizes():
    full = Recompute(granularity="full")
    strategy = DynamicCPStrategy("auto", tensor_model_parallel_size=2, recompute=full)
    settings = strategy.plan_settings(
        strategy.parallel_sizes(8), trainers.CONFIG, device=CPU, max_length=100
    )
    assert settings.cost_model == CostModel.from_sizes(
        trainers.CONFIG.sizes, CPU, tp_size=2, recompute=True
    )
    # 100 tokens padded to a multiple of TP 2 x 2 x CP 4 are 112, of which a rank holds 28.
    assert (settings.num_ranks, settings.max_seqlen_per_dp_cp_rank) == (4, 28)
    measured = CostModel()
    given = strategy.plan_settings(
        strategy.parallel_sizes(8),
        trainers.CONFIG,
        device=CPU,
        max_length=100,
        cost_model=measured,
    )
    assert given.cost_model is measured


class FixedLosses(DynamicCPModule):
    """Every target of a sample has the loss that the batch gives the sample."""

    def micro_batch_step(self, micro_batch):
        hidden, _ = self.hidden_states(micro_batch)
        sample = torch.from_numpy(micro_batch.layout.sequence_of_row)
        losses = micro_batch.extras["loss"][sample][micro_batch.loss_mask]
        return losses.sum() + 0 * hidden.sum(), micro_batch.num_tokens


def mean_of_fixed_losses():
    batch = trainers.jagged(trainers.random_batch([2, 10], 0))
    batch["loss"] = torch.tensor([1.0, 3.0])
    module = FixedLosses(trainers.CONFIG)
    trainers.trainer(16).fit(module, trainers.Batches([batch]))
    return float(module.last_step.loss), int(module.last_step.num_tokens)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_loss_is_a_mean_of_targets_and_not_of_means(world):
    # One target of loss 1 and nine of loss 3: 2.8, and not 2.0; each counted once.
    for loss, num_tokens in run_distributed(mean_of_fixed_losses, world):
        assert loss == pytest.approx(2.8, rel=1e-6)
        assert num_tokens == 10


def one_valid_token(cap: int, cp: int):
    batch = trainers.jagged(trainers.random_batch([16], 0))
    mask = torch.zeros(16, dtype=torch.bool)
    mask[5] = True
    batch["loss_mask"] = torch.nested.nested_tensor_from_jagged(mask, batch["input_ids"].offsets())
    module = keeping()
    static = {"dynamic_context_parallel": False, "context_parallel_size": cp}
    # No clipping: a gradient that is halved or quartered must not be scaled back.
    trainer = trainers.trainer(cap, static, gradient_clip_val=None)
    norms = []
    module.on_train_batch_end = lambda *_: norms.append(trainer.optimizers[0].grad_norm)
    trainer.fit(module, trainers.Batches([batch]))
    return norms[0], int(module.last_step.num_tokens)


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallelism_does_not_divide_the_gradient(cp):
    ((wanted, _),) = run_distributed(one_valid_token, 1, 16, 1)
    for norm, num_tokens in run_distributed(one_valid_token, cp, 16, cp):
        assert norm == pytest.approx(wanted, rel=1e-5)
        assert num_tokens == 1
