"""``plan --suggest``: which split and cap to run with, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from lightning_dcp.config.padding import TIGHT, PackPadding, rows_per_rank
from lightning_dcp.planning import Execution
from lightning_dcp.tools.plan.costs import GIB, Costs
from lightning_dcp.tools.plan.figures import Figures, Setting, aligned
from lightning_dcp.tools.plan.lengths import Batches
from lightning_dcp.tools.plan.splits import holding_sizes

# Global batches that each candidate plans.
_NUM_BATCHES = 4
# Caps that are tried for each tensor-parallel size, at most.
_NUM_CAPS = 6
# Gains below this are not worth more memory, or a dynamic run.
_WORTHWHILE = 1.02


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run.

    Attributes:
        figures: What it would give.
        bytes_per_device: Weights, gradients, optimizer states and the most activations.
    """

    figures: Figures
    bytes_per_device: float

    @property
    def setting(self) -> Setting:
        """Of its figures."""
        return self.figures.setting

    @property
    def rate(self) -> float:
        """Predicted tokens a second."""
        return self.figures.tokens_per_second

    def describe(self) -> str:
        """What to set."""
        setting = self.setting
        size = setting.context_parallel_size
        split = (
            f"planner {setting.planner} on a pool of {setting.num_ranks} DPxCP ranks"
            if size is None
            else f"static DP {setting.num_ranks // size} x CP {size}"
        )
        return f"{split}, tp_size {setting.tp_size}, max_seqlen_per_dp_cp_rank {setting.cap}"

    def values(self) -> dict[str, Any]:
        """JSON values."""
        setting = self.setting
        return {
            "planner": setting.planner,
            "num_ranks": setting.num_ranks,
            "tp_size": setting.tp_size,
            "context_parallel_size": setting.context_parallel_size,
            "max_seqlen_per_dp_cp_rank": setting.cap,
            "tokens_per_second": self.rate,
            "bytes_per_device": self.bytes_per_device,
        }


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """The recommended candidate.

    Attributes:
        best: The recommended one.
        reason: Why, in a sentence.
        candidates: All that fit the memory.
    """

    best: Candidate
    reason: str
    candidates: tuple[Candidate, ...]

    def text(self) -> str:
        """A table of what was tried, and the recommendation."""
        rows = [("tp x ranks", "cap", "balanced", "best static", "split", "ratio", "GiB a device")]
        for tp_size, cap in sorted({(c.setting.tp_size, c.setting.cap) for c in self.candidates}):
            same = [c for c in self.candidates if (c.setting.tp_size, c.setting.cap) ==
                    (tp_size, cap)]  # fmt: skip
            dynamic, static = _best(same, static=False), _best(same, static=True)
            size = static.setting.context_parallel_size or 1
            num_ranks = static.setting.num_ranks
            rows.append(
                (
                    f"{tp_size} x {num_ranks}",
                    str(cap),
                    f"{dynamic.rate:,.0f}",
                    f"{static.rate:,.0f}",
                    f"DP {num_ranks // size} x CP {size}",
                    f"{dynamic.rate / static.rate:.3f}",
                    f"{dynamic.bytes_per_device / GIB:.1f}",
                )
            )
        return (
            "suggestion: tokens/s by cap, all within the memory\n"
            f"{aligned(rows)}\n\nrecommended: {self.best.describe()}.\n{self.reason}"
        )

    def values(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "recommended": self.best.values(),
            "reason": self.reason,
            "candidates": [candidate.values() for candidate in self.candidates],
        }


def suggest(
    costs: Costs,
    batches: Batches,
    *,
    num_ranks: int,
    tp_size: int,
    tp_sizes: Sequence[int],
    cap: int,
    execution: Execution,
    padding: PackPadding = TIGHT,
) -> Suggestion:
    """Tries splits, tensor-parallel sizes and caps on as many devices, and recommends one.

    Args:
        costs: Gives cost models and memory.
        batches: Global batches; each candidate plans the first few.
        num_ranks: Ranks of the DPxCP pool with ``tp_size``.
        tp_size: Tensor-parallel size of the user's own run.
        tp_sizes: Those to try.
        cap: The user's own cap, which is tried as well.
        execution: Who waits for whom.
        padding: How packs are padded, to a bucket if at all.

    Raises:
        ValueError: No candidate fits the memory, or packs are padded to one length.
    """
    if padding.pad_to_length is not None:
        raise ValueError(
            f"--suggest tries other caps, which pad_to_length={padding.pad_to_length} fixes: leave "
            "one out, or use pad_to_length_bucket"
        )
    devices = num_ranks * tp_size
    settings = [
        setting
        for size in dict.fromkeys(tp_sizes)
        for setting in _settings(costs, batches, devices, size, cap, execution, padding)
    ]
    if not settings:
        raise ValueError(_nothing_fits(costs, batches, devices, tp_sizes))
    candidates = []
    for setting in tqdm(settings, desc="Trying splits", unit="split", disable=len(settings) < 8):
        figures = Figures(setting=setting)
        for index in range(min(_NUM_BATCHES, len(batches))):
            figures.add(batches[index])
        states = costs.state_bytes(setting.tp_size, setting.num_ranks)
        used = states + figures.peak_activation_bytes
        candidates.append(Candidate(figures=figures, bytes_per_device=used))
    return _recommend(costs, candidates)


