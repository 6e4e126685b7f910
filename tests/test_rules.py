"""Every rule of what does not work together: its smallest case, and its line in the docs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.utilities import GradClipAlgorithmType

import lightning_dcp
from lightning_dcp import DPO, SFT, ModelConfig, MoEConfig, Recompute, ValueLoss
from lightning_dcp.config.padding import PackPadding
from lightning_dcp.config.parallel import ParallelSizes
from lightning_dcp.rules import RULES, as_table, refuse

DOCS = Path(__file__).parents[1] / "docs" / "features.md"
DENSE, EXPERTS = ModelConfig(), ModelConfig(moe=MoEConfig())
PLAIN_TRAINER = {
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
    "strategy": SimpleNamespace(),
    "datamodule": None,
}


class Subclassed(lightning_dcp.WeightAveraging):
    """As a user's own, with another ``should_update``."""


class OwnBackward(LightningModule):
    def backward(self, loss):
        loss.backward()


def trainer(**options):
    return SimpleNamespace(**{**PLAIN_TRAINER, **options})


FUSED = ModelConfig(moe=MoEConfig(router_fusion=True))
MTP = ModelConfig(mtp_num_layers=1)
BY_VALUE = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": GradClipAlgorithmType.VALUE}
COMPILED = torch.nn.Sequential(torch.nn.Linear(1, 1))
COMPILED[0].compile()


def data_of(max_length, planner="balanced", **options):
    """A cap on four ranks beside data of this length."""
    cap = 512 if planner == "static" else 1024
    facts = {"cap": cap, "padding": PackPadding(), "sizes": ParallelSizes(world_size=4)}
    datamodule = SimpleNamespace(max_length=max_length)
    return facts | {"datamodule": datamodule, "planner": planner} | options


CASES = [
    ({"dynamic": False, "planner": "balanced"}, "planner='balanced' chooses CP sizes"),
    ({"model": DENSE, "objective": ValueLoss()}, "ValueLoss needs a model with head='value'"),
    ({"model": MTP, "objective": DPO()}, "weighs its losses by target tokens, and DPO counts pair"),
    (
        {"model": ModelConfig(moe=MoEConfig(z_loss_coeff=0.1)), "objective": DPO()},
        "moe.z_loss_coeff=0.1 is weighed by target tokens, and DPO counts pairs",
    ),
    (
        {"model": DENSE, "recompute": Recompute(granularity="selective", modules=("moe",))},
        r"recompute.modules=\['moe'\] names parts of experts",
    ),
    ({"fp8": "hybrid", "on_gpu": False}, "needs a GPU and TransformerEngine"),
    ({"fp8": "hybrid", "precision": "32-true"}, "precision='32-true'"),
    ({"model": FUSED, "on_gpu": False}, "moe.router_fusion=True needs"),
    (
        {"objective": DPO(), "planner": "megatron"},
        "planner='megatron' cannot keep samples together",
    ),
    ({"trainer": trainer(accumulate_grad_batches=2)}, "accumulate_grad_batches=2"),
    ({"trainer": trainer(**BY_VALUE)}, "gradient_clip_algorithm='value'"),
    (
        {"trainer": trainer(strategy=SimpleNamespace(_layer_sync=object()))},
        "sync_batchnorm=True",
    ),
    ({"module": SimpleNamespace(automatic_optimization=False)}, "automatic_optimization=False"),
    (
        {"module": SimpleNamespace(automatic_optimization=True, model=COMPILED)},
        "SimpleNamespace.model.0 was given to torch.compile",
    ),
    (
        {
            "trainer": trainer(datamodule=SimpleNamespace(vocab_size=300)),
            "module": SimpleNamespace(automatic_optimization=True, vocab_size=257),
        },
        "vocabulary of 300 ids, the model one of 257",
    ),
    (data_of(4097), "up to 4097 tokens .* on 4 ranks holds 4096 at most. Raise .* to 1026"),
    (data_of(513, planner="static"), "on 1 ranks holds 512 at most. Raise .* to 513"),
    (
        data_of(2049, padding=PackPadding(pad_to_length=512)),
        "pad_to_length=512 on 4 ranks holds 2048 at most. Raise pad_to_length to 514",
    ),
    ({"module": OwnBackward()}, "OwnBackward.backward would never be called"),
    *(
        ({"callbacks": [callback]}, f"^{message}")
        for callback, message in (
            (StochasticWeightAveraging(swa_lrs=0.1), "StochasticWeightAveraging does not work"),
            (
                EMAWeightAveraging(),
                "EMAWeightAveraging does not work .* Use the class of the same name",
            ),
            (BaseFinetuning(), "BaseFinetuning does not work .* in on_fit_start"),
            (GradientAccumulationScheduler({0: 2}), "GradientAccumulationScheduler does not work"),
            (BatchSizeFinder(), "BatchSizeFinder does not work .* finds a cap"),
            (ModelPruning("l1_unstructured"), "ModelPruning does not work"),
            (ThroughputMonitor(len), "ThroughputMonitor does not work .* lightning_dcp.Thr"),
        )
    ),
]
# Of Lightning: the rows that they are in the table of docs/features.md.
REFUSED = {
    "accumulate_grad_batches=2": [("Trainer argument", "Trainer(accumulate_grad_batches=)")],
    "gradient_clip_algorithm='value'": [
        ("Trainer argument", "Trainer(gradient_clip_algorithm='value')")
    ],
    "sync_batchnorm=True": [("Trainer argument", "Trainer(sync_batchnorm=)")],
    "OwnBackward.backward would never be called": [("hook", "LightningModule.backward")],
    **{
        f"^{name} does": [("callback", name)]
        for name in (
            "StochasticWeightAveraging",
            "GradientAccumulationScheduler",
            "BatchSizeFinder",
            "ModelPruning",
            "ThroughputMonitor",
        )
    },
    "^EMAWeightAveraging does": [
        ("callback", "WeightAveraging"),
        ("callback", "EMAWeightAveraging"),
    ],
    "^BaseFinetuning does": [("callback", "BaseFinetuning"), ("callback", "BackboneFinetuning")],
}


