"""What does not work together: one table of rules, and one function that applies them.

:func:`refuse` gets all that is known of a run, and is called again whenever more is known: when the
strategy is made, when the number of processes is known, when the model and the Trainer are, and at
each batch. A rule applies as soon as it has what it looks at. ``docs/features.md`` has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType

from lightning_dcp.config.model import check_mtp_recompute
from lightning_dcp.config.padding import PackPadding
from lightning_dcp.model import ModelConfig, Recompute, RouteShape, check_routes
from lightning_dcp.objectives import Objective
from lightning_dcp.packing import GlobalBatch
from lightning_dcp.parallel import ParallelSizes


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run so far; None is not known yet.

    Attributes:
        sizes: The parallel sizes.
        model: The model's sizes.
        objective: What is trained for.
        recompute: What the backward pass computes again.
        padding: How packs are padded.
        planner: As the user gave it.
        dynamic: Whether CP sizes are chosen.
        fp8: Whether matrix products run in eight bits.
        precision: The Trainer's.
        on_gpu: Whether a GPU computes.
        trainer: The Trainer.
        module: The LightningModule.
        batch: A global batch.
    """

    sizes: ParallelSizes | None = None
    model: ModelConfig | None = None
    objective: Objective | None = None
    recompute: Recompute | None = None
    padding: PackPadding | None = None
    planner: str | None = None
    dynamic: bool | None = None
    fp8: bool | None = None
    precision: str | None = None
    on_gpu: bool | None = None
    trainer: Trainer | None = None
    module: LightningModule | None = None
    batch: GlobalBatch | None = None


@dataclass(frozen=True)
class Rule:
    """Two things that do not work together.

    Attributes:
        feature: The one.
        other: The other.
        instead: Why, or what to do instead, in a few words; for the table.
        find: The whole message if a run has both, else None.
        error: The type of the error.
    """

    feature: str
    other: str
    instead: str
    find: Callable[[Run], str | None]
    error: type[Exception] = ValueError


def refuse(run: Run) -> None:
    """Raises the error of the first rule that a run breaks.

    Args:
        run: What is known of it.

    Raises:
        ValueError: Options that contradict each other.
        NotImplementedError: Something that this package does not do.
    """
    for rule in RULES:
        message = rule.find(run)
        if message is not None:
            raise rule.error(message)


def as_table() -> str:
    """The rules as rows of a Markdown table."""
    rows = [f"| {rule.feature} | {rule.other} | {rule.instead} |" for rule in RULES]
    return "\n".join(["| this | does not work with | instead |", "|---|---|---|", *rows])


def _planner_of_static(run: Run) -> str | None:
    if run.dynamic is not False or run.planner in (None, "static"):
        return None
    return (
        f"planner={run.planner!r} chooses CP sizes, but dynamic_context_parallel=False asks for "
        "one size. Leave one of the two out."
    )


def _sizes_of_model(run: Run) -> str | None:
    if run.model is None or run.sizes is None:
        return None
    try:
        run.model.check_parallel(run.sizes)
    except ValueError as error:
        return str(error)
    return None


def _experts_recomputed(run: Run) -> str | None:
    modules = run.recompute.modules if run.recompute is not None else ()
    experts = sorted({"moe", "moe_act", "shared_experts"} & set(modules))
    if run.model is None or run.model.moe is not None or not experts:
        return None
    return (
        f"recompute.modules={experts} names parts of experts, and the model has none (moe=None). "
        "Leave them out; 'mlp' recomputes a dense MLP."
    )


def _fp8_on_cpu(run: Run) -> str | None:
    if not run.fp8 or run.on_gpu is not False:
        return None
    return (
        "DynamicCPStrategy(fp8=...) needs a GPU and TransformerEngine, and this run computes on "
        "the CPU. Leave fp8 out here; pad_to_length_bucket works on the CPU too."
    )


def _fp8_in_float32(run: Run) -> str | None:
    if not run.fp8 or run.precision is None or run.precision.startswith("bf16"):
        return None
    return (
        f"DynamicCPStrategy(fp8=...) is for bfloat16 weights, found Trainer(precision="
        f"{run.precision!r}). Use precision='bf16-mixed'."
    )


def _fused_router_on_cpu(run: Run) -> str | None:
    fused = run.model is not None and run.model.moe is not None and run.model.moe.router_fusion
    if not fused or run.on_gpu is not False:
        return None
    return (
        "moe.router_fusion=True needs TransformerEngine's kernels on a GPU, and this run computes "
        "on the CPU. Set it to False here."
    )


def _head_of_objective(run: Run) -> str | None:
    if run.objective is None or run.model is None or run.objective.head == run.model.head:
        return None
    return (
        f"{type(run.objective).__name__} needs a model with head={run.objective.head!r}, found "
        f"ModelConfig(head={run.model.head!r})."
    )


def _mtp_of_objective(run: Run) -> str | None:
    model, objective = run.model, run.objective
    if model is None or objective is None or not model.mtp_num_layers:
        return None
    if type(objective).count is Objective.count:
        return None
    return (
        f"ModelConfig(mtp_num_layers={model.mtp_num_layers}) weighs its losses by target tokens, "
        f"and {type(objective).__name__} counts {objective.counts} of its own. Set "
        "mtp_num_layers=0."
    )


def _router_losses_of_objective(run: Run) -> str | None:
    model, objective = run.model, run.objective
    if model is None or model.moe is None or objective is None:
        return None
    names = ("aux_loss_coeff", "seq_aux_loss_coeff", "z_loss_coeff")
    used = [name for name in names if getattr(model.moe, name)]
    if not used or type(objective).count is Objective.count:
        return None
    return (
        f"moe.{used[0]}={getattr(model.moe, used[0])} is weighed by target tokens, and "
        f"{type(objective).__name__} counts {objective.counts} of its own. Set it to 0; "
        "moe.expert_bias balances without a loss."
    )