def _settings(
    costs: Costs,
    batches: Batches,
    devices: int,
    tp_size: int,
    cap: int,
    execution: Execution,
    padding: PackPadding,
) -> Iterator[Setting]:
    """What to try with one tensor-parallel size; nothing where it cannot work."""
    if any(n % tp_size for n in (devices, costs.model.num_attention_heads)):
        return
    num_ranks, longest = devices // tp_size, int(batches.lengths.max())
    cost_model = costs.cost_model(tp_size)
    for tried in _caps(costs, batches, num_ranks, tp_size, cap, padding):
        sizes = holding_sizes(
            longest, num_ranks=num_ranks, cap=tried, tp_size=tp_size, padding=padding
        )
        for size in (None, *sizes):
            yield Setting(
                planner="balanced" if size is None else "static",
                num_ranks=num_ranks,
                cap=tried,
                tp_size=tp_size,
                context_parallel_size=size,
                cost_model=cost_model,
                execution=execution,
                padding=padding,
            )


def _caps(
    costs: Costs, batches: Batches, num_ranks: int, tp_size: int, cap: int, padding: PackPadding
) -> list[int]:
    """Powers of two that hold the longest sample and fit the memory, and the user's own cap."""
    free = costs.memory_bytes - costs.state_bytes(tp_size, num_ranks)
    most = costs.cost_model(tp_size).rows_that_fit(max(0.0, free))
    least = rows_per_rank(int(batches.lengths.max()), num_ranks, tp_size)
    least = padding.pack_rows(least, num_ranks, tp_size)
    # More rows than a whole batch gives each rank change nothing.
    enough = max(least, -(-int(batches[0].sum()) // num_ranks))
    powers = [1 << k for k in range(least.bit_length() - 1, enough.bit_length() + 1)]
    caps = [power for power in powers if least <= power <= most][-_NUM_CAPS:]
    return sorted({*caps, *(c for c in (cap, least) if least <= c <= most)})


def _recommend(costs: Costs, candidates: Sequence[Candidate]) -> Suggestion:
    dynamic, static = _frugal(candidates, static=False), _frugal(candidates, static=True)
    memory = costs.memory_bytes / GIB
    if dynamic.rate >= _WORTHWHILE * static.rate:
        best = dynamic
        why = (
            f"It is predicted to run {dynamic.rate:,.0f} tokens/s, {dynamic.rate / static.rate:.2f}"
            f" times the best static split ({static.describe()})"
        )
    else:
        best = static
        why = (
            f"It is predicted to run {static.rate:,.0f} tokens/s, and dynamic groups would gain "
            f"less than {_WORTHWHILE - 1:.0%} for these lengths"
        )
    reason = (
        f"{why}; it takes {best.bytes_per_device / GIB:.1f} of {memory:.1f} GiB a device, and none "
        f"of the others is {_WORTHWHILE - 1:.0%} faster."
    )
    if len({c.setting.tp_size for c in candidates}) > 1:
        reason += " Tensor parallelism's own communication is not in these figures."
    return Suggestion(best=best, reason=reason, candidates=tuple(candidates))


def _best(candidates: Sequence[Candidate], *, static: bool) -> Candidate:
    kind = [c for c in candidates if (c.setting.planner == "static") == static]
    return max(kind, key=lambda c: c.rate)


def _frugal(candidates: Sequence[Candidate], *, static: bool) -> Candidate:
    """Of those about as fast as the fastest, the one with the least tensor parallelism and memory.

    Tensor parallelism comes first since its communication has no price in the cost model.
    """
    fastest = _best(candidates, static=static).rate
    near = [
        c
        for c in candidates
        if (c.setting.planner == "static") == static and c.rate * _WORTHWHILE > fastest
    ]
    return min(near, key=lambda c: (c.setting.tp_size, c.bytes_per_device, -c.rate))


def _nothing_fits(costs: Costs, batches: Batches, devices: int, tp_sizes: Sequence[int]) -> str:
    longest = int(batches.lengths.max())
    tried = []
    for size in tp_sizes:
        if devices % size or costs.model.num_attention_heads % size:
            heads = costs.model.num_attention_heads
            tried.append(f"tp_size={size} does not divide {devices} devices and {heads} heads")
            continue
        num_ranks = devices // size
        rows = rows_per_rank(longest, num_ranks, size)
        activations = costs.cost_model(size).activation_bytes(rows) / GIB
        states = costs.state_bytes(size, num_ranks) / GIB
        tried.append(
            f"tp_size={size} needs {states:.1f} GiB for weights and optimizer states and "
            f"{activations:.1f} GiB for {rows} rows, the least that hold {longest} tokens"
        )
    return (
        f"no cap fits a device of {costs.memory_bytes / GIB:.1f} GiB: {'; '.join(tried)}. Use more "
        "devices, recompute, a larger tensor-, pipeline- or expert-parallel size, or a smaller "
        "max_length"
    )