def marked(facts, message):
    rows = next((rows for start, rows in REFUSED.items() if message.startswith(start)), [])
    marks = [pytest.mark.lightning(*row, "refused") for row in rows]
    return pytest.param(facts, message, marks=marks, id=message[:40])


@pytest.mark.parametrize(("facts", "message"), [marked(*case) for case in CASES])
def test_each_rule_refuses_its_smallest_case(facts, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        refuse(**facts)


def breaks(rule, facts):
    try:
        rule.check(**{name: facts[name] for name in rule.facts})
    except (ValueError, NotImplementedError):
        return True
    return False


def test_every_rule_has_a_case_and_no_case_breaks_two():
    broken = [
        [rule for rule in RULES if rule.facts <= facts.keys() and breaks(rule, facts)]
        for facts, _ in CASES
    ]
    assert all(len(rules) == 1 for rules in broken)
    assert {id(rule) for (rule,) in broken} == {id(rule) for rule in RULES}


@pytest.mark.parametrize("callback", [WeightAveraging(), BackboneFinetuning()])
def test_callbacks_of_one_family_are_refused_alike(callback):
    with pytest.raises(NotImplementedError, match=f"^{type(callback).__name__} does not work"):
        refuse(callbacks=[callback])


@pytest.mark.parametrize(
    "cls", [lightning_dcp.EMAWeightAveraging, lightning_dcp.WeightAveraging, Subclassed]
)
def test_ours_are_not_refused(cls):
    refuse(callbacks=[cls(), lightning_dcp.ThroughputMonitor()])


def test_what_is_not_known_yet_is_not_refused():
    refuse()
    refuse(fp8="hybrid")
    refuse(
        model=EXPERTS,
        objective=SFT(),
        recompute=Recompute(),
        on_gpu=False,
        fp8=None,
        precision="32-true",
        dynamic=True,
        planner="balanced",
        trainer=trainer(),
        module=SimpleNamespace(automatic_optimization=True, vocab_size=257),
    )


def test_the_docs_have_the_table_of_rules():
    printed = DOCS.read_text().split("<!-- rules -->\n")[1].split("\n<!-- end of rules -->")[0]
    assert printed == as_table(), "print lightning_dcp.rules.as_table() into docs/features.md"
