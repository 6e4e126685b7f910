"""The model's sizes and what is recomputed, as small typed configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from lightning_dcp.config.checks import (
    check_above_zero,
    check_at_least,
    check_not_negative,
    check_one_of,
)
from lightning_dcp.config.model_sizes import ModelSizes
from lightning_dcp.config.moe import MoEConfig
from lightning_dcp.config.parallel import ParallelSizes


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder with rope, RMSNorm and a gated MLP (Llama, Qwen)."""

    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_attention_heads: int = 8
    """Query heads."""
    num_query_groups: int | None = None
    """Key and value heads (grouped-query attention); as many as query heads by default."""
    kv_channels: int | None = None
    """Width of a head; hidden_size / num_attention_heads by default."""
    ffn_hidden_size: int | None = None
    """Width of the gated MLP; 8 / 3 of hidden_size, rounded up to a multiple of 64, by default."""
    vocab_size: int = 257
    """Token ids are 0 to vocab_size - 1; 257 is the byte-level tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """The embedding's rows are padded to a multiple of this; padding rows never count."""
    rotary_base: float = 10000.0
    """Base of the rotary position embedding."""
    qk_layernorm: bool = False
    """RMSNorm on the heads of queries and keys (Qwen3)."""
    tie_word_embeddings: bool = False
    """Whether the output layer shares the embedding's weights."""
    layernorm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    moe: MoEConfig | None = None
    """Experts in place of the MLPs; None for a dense model."""
    head: Literal["vocabulary", "value"] = "vocabulary"
    """What the model ends in: logits of the vocabulary, or one value a token (a critic)."""
    mtp_num_layers: int = 0
    """Depths of multi-token prediction: layers that are trained to predict tokens further on."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the mean over the depths of their losses, each a mean over its own targets."""
    attention_backend: Literal["auto", "torch", "te"] = "auto"
    """Whose attention (and layers): PyTorch's, TransformerEngine's, or the latter if it can run."""

    def __post_init__(self) -> None:
        if self.moe is not None and not isinstance(self.moe, MoEConfig):
            raise TypeError(f"moe must be a MoEConfig, found a {type(self.moe).__name__}.")
        for name in (
            "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
            "ffn_hidden_size", "vocab_size", "make_vocab_size_divisible_by",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                check_at_least(name, value)
        factors = ("rotary_base", "layernorm_epsilon", "init_method_std")
        check_above_zero(**{name: getattr(self, name) for name in factors})
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                f"{self.num_attention_heads}. Change one of them, or give kv_channels."
            )
        if self.head_width % 2:
            raise ValueError(f"The width of a head must be even for rope, found {self.head_width}.")
        if self.num_attention_heads % self.query_groups:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_query_groups={self.query_groups}."
            )
        self._check_heads()

    def _check_heads(self) -> None:
        check_one_of("head", self.head, ("vocabulary", "value"))
        check_at_least("mtp_num_layers", self.mtp_num_layers, 0)
        check_not_negative(mtp_loss_scaling_factor=self.mtp_loss_scaling_factor)
        if self.head == "value" and self.tie_word_embeddings:
            raise ValueError(
                "head='value' has no output embedding that tie_word_embeddings=True could share. "
                "Set tie_word_embeddings=False."
            )
        if self.mtp_num_layers and self.head == "value":
            raise ValueError(
                f"mtp_num_layers={self.mtp_num_layers} predicts tokens, which head='value' cannot. "
                "Set mtp_num_layers=0."
            )

    @property
    def architecture(self) -> dict[str, Any]:
        """What weights are of: every size and option that another model could not run them with.

        Plain values by the names of the options, those of experts after ``moe.``, without defaults
        that stand for other sizes.
        """
        names = (
            "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "rotary_base",
            "qk_layernorm", "tie_word_embeddings", "layernorm_epsilon", "head", "mtp_num_layers",
        )  # fmt: skip
        sizes = {name: getattr(self, name) for name in names} | {
            "num_query_groups": self.query_groups,
            "kv_channels": self.head_width,
            "ffn_hidden_size": self.ffn_width,
            "moe.num_experts": 0,
        }
        if self.moe is not None:
            moe = ("num_experts", "topk", "score_function", "shared_expert_ffn_hidden_size")
            sizes |= {f"moe.{name}": getattr(self.moe, name) for name in moe}
            sizes["moe.ffn_hidden_size"] = self.moe.ffn_hidden_size or self.ffn_width
        return sizes

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_width(self) -> int:
        """Width of the gated MLP."""
        # Three matrices of 8 / 3 have as many weights as the two of 4 of an MLP without gate.
        return self.ffn_hidden_size or -(-8 * self.hidden_size // (3 * 64)) * 64

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

    @property
    def sizes(self) -> ModelSizes:
        """The sizes as planning knows them, whose fingerprint names the model."""
        moe = self.moe
        return ModelSizes(
            # A depth of multi-token prediction costs about what a layer does.
            num_layers=self.num_layers + self.mtp_num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.query_groups,
            head_dim=self.head_width,
            intermediate_size=self.ffn_width,
            vocab_size=self.vocab_size,
            num_experts=moe.num_experts if moe else 0,
            num_experts_per_tok=moe.topk if moe else 0,
            moe_intermediate_size=(moe.ffn_hidden_size or self.ffn_width) if moe else 0,
            shared_expert_intermediate_size=moe.shared_expert_ffn_hidden_size or 0 if moe else 0,
        )

    @classmethod
    def of_sizes(cls, sizes: ModelSizes) -> Self:
        """The config of a model of these sizes, as far as it can be built.

        Raises:
            ValueError: Some of its layers have experts and some have not.
        """
        if sizes.num_experts and sizes.num_dense_layers:
            raise ValueError(
                f"the model has experts in {sizes.num_moe_layers} of {sizes.num_layers} layers: "
                "only models with experts in all or none can be built, and so measured; plan "
                "predicts it from its sizes"
            )
        moe = (
            MoEConfig(
                num_experts=sizes.num_experts,
                topk=sizes.num_experts_per_tok,
                ffn_hidden_size=sizes.moe_intermediate_size or None,
                shared_expert_ffn_hidden_size=sizes.shared_expert_intermediate_size or None,
            )
            if sizes.num_experts
            else None
        )
        return cls(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_attention_heads,
            num_query_groups=sizes.num_key_value_heads,
            kv_channels=sizes.head_dim,
            ffn_hidden_size=sizes.intermediate_size,
            vocab_size=sizes.vocab_size,
            moe=moe,
        )

    def check_parallel(self, sizes: ParallelSizes) -> None:
        """Refuses parallel sizes that do not divide what they split.

        Raises:
            ValueError: TP, EP, PP or VPP does not divide heads, experts or layers; expert
                parallelism without experts; or experts under TP without sequence parallelism.
        """
        self.check_tensor_parallel(sizes.tensor_model_parallel_size)
        stages = sizes.pipeline_model_parallel_size * sizes.virtual_pipeline_model_parallel_size
        # Megatron-Core can cut unevenly; router replay counts on stages of as many layers each.
        if self.num_layers % stages:
            raise ValueError(
                f"num_layers={self.num_layers} is not a multiple of the pipeline's stages: "
                f"pipeline_model_parallel_size={sizes.pipeline_model_parallel_size} x "
                "virtual_pipeline_model_parallel_size="
                f"{sizes.virtual_pipeline_model_parallel_size} = {stages}."
            )
        ep_size = sizes.expert_model_parallel_size
        if self.moe is None:
            if ep_size > 1:
                raise ValueError(
                    f"expert_model_parallel_size={ep_size} shares experts among ranks, and the "
                    "model has none. Leave it at 1, or give model.moe."
                )
            return
        if self.moe.num_experts % ep_size:
            raise ValueError(
                f"expert_model_parallel_size={ep_size} does not divide moe.num_experts="
                f"{self.moe.num_experts}."
            )
        if sizes.tensor_model_parallel_size > 1 and not sizes.sequence_parallel:
            raise ValueError(
                f"tensor_model_parallel_size={sizes.tensor_model_parallel_size} with experts needs "
                "sequence_parallel=True: every tensor-parallel rank would route the same rows."
            )
        if self.moe.token_dispatcher == "allgather" and sizes.pipeline_model_parallel_size > 1:
            raise ValueError(
                "moe.token_dispatcher='allgather' does not work with "
                f"pipeline_model_parallel_size={sizes.pipeline_model_parallel_size}: Megatron-Core "
                "sends packs of varying lengths between stages with 'alltoall' only."
            )

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Refuses a tensor-parallel size that does not divide what it splits.

        Raises:
            ValueError: It does not divide the heads, query groups, MLP width or padded vocabulary.
        """
        for name, value in (
            ("num_attention_heads", self.num_attention_heads),
            ("num_query_groups", self.query_groups),
            ("ffn_hidden_size", self.ffn_width),
            ("the padded vocabulary (make_vocab_size_divisible_by)", self.padded_vocab_size),
        ):
            if value % tp_size:
                raise ValueError(
                    f"tensor_model_parallel_size={tp_size} does not divide {name}={value}."
                )


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What the forward pass throws away and the backward pass computes again, to save memory.

    Raises:
        ValueError: Unknown modules, or num_layers below 1.
    """

    granularity: Literal["full", "selective"] | None = None
    """full: whole layers; selective: the named modules of each layer; None: nothing."""
    method: Literal["uniform", "block"] = "uniform"
    """full only. uniform: chunks of num_layers layers; block: the first num_layers of a stage."""
    num_layers: int = 1
    """full only. Layers of a chunk, or of the block."""
    modules: tuple[str, ...] = ("core_attn",)
    """selective only. core_attn, layernorm, mlp, moe, moe_act, shared_experts."""

    def __post_init__(self) -> None:
        # Megatron-Core's, but for those of layers that no model here has (mla_up_proj and others).
        known = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
        unknown = sorted(set(self.modules) - set(known))
        if unknown:
            raise ValueError(f"recompute.modules are of {known}, found {unknown}.")
        check_at_least("recompute.num_layers", self.num_layers)

    def megatron_options(self) -> dict[str, Any]:
        """Megatron-Core's options."""
        if self.granularity is None:
            return {}
        options: dict[str, Any] = {"recompute_granularity": self.granularity}
        if self.granularity == "selective":
            return options | {"recompute_modules": list(self.modules)}
        return options | {"recompute_method": self.method, "recompute_num_layers": self.num_layers}


def check_mtp_recompute(config: ModelConfig, recompute: Recompute) -> None:
    """Refuses a recomputation that Megatron-Core lacks for multi-token prediction.

    Raises:
        ValueError: Full recomputation by blocks, or by chunks of several layers.
    """
    # With blocks Megatron-Core warns and recomputes nothing, larger chunks fail an assertion there.
    whole_layers = (recompute.method, recompute.num_layers) == ("uniform", 1)
    if config.mtp_num_layers and recompute.granularity == "full" and not whole_layers:
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers} with recompute.granularity='full' works with "
            "recompute.method='uniform' and recompute.num_layers=1 only, found "
            f"{recompute.method!r} and {recompute.num_layers}."
        )
