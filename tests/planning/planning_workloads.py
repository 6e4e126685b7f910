"""Random planning requests that the tests of this folder share."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_dcp.alignment import longest_that_fits
from lightning_dcp.planning import H200, QWEN3_30B_A3B, CostModel

COST_MODELS = {
    "dense": CostModel(),
    "experts": CostModel.from_sizes(QWEN3_30B_A3B, H200, ep_size=8),
    "small nodes": CostModel(ranks_per_node=2),
    "free communication": CostModel(
        kv_seconds_per_row_within=0.0,
        kv_seconds_per_row_across=0.0,
        hop_seconds_within=0.0,
        hop_seconds_across=0.0,
        fixed_seconds=0.0,
    ),
}


@st.composite
def workloads(draw: st.DrawFn) -> dict:
    """Lengths that the pool holds, short and long ones mixed, with few and with many samples."""
    num_ranks = draw(st.integers(1, 64))
    tp_size = draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    least = tp_size * (2 if num_ranks > 1 else 1)
    cap = draw(
        st.integers(least, least + 40) | st.sampled_from([64, 1000, 4096]).map(least.__mul__)
    )
    most = longest_that_fits(cap, num_ranks, tp_size)
    length = (
        st.integers(1, most)
        | st.integers(1, min(most, cap))
        | st.integers(1, min(most, 4))
        | st.just(most)
    )
    lengths = draw(st.lists(length, min_size=1, max_size=draw(st.sampled_from([4, 24, 120]))))
    return {
        "lengths": lengths,
        "num_ranks": num_ranks,
        "max_seqlen_per_dp_cp_rank": cap,
        "tp_size": tp_size,
    }


def predictions() -> st.SearchStrategy[dict]:
    """What a plan is predicted with."""
    return st.fixed_dictionaries(
        {
            "cost_model": st.sampled_from(sorted(COST_MODELS)).map(COST_MODELS.__getitem__),
            "execution": st.sampled_from(["lockstep", "free_running"]),
        }
    )
