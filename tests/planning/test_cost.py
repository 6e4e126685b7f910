"""The cost model: what it must never do, whatever its figures, and where the figures come from."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.config.padding import rows_per_rank
from lightning_dcp.planning import CPU, H100, H200, LLAMA_8B, QWEN3_30B_A3B, CostModel, ModelSizes

SIZES = (1, 2, 4, 8, 16, 6)
seconds = st.floats(0.0, 1.0)
cost_models = st.builds(
    CostModel,
    seconds_per_row=st.floats(1e-6, 1.0),
    seconds_per_pair=seconds,
    thin_rows=st.floats(0.0, 1000.0),
    kv_seconds_per_row_within=seconds,
    kv_seconds_per_row_across=seconds,
    hop_seconds_within=seconds,
    hop_seconds_across=seconds,
    fixed_seconds=seconds,
    overlap=seconds,
    ranks_per_node=st.integers(1, 16),
)


@given(cost_models, st.integers(1, 5000), st.integers(1, 100), st.sampled_from(SIZES))
def test_more_tokens_never_take_less_work(
    model: CostModel, length: int, more: int, size: int
) -> None:
    parts = model.parts(np.array([length, length + more]), (size,))
    for part in (parts.linear[0], parts.attention[0]):
        assert part[0] <= part[1]
    assert (parts.communication >= 0).all()


@given(cost_models.map(lambda model: replace(model, overlap=0.0)),
       st.integers(1, 5000), st.integers(1, 100), st.sampled_from(SIZES))  # fmt: skip
def test_more_tokens_never_take_less_time(
    model: CostModel, length: int, more: int, size: int
) -> None:
    short, long = model.sample_times(np.array([length, length + more]), size)
    assert short <= long


@given(cost_models, st.integers(1, 50), st.sampled_from([1, 2, 4, 8]))
def test_without_padding_a_larger_group_never_saves_work(
    model: CostModel, chunks: int, size: int
) -> None:
    """Rank-seconds of a group: work is cut, thin shards and communication only add to it."""
    # Within one node: between nodes a larger group may have the quicker links, for all we know.
    model = replace(model, ranks_per_node=16)
    length = np.array([chunks * 4 * size])
    small, large = (s * model.sample_times(length, s)[0] for s in (size, 2 * size))
    assert small <= large * (1 + 1e-9)


@given(cost_models, st.sampled_from(SIZES), seconds)
def test_more_overlap_never_costs(model: CostModel, size: int, overlap: float) -> None:
    lengths = np.array([1, 30, 5000])
    little, much = sorted([overlap, model.overlap])
    times = [replace(model, overlap=x).sample_times(lengths, size) for x in (little, much)]
    assert (times[0] >= times[1]).all()


def test_one_rank_exchanges_nothing() -> None:
    model = CostModel(overlap=0.0)
    assert model.parts(np.array([7, 4096]), (1,)).communication.tolist() == [[0.0, 0.0]]
    assert model.hop_time(1) == 0.0
    assert model.fixed_time(1) == model.fixed_seconds


def test_the_formula_by_hand() -> None:
    model = CostModel(
        seconds_per_row=2.0, seconds_per_pair=0.5, thin_rows=3.0, kv_seconds_per_row_within=10.0,
        kv_seconds_per_row_across=100.0, hop_seconds_within=5.0, hop_seconds_across=50.0,
        fixed_seconds=7.0, overlap=0.25, ranks_per_node=2,
    )  # fmt: skip
    # 13 tokens on 2 ranks are padded to 16: 8 rows each.
    parts = model.parts(np.array([13]), (2, 4))
    assert parts.rows.tolist() == [[8], [4]]
    assert parts.linear.tolist() == [[16.0], [8.0]]
    assert parts.attention.tolist() == [[0.5 * 2 * 8 * 11], [0.5 * 4 * 4 * 7]]
    assert parts.communication.tolist() == [[80.0 - 0.25 * 88.0], [1200.0 - 0.25 * 56.0]]
    assert model.sample_times(np.array([13]), 2).tolist() == [16.0 + 88.0 + 58.0]
    assert [model.fixed_time(size) for size in (1, 2, 4)] == [7.0, 12.0, 157.0]


@given(st.lists(st.integers(1, 100_000), min_size=1), st.integers(1, 8))
def test_rows_are_the_shared_padding_rule(lengths: list[int], tp_size: int) -> None:
    rows = CostModel().parts(np.array(lengths), SIZES, tp_size).rows
    assert rows.tolist() == [[rows_per_rank(n, s, tp_size) for n in lengths] for s in SIZES]


def test_activations_and_the_rows_that_fit() -> None:
    model = CostModel(activation_bytes_per_row=1000.0)
    assert model.activation_bytes(7) == 7000.0
    assert [model.rows_that_fit(x) for x in (999.0, 1000.0, 7999.0, -5.0)] == [0, 1, 7, 0]
    with pytest.raises(ValueError, match="activation_bytes_per_row=0"):
        CostModel(activation_bytes_per_row=0.0).rows_that_fit(1e9)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("seconds_per_row", 0.0, ValueError),
        ("seconds_per_pair", -1.0, ValueError),
        ("fixed_seconds", float("nan"), ValueError),
        ("overlap", 1.5, ValueError),
        ("ranks_per_node", 0, ValueError),
        ("ranks_per_node", 2.5, ValueError),
        ("thin_rows", "256", TypeError),
        ("thin_rows", True, TypeError),
    ],
)
def test_a_figure_that_cannot_be(field: str, value: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=field):
        CostModel(**{field: value})


# Made from sizes


def test_the_default_is_a_dense_8b_model_on_h200() -> None:
    made = asdict(CostModel.from_sizes(LLAMA_8B, H200))
    default = asdict(CostModel())
    made.pop("model"), default.pop("model")
    assert default == pytest.approx(made, rel=1e-3)


def test_linear_work_is_six_operations_a_weight() -> None:
    # Llama 3.1 8B has 8.03 billion weights, 0.53 of them the embedding that is only looked up.
    weights = LLAMA_8B.shared_weights
    assert weights == pytest.approx(8.03e9 - 0.525e9, rel=1e-3)
    model = CostModel.from_sizes(LLAMA_8B, H100)
    assert model.seconds_per_row == pytest.approx(6 * weights / (0.5 * 989e12))


def test_qwen3_30b_meets_about_three_billion_weights_a_token() -> None:
    met = QWEN3_30B_A3B.shared_weights + QWEN3_30B_A3B.expert_weights
    # 3.3 billion active weights by its model card, embedding included.
    assert met == pytest.approx(3.3e9 - 0.311e9, rel=0.03)


def test_attention_equals_linear_work_in_the_tens_of_thousands_of_tokens() -> None:
    # FlexSP's fit for a 7B model is 36K.
    assert 20_000 < CostModel().crossover_length < 60_000


@pytest.mark.parametrize("model", [LLAMA_8B, QWEN3_30B_A3B])
def test_what_each_parallel_size_divides(model: ModelSizes) -> None:
    one = CostModel.from_sizes(model, H200)
    tp = CostModel.from_sizes(model, H200, tp_size=2)
    assert tp.seconds_per_row == pytest.approx(one.seconds_per_row / 2)
    assert tp.activation_bytes_per_row == one.activation_bytes_per_row / 2
    assert tp.ranks_per_node == 4
    pp = CostModel.from_sizes(model, H200, pp_size=4)
    assert pp.seconds_per_pair == pytest.approx(one.seconds_per_pair / 4)
    assert pp.hop_seconds_within == pytest.approx(one.hop_seconds_within / 4)


def test_recomputation_takes_longer_and_less_memory() -> None:
    kept = CostModel.from_sizes(LLAMA_8B, H200)
    again = CostModel.from_sizes(LLAMA_8B, H200, recompute=True)
    assert again.seconds_per_row == pytest.approx(4 / 3 * kept.seconds_per_row)
    assert again.activation_bytes_per_row < 0.1 * kept.activation_bytes_per_row


def test_expert_parallelism_pays_for_sending_tokens() -> None:
    alone = CostModel.from_sizes(QWEN3_30B_A3B, H200)
    spread = CostModel.from_sizes(QWEN3_30B_A3B, H200, ep_size=8)
    across = CostModel.from_sizes(QWEN3_30B_A3B, H200, ep_size=16)
    assert alone.seconds_per_row < spread.seconds_per_row < across.seconds_per_row
    # Each expert sees the rows of eight ranks: few rows hurt less.
    assert spread.fixed_seconds < alone.fixed_seconds


def test_cpu_is_slower_and_hides_nothing() -> None:
    cpu = CostModel.from_sizes(LLAMA_8B, CPU)
    assert cpu.overlap == 0.0
    assert cpu.seconds_per_row > 1000 * CostModel().seconds_per_row


# Read from a Hugging Face config

LLAMA = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256,
}  # fmt: skip
QWEN_MOE = {
    "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151_936,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def test_published_configurations() -> None:
    assert ModelSizes.from_hf_config(LLAMA) == LLAMA_8B
    assert ModelSizes.from_hf_config(QWEN_MOE) == QWEN3_30B_A3B
    assert ModelSizes.from_hf_config({"text_config": LLAMA, "hidden_size": 7}) == LLAMA_8B


def test_experts_by_other_names() -> None:
    mixtral = ModelSizes.from_hf_config(LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2})
    assert (mixtral.num_experts, mixtral.moe_intermediate_size) == (8, 14_336)
    sparse = ModelSizes.from_hf_config(
        QWEN_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    )
    # Every second layer has experts, the first of these does not.
    assert (sparse.num_dense_layers, sparse.num_moe_layers) == (25, 23)
    shared = ModelSizes.from_hf_config(QWEN_MOE | {"n_shared_experts": 2})
    assert shared.shared_expert_intermediate_size == 2 * 768


def test_fingerprints_tell_models_apart() -> None:
    assert LLAMA_8B.fingerprint == replace(LLAMA_8B).fingerprint
    assert LLAMA_8B.fingerprint != replace(LLAMA_8B, num_layers=31).fingerprint
    assert CostModel.from_sizes(LLAMA_8B, H200).model == LLAMA_8B.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"vocab_size": "7"}, "vocab_size='7'"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512: multi-head latent attention"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 with num_exp"),
        ({"num_hidden_layers": 0}, "num_layers=0"),
    ],
)
def test_a_configuration_that_says_too_little(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSizes.from_hf_config(LLAMA | change)
