"""What does not work together: a function each, registered with the line it has in the docs.

A rule names the facts that it looks at as its parameters. :func:`refuse` gets the facts that its
caller has and applies the rules that need no others: when the strategy or the module is made,
before processes are started, and when the Trainer sets up. What a part refuses by itself (sizes,
batches) is no rule. ``docs/features.md`` has the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.utilities import GradClipAlgorithmType

from lightning_dcp.config.model import ModelConfig, Recompute
from lightning_dcp.config.padding import Cap, PackPadding, longest_that_fits, rows_per_rank
from lightning_dcp.config.parallel import ParallelSizes
from lightning_dcp.objectives import Objective

Check = Callable[..., None]


@dataclass(frozen=True)
class Rule:
    """Two things that do not work together.

    Attributes:
        feature: The one.
        other: The other.
        instead: Why, or what to do instead, in a few words; for the table.
        check: Raises if a run has both.
        facts: Names of what ``check`` looks at.
    """

    feature: str
    other: str
    instead: str
    check: Check
    facts: frozenset[str]


RULES: list[Rule] = []


def rule(feature: str, other: str, *, instead: str) -> Callable[[Check], Check]:
    """Registers a function that raises where a run has both of two things."""

    def register(check: Check) -> Check:
        facts = frozenset(inspect.signature(check).parameters)
        RULES.append(Rule(feature, other, instead, check, facts))
        return check

    return register


def refuse(**facts: Any) -> None:
    """Raises the error of the first rule that is broken, of those that need no other facts.

    Args:
        facts: What is known, under the names of the rules' parameters.

    Raises:
        ValueError: Options that contradict each other.
        NotImplementedError: Something that this package does not do.
    """
    for each in RULES:
        if each.facts <= facts.keys():
            each.check(**{name: facts[name] for name in each.facts})


def as_table() -> str:
    """The rules as rows of a Markdown table."""
    rows = [f"| {rule.feature} | {rule.other} | {rule.instead} |" for rule in RULES]
    return "\n".join(["| this | does not work with | instead |", "|---|---|---|", *rows])


# -- of the strategy alone ------------------------------------------------------------------------


@rule("`dynamic_context_parallel=False`", "a planner other than `static`", instead="one of the two")
def _planner_of_static(dynamic: bool, planner: str | None) -> None:
    if not dynamic and planner not in (None, "static"):
        raise ValueError(
            f"planner={planner!r} chooses CP sizes, but dynamic_context_parallel=False asks for "
            "one size. Leave one of the two out."
        )


# -- of the module alone --------------------------------------------------------------------------


@rule("an objective", "a model with another `head`", instead="the head it names")
def _head_of_objective(model: ModelConfig, objective: Objective) -> None:
    if objective.head != model.head:
        raise ValueError(
            f"{type(objective).__name__} needs a model with head={objective.head!r}, found "
            f"ModelConfig(head={model.head!r})."
        )


@rule(
    "multi-token prediction",
    "an objective that counts something else than tokens (DPO, a masked value loss)",
    instead="`mtp_num_layers=0`",
)
def _mtp_of_objective(model: ModelConfig, objective: Objective) -> None:
    if model.mtp_num_layers and not _counts_tokens(objective):
        raise ValueError(
            f"ModelConfig(mtp_num_layers={model.mtp_num_layers}) weighs its losses by target "
            f"tokens, and {type(objective).__name__} counts {objective.counts} of its own. Set "
            "mtp_num_layers=0."
        )


@rule(
    "router losses",
    "an objective that counts something else than tokens",
    instead="`moe.expert_bias`",
)
def _router_losses_of_objective(model: ModelConfig, objective: Objective) -> None:
    names = ("aux_loss_coeff", "seq_aux_loss_coeff", "z_loss_coeff")
    # 0 of a dense model, whose `moe` is None.
    used = [name for name in names if getattr(model.moe, name, 0)]
    if used and not _counts_tokens(objective):
        raise ValueError(
            f"moe.{used[0]}={getattr(model.moe, used[0])} is weighed by target tokens, and "
            f"{type(objective).__name__} counts {objective.counts} of its own. Set it to 0; "
            "moe.expert_bias balances without a loss."
        )


def _counts_tokens(objective: Objective) -> bool:
    # An override may count anything: of the base's alone it is known.
    return type(objective).count is Objective.count


# -- of the strategy, the module and the device ---------------------------------------------------


@rule("recomputation of `moe`, `moe_act`, `shared_experts`", "a dense model", instead="`mlp`")
def _experts_recomputed(model: ModelConfig, recompute: Recompute) -> None:
    experts = sorted({"moe", "moe_act", "shared_experts"} & set(recompute.modules))
    if experts and model.moe is None:
        raise ValueError(
            f"recompute.modules={experts} names parts of experts, and the model has none (moe="
            "None). Leave them out; 'mlp' recomputes a dense MLP."
        )


@rule("FP8", "the CPU", instead="a GPU with TransformerEngine")
def _fp8_on_cpu(fp8: str | None, on_gpu: bool) -> None:
    if fp8 is not None and not on_gpu:
        raise NotImplementedError(
            "DynamicCPStrategy(fp8=...) needs a GPU and TransformerEngine, and this run computes "
            "on the CPU. Leave fp8 out here; pad_to_length_bucket works on the CPU too."
        )


@rule("FP8", "float32 weights", instead="`precision='bf16-mixed'`")
def _fp8_in_float32(fp8: str | None, precision: str) -> None:
    if fp8 is not None and not precision.startswith("bf16"):
        raise ValueError(
            f"DynamicCPStrategy(fp8=...) is for bfloat16 weights, found Trainer(precision="
            f"{precision!r}). Use precision='bf16-mixed'."
        )


@rule("`moe.router_fusion`", "the CPU", instead="a GPU with TransformerEngine")
def _fused_router_on_cpu(model: ModelConfig, on_gpu: bool) -> None:
    if model.moe is not None and model.moe.router_fusion and not on_gpu:
        raise NotImplementedError(
            "moe.router_fusion=True needs TransformerEngine's kernels on a GPU, and this run "
            "computes on the CPU. Set it to False here."
        )


@rule("samples that stay together (DPO)", "`planner='megatron'`", instead="`balanced`")
def _units_of_megatron(objective: Objective, planner: str | None) -> None:
    if objective.keep_together is not None and planner == "megatron":
        raise ValueError(
            f"planner='megatron' cannot keep samples together, as {type(objective).__name__} "
            "needs: Megatron-Core's scheduler places every sequence by itself. Use 'balanced'."
        )


# -- of the Trainer -------------------------------------------------------------------------------


@rule(
    "`Trainer(accumulate_grad_batches=...)`",
    "this strategy",
    instead="a larger `global_batch_size`",
)
def _accumulation(trainer: Trainer) -> None:
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) does not work "
            "with DynamicCPStrategy: micro-batches are planned inside one global batch, and their "
            "gradients add up there. Leave it at 1 and raise the DataModule's global_batch_size."
        )


@rule("`Trainer(gradient_clip_algorithm='value')`", "this strategy", instead="`'norm'`")
def _clipping_by_value(trainer: Trainer) -> None:
    by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    if trainer.gradient_clip_val is not None and by_value:
        raise ValueError(
            "Trainer(gradient_clip_algorithm='value') does not work with DynamicCPStrategy, whose "
            "optimizer clips by the global norm. Leave it out, or use 'norm'."
        )


@rule("`Trainer(sync_batchnorm=True)`", "this strategy", instead="nothing: there is no batch norm")
def _synced_batch_norm(trainer: Trainer) -> None:
    # The Trainer keeps no `sync_batchnorm`: this is where it puts what comes of it.
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise NotImplementedError(
            "Trainer(sync_batchnorm=True) does not work with DynamicCPStrategy: leave it out."
        )


@rule("manual optimization", "this strategy", instead="automatic optimization")
def _manual_optimization(module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise NotImplementedError(
            f"{type(module).__name__} sets automatic_optimization=False. DynamicCPStrategy runs "
            "forward, backward and the optimizer step itself; leave it True."
        )


@rule(
    "`backward` of one's own",
    "this strategy",
    instead="`micro_batch_step`, or gradients in `on_before_optimizer_step`",
)
def _own_backward(module: LightningModule) -> None:
    own = getattr(type(module), "backward", LightningModule.backward)
    if own is not LightningModule.backward:
        raise NotImplementedError(
            f"{type(module).__name__}.backward would never be called: the engine runs a backward "
            "pass for each micro-batch. Change the loss in micro_batch_step, or gradients in "
            "on_before_optimizer_step."
        )


@rule("`torch.compile` of a module", "this strategy", instead="nothing: kernels are fused already")
def _compiled_parts(module: LightningModule) -> None:
    model = getattr(module, "model", None)
    for name, part in () if model is None else model.named_modules(prefix="model"):
        # The one is what torch.compile(part) gives, the other what part.compile() sets.
        if hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None:
            raise NotImplementedError(
                f"{type(module).__name__}.{name} was given to torch.compile, which does not work "
                "with DynamicCPStrategy: hooks put another CP group into the model for each "
                "micro-batch, and weights get other names. Leave it out."
            )


@rule("a tokenizer", "a smaller vocabulary of the model", instead="`vocab_size` of the model")
def _vocabulary_of_data(trainer: Trainer, module: LightningModule) -> None:
    datamodule = getattr(trainer, "datamodule", None)
    of_data = getattr(datamodule, "vocab_size", None)
    of_model = getattr(module, "vocab_size", None)
    # Not every DataModule has one, nor has a module that leaves ids unchecked.
    if isinstance(of_data, int) and isinstance(of_model, int) and of_data > of_model:
        raise ValueError(
            f"{type(datamodule).__name__} has a vocabulary of {of_data} ids, the model one of "
            f"{of_model}. Set the model's vocab_size to {of_data}."
        )


@rule("a cap", "a longer `max_length` of the data", instead="a cap that holds it, or more devices")
def _cap_of_data(
    datamodule: LightningDataModule | None,
    cap: Cap,
    padding: PackPadding,
    sizes: ParallelSizes,
    planner: str,
) -> None:
    longest = getattr(datamodule, "longest_sample", getattr(datamodule, "max_length", None))
    # "auto" follows from the length, and not every DataModule knows it before it has read its data.
    if cap == "auto" or not isinstance(longest, int):
        return
    size = sizes.context_parallel_size if planner == "static" else sizes.dp_cp_size
    tp_size = sizes.tensor_model_parallel_size
    fits = longest_that_fits(cap, size, tp_size, padding)
    if longest > fits:
        option, value = "max_seqlen_per_dp_cp_rank", cap
        if padding.pad_to_length is not None:
            option, value = "pad_to_length", padding.pad_to_length
        align = padding.pack_alignment(size, tp_size)
        needed = -(-rows_per_rank(longest, size, tp_size, padding) // align) * align
        raise ValueError(
            f"{type(datamodule).__name__} has sequences of up to {longest} tokens (max_length); "
            f"{option}={value} on {size} ranks holds {fits} at most. Raise {option} to {needed}, "
            f"use more ranks, or lower max_length to {fits}."
        )


# -- of callbacks ---------------------------------------------------------------------------------


def _refuse_callback(callbacks: list[Callback], kind: type[Callback], instead: str) -> None:
    for callback in callbacks:
        # Ours are subclasses of Lightning's, and a user's may be of ours.
        is_ours = any(base.__module__.startswith("lightning_dcp.") for base in type(callback).mro())
        if isinstance(callback, kind) and not is_ours:
            raise NotImplementedError(
                f"{type(callback).__name__} does not work with DynamicCPStrategy: {instead}."
            )


@rule(
    "`StochasticWeightAveraging`",
    "this strategy",
    instead="`lightning_dcp.WeightAveraging`",
)
def _stochastic_weight_averaging(callbacks: list[Callback]) -> None:
    _refuse_callback(
        callbacks,
        StochasticWeightAveraging,
        "it would average nothing. Use lightning_dcp.WeightAveraging, and LRSchedule for the rate",
    )


@rule(
    "Lightning's `WeightAveraging`, `EMAWeightAveraging`",
    "this strategy",
    instead="`lightning_dcp.WeightAveraging`, `lightning_dcp.EMAWeightAveraging`",
)
def _weight_averaging(callbacks: list[Callback]) -> None:
    _refuse_callback(
        callbacks,
        WeightAveraging,
        "it copies the module, whose weights are shared among the ranks. Use the class of the "
        "same name in lightning_dcp, which has the same arguments and hooks",
    )


@rule(
    "`BaseFinetuning`, `BackboneFinetuning`",
    "this strategy",
    instead="`requires_grad_` in `on_fit_start` and later hooks",
)
def _finetuning(callbacks: list[Callback]) -> None:
    _refuse_callback(
        callbacks,
        BaseFinetuning,
        "it looks for the model before there is one, and regroups the optimizer's parameters, "
        "which Megatron-Core lays out once. In a callback of your own freeze with "
        "pl_module.model...requires_grad_(False) in on_fit_start, and let go with "
        "requires_grad_(True) in on_train_epoch_start",
    )


@rule(
    "`GradientAccumulationScheduler`",
    "this strategy",
    instead="a larger `global_batch_size`",
)
def _accumulation_scheduler(callbacks: list[Callback]) -> None:
    _refuse_callback(
        callbacks,
        GradientAccumulationScheduler,
        "micro-batches are planned inside one global batch. Raise the DataModule's "
        "global_batch_size",
    )


@rule("`BatchSizeFinder`", "this strategy", instead="`lightning-dcp plan --suggest`")
def _batch_size_finder(callbacks: list[Callback]) -> None:
    _refuse_callback(
        callbacks,
        BatchSizeFinder,
        "memory depends on max_seqlen_per_dp_cp_rank, and not on the batch size. "
        "`lightning-dcp plan --suggest` finds a cap",
    )


@rule("`ModelPruning`", "this strategy", instead="pruning before or after the training")
def _pruning(callbacks: list[Callback]) -> None:
    _refuse_callback(
        callbacks,
        ModelPruning,
        "it replaces weights that Megatron-Core has laid out in buffers",
    )


@rule(
    "Lightning's `ThroughputMonitor`", "this strategy", instead="`lightning_dcp.ThroughputMonitor`"
)
def _throughput(callbacks: list[Callback]) -> None:
    _refuse_callback(
        callbacks,
        ThroughputMonitor,
        "every rank has the whole global batch, and it would count each once. Use "
        "lightning_dcp.ThroughputMonitor",
    )
