"""The experts of a mixture-of-experts model, as a small typed config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_dcp.config.checks import check_at_least, check_not_negative


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts in place of every layer's MLP; each token is sent to the best of them, none dropped.

    Raises:
        ValueError: A size below 1, a negative coefficient, or options that contradict each other.
    """

    num_experts: int = 8
    """Routed experts of a layer."""
    topk: int = 2
    """Experts that a token is sent to."""
    ffn_hidden_size: int | None = None
    """Width of one expert; the model's ffn_hidden_size by default."""
    shared_expert_ffn_hidden_size: int | None = None
    """Width of the expert that sees every token; none by default."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts: a softmax over the chosen ones, or sigmoids normed to one."""
    aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss of each micro-batch."""
    seq_aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss of each sequence; it depends on no packing."""
    z_loss_coeff: float = 0.0
    """Weight of the squared log-sum-exp of the router's logits."""
    expert_bias: bool = False
    """Balance by a bias on the scores that choose (no gradient); needs sigmoid scores."""
    expert_bias_update_rate: float = 1e-3
    """What the bias of an expert moves by after each step."""
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach experts on other ranks."""
    router_fusion: bool = False
    """TransformerEngine's fused router kernels; on GPUs only, and not with router replay."""
    router_replay: bool = False
    """Let routes be recorded and replayed (docs/prediction.md)."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "topk", "ffn_hidden_size", "shared_expert_ffn_hidden_size"):
            value = getattr(self, name)
            if value is not None:
                check_at_least(f"moe.{name}", value)
        rates = ("aux_loss_coeff", "seq_aux_loss_coeff", "z_loss_coeff", "expert_bias_update_rate")
        check_not_negative(**{f"moe.{name}": getattr(self, name) for name in rates})
        if self.topk > self.num_experts:
            raise ValueError(
                f"moe.topk={self.topk} is more than the moe.num_experts={self.num_experts} that "
                "there are."
            )
        if self.expert_bias and self.score_function != "sigmoid":
            raise ValueError(
                f"moe.expert_bias=True needs moe.score_function='sigmoid', found "
                f"{self.score_function!r}: Megatron-Core adds the bias to such scores only."
            )
        if self.router_fusion and self.router_replay:
            raise ValueError(
                "moe.router_fusion=True chooses experts inside a kernel, where "
                "moe.router_replay=True cannot put recorded ones. Turn one of them off."
            )

    def megatron_options(self, ffn_width: int, *, grouped_gemm: bool) -> dict[str, Any]:
        """Megatron-Core's options of these experts.

        Args:
            ffn_width: The model's, where ``ffn_hidden_size`` is None.
            grouped_gemm: Whether TransformerEngine multiplies all experts of a rank at once.
        """
        losses = {"aux_loss": self.aux_loss_coeff, "seq_aux_loss": self.seq_aux_loss_coeff}
        return {
            "num_moe_experts": self.num_experts,
            "moe_router_topk": self.topk,
            # A softmax over a single chosen expert would be 1, without a gradient.
            "moe_router_pre_softmax": self.topk == 1 and self.score_function == "softmax",
            "moe_ffn_hidden_size": self.ffn_hidden_size or ffn_width,
            "moe_shared_expert_intermediate_size": self.shared_expert_ffn_hidden_size,
            "moe_router_score_function": self.score_function,
            "moe_router_load_balancing_type": list(losses),
            "moe_aux_loss_coeff": list(losses.values()),
            # Megatron-Core computes the loss unless it is None, with a coefficient of 0 too.
            "moe_z_loss_coeff": self.z_loss_coeff or None,
            "moe_router_enable_expert_bias": self.expert_bias,
            "moe_router_bias_update_rate": self.expert_bias_update_rate,
            # Megatron-Core's advice for stability, above all with many experts.
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": self.token_dispatcher,
            "moe_router_fusion": self.router_fusion,
            "moe_enable_routing_replay": self.router_replay,
            "moe_grouped_gemm": grouped_gemm,
            # None would split each expert over the tensor-parallel ranks.
            "expert_tensor_parallel_size": 1,
        }
