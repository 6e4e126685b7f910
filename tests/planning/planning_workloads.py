"""Random planning requests that the tests of this folder share."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from lightning_dcp.config.padding import PackPadding, longest_that_fits
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


@st.composite
def padded_workloads(draw: st.DrawFn) -> dict:
    """The same with packs that are padded to a bucket, to one length, for FP8, or to both."""
    num_ranks = draw(st.integers(1, 40))
    tp_size = draw(st.sampled_from([1, 1, 2, 3, 4]))
    fp8 = draw(st.booleans())
    least = tp_size * (2 if num_ranks > 1 else 1) * (128 if fp8 else 1)
    options: dict = {"fp8": fp8}
    if draw(st.booleans()):
        options["pad_to_length"] = least * draw(st.integers(1, 50))
        cap = options["pad_to_length"] + draw(st.integers(0, 20))
    else:
        bucket = options["pad_to_length_bucket"] = draw(st.integers(1, 40))
        cap = math.lcm(bucket, least) * draw(st.integers(1, 20)) + draw(st.integers(0, 20))
    most = longest_that_fits(cap, num_ranks, tp_size, PackPadding(**options))
    length = st.integers(1, most) | st.integers(1, min(most, 4)) | st.just(most)
    lengths = draw(st.lists(length, min_size=1, max_size=draw(st.sampled_from([4, 24, 80]))))
    return {
        "lengths": lengths,
        "num_ranks": num_ranks,
        "max_seqlen_per_dp_cp_rank": cap,
        "tp_size": tp_size,
        **options,
    }


@st.composite
def workloads_of_units(draw: st.DrawFn) -> dict:
    """Workloads in which some samples must stay together; the cap holds the largest unit."""
    workload = draw(workloads() | padded_workloads())
    lengths = workload["lengths"]
    ids = draw(st.lists(st.integers(-2, 12), min_size=len(lengths), max_size=len(lengths)))
    num_ranks, tp_size = workload["num_ranks"], workload["tp_size"]
    align = tp_size * (2 * num_ranks if num_ranks > 1 else 1)
    if workload.get("fp8"):
        align = math.lcm(align, 16)
    tokens: dict[int, int] = {}
    for length, unit in zip(lengths, ids, strict=True):
        tokens[unit] = tokens.get(unit, 0) + math.ceil(length / align) * align
    rows = max(tokens.values()) // num_ranks
    least = tp_size * (2 if num_ranks > 1 else 1) * (128 if workload.get("fp8") else 1)
    least = math.lcm(least, workload.get("pad_to_length_bucket") or 1)
    needed = math.ceil(rows / least) * least
    cap = max(workload["max_seqlen_per_dp_cp_rank"], needed)
    if workload.get("pad_to_length"):
        workload["pad_to_length"] = max(workload["pad_to_length"], needed)
    return workload | {"max_seqlen_per_dp_cp_rank": cap, "keep_together": ids}


def predictions() -> st.SearchStrategy[dict]:
    """What a plan is predicted with."""
    return st.fixed_dictionaries(
        {
            "cost_model": st.sampled_from(sorted(COST_MODELS)).map(COST_MODELS.__getitem__),
            "execution": st.sampled_from(["lockstep", "free_running"]),
        }
    )