def _mtp_recomputed(run: Run) -> str | None:
    if run.model is None or run.recompute is None:
        return None
    try:
        check_mtp_recompute(run.model, run.recompute)
    except ValueError as error:
        return str(error)
    return None


def _routes_without_replay(run: Run) -> str | None:
    if run.batch is None or run.model is None or RouteShape.of(run.model) is not None:
        return None
    try:
        check_routes(run.batch, None)
    except ValueError as error:
        return str(error)
    return None


def _units_of_megatron(run: Run) -> str | None:
    together = run.objective is not None and run.objective.keep_together is not None
    if not together or run.planner != "megatron":
        return None
    return (
        f"planner='megatron' cannot keep samples together, as {type(run.objective).__name__} "
        "needs: Megatron-Core's scheduler places every sequence by itself. Use 'balanced'."
    )


def _accumulation(run: Run) -> str | None:
    if run.trainer is None or run.trainer.accumulate_grad_batches == 1:
        return None
    return (
        f"Trainer(accumulate_grad_batches={run.trainer.accumulate_grad_batches}) does not work "
        "with DynamicCPStrategy: micro-batches are planned inside one global batch, and their "
        "gradients add up there. Leave it at 1 and raise the DataModule's global_batch_size."
    )


def _clipping_by_value(run: Run) -> str | None:
    trainer = run.trainer
    if (
        trainer is None
        or trainer.gradient_clip_val is None
        or trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE
    ):
        return None
    return (
        "Trainer(gradient_clip_algorithm='value') does not work with DynamicCPStrategy, whose "
        "optimizer clips by the global norm. Leave it out, or use 'norm'."
    )


def _synced_batch_norm(run: Run) -> str | None:
    if run.trainer is None or getattr(run.trainer.strategy, "_layer_sync", None) is None:
        return None
    return "Trainer(sync_batchnorm=True) does not work with DynamicCPStrategy: leave it out."


def _manual_optimization(run: Run) -> str | None:
    if run.module is None or run.module.automatic_optimization:
        return None
    return (
        f"{type(run.module).__name__} sets automatic_optimization=False. DynamicCPStrategy runs "
        "forward, backward and the optimizer step itself; leave it True."
    )


def _vocabulary_of_data(run: Run) -> str | None:
    datamodule = getattr(run.trainer, "datamodule", None)
    of_data = getattr(datamodule, "vocab_size", None)
    of_model = getattr(run.module, "vocab_size", None)
    if not (isinstance(of_data, int) and isinstance(of_model, int) and of_data > of_model):
        return None
    return (
        f"{type(datamodule).__name__} has a vocabulary of {of_data} ids, the model one of "
        f"{of_model}. Set the model's vocab_size to {of_data}."
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "`dynamic_context_parallel=False`",
        "a planner other than `static`",
        "one of the two",
        _planner_of_static,
    ),
    Rule(
        "TP, PP, VPP, EP",
        "heads, layers or experts that they do not divide; experts with TP but without "
        "`sequence_parallel`; the all-gather dispatcher with PP; EP of a dense model",
        "other sizes: the message has both numbers",
        _sizes_of_model,
    ),
    Rule(
        "recomputation of `moe`, `moe_act`, `shared_experts`",
        "a dense model",
        "`mlp`",
        _experts_recomputed,
    ),
    Rule("FP8", "the CPU", "a GPU with TransformerEngine", _fp8_on_cpu, NotImplementedError),
    Rule("FP8", "float32 weights", "`precision='bf16-mixed'`", _fp8_in_float32),
    Rule(
        "`moe.router_fusion`",
        "the CPU",
        "a GPU with TransformerEngine",
        _fused_router_on_cpu,
        NotImplementedError,
    ),
    Rule("an objective", "a model with another `head`", "the head it names", _head_of_objective),
    Rule(
        "multi-token prediction",
        "an objective that counts something else than tokens (DPO, a masked value loss)",
        "`mtp_num_layers=0`",
        _mtp_of_objective,
    ),
    Rule(
        "router losses",
        "an objective that counts something else than tokens",
        "`moe.expert_bias`",
        _router_losses_of_objective,
    ),
    Rule(
        "multi-token prediction",
        "full recomputation in blocks or chunks of layers",
        "`method: uniform`, `num_layers: 1`",
        _mtp_recomputed,
    ),
    Rule(
        "`routed_experts` in a batch",
        "a dense model, or one without `moe.router_replay`",
        "`router_replay=True`, or `DynamicCPModule(replay_routes=False)`",
        _routes_without_replay,
    ),
    Rule(
        "samples that stay together (DPO)", "`planner='megatron'`", "`balanced`", _units_of_megatron
    ),
    Rule(
        "`Trainer(accumulate_grad_batches=...)`",
        "this strategy",
        "a larger `global_batch_size`",
        _accumulation,
    ),
    Rule(
        "`Trainer(gradient_clip_algorithm='value')`",
        "this strategy",
        "`'norm'`",
        _clipping_by_value,
    ),
    Rule(
        "`Trainer(sync_batchnorm=True)`",
        "this strategy",
        "nothing: there is no batch norm",
        _synced_batch_norm,
        NotImplementedError,
    ),
    Rule(
        "manual optimization",
        "this strategy",
        "automatic optimization",
        _manual_optimization,
        NotImplementedError,
    ),
    Rule(
        "a tokenizer",
        "a smaller vocabulary of the model",
        "`vocab_size` of the model",
        _vocabulary_of_data,
    ),
)
