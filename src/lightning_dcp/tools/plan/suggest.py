"""``plan --suggest``: which split and cap to run with, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from lightning_dcp.config.padding import rows_per_rank
from lightning_dcp.planning import PlanSettings
from lightning_dcp.tools.plan.lengths import Batches
from lightning_dcp.tools.plan.results import PlannerResult
from lightning_dcp.tools.plan.run import GIB, PredictedRun, static_cp_sizes
from lightning_dcp.tools.tables import aligned

# Global batches that each candidate plans.
_NUM_BATCHES = 4
# Caps that are tried for each tensor-parallel size, at most.
_NUM_CAPS = 6
# Gains below this are not worth more memory, or a dynamic run.
_WORTHWHILE = 1.02
# Likewise for more tensor parallelism, whose communication has no price in the cost model.
_WORTH_TENSOR_PARALLEL = 1.1
# Share of a device's memory above which a prediction leaves too little room to rely on.
_FULL = 0.9


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run.

    Attributes:
        result: What the planner made of the batches.
        bytes_per_device: Weights, gradients, optimizer states and the most activations.
    """

    result: PlannerResult
    bytes_per_device: float

    @property
    def settings(self) -> PlanSettings:
        """How it plans."""
        return self.result.settings

    @property
    def rate(self) -> float:
        """Predicted tokens a second."""
        return self.result.tokens_per_second

    @property
    def is_static(self) -> bool:
        """Whether it has one CP size for all."""
        return self.settings.planner == "static"

    @property
    def size_and_cap(self) -> tuple[int, int]:
        """Tensor-parallel size and cap."""
        return self.settings.tp_size, self.settings.max_seqlen_per_dp_cp_rank

    def describe(self) -> str:
        """What to set."""
        settings = self.settings
        size = settings.context_parallel_size
        split = (
            f"planner {settings.planner} on a pool of {settings.num_ranks} DPxCP ranks"
            if size is None
            else f"static DP {settings.num_ranks // size} x CP {size}"
        )
        tp_size, cap = self.size_and_cap
        return f"{split}, tp_size {tp_size}, max_seqlen_per_dp_cp_rank {cap}"

    def values(self) -> dict[str, Any]:
        """JSON values."""
        names = (
            "planner", "num_ranks", "tp_size", "context_parallel_size", "max_seqlen_per_dp_cp_rank",
        )  # fmt: skip
        return {
            **{name: getattr(self.settings, name) for name in names},
            "tokens_per_second": self.rate,
            "bytes_per_device": self.bytes_per_device,
        }


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """The best candidate, why it is, in a sentence, and all candidates that fit the memory."""

    best: Candidate
    reason: str
    candidates: tuple[Candidate, ...]

    def text(self) -> str:
        """A table of what was tried, and the recommendation."""
        rows = [("tp x ranks", "cap", "balanced", "best static", "split", "ratio", "GiB a device")]
        for tp_size, cap in sorted({c.size_and_cap for c in self.candidates}):
            same = [c for c in self.candidates if c.size_and_cap == (tp_size, cap)]
            dynamic, static = _fastest(same, static=False), _fastest(same, static=True)
            size = static.settings.context_parallel_size or 1
            num_ranks = static.settings.num_ranks
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
    run: PredictedRun, batches: Batches, tp_sizes: Sequence[int] | None = None
) -> Suggestion:
    """Tries splits, tensor-parallel sizes and caps on as many devices, and recommends one.

    Args:
        run: The user's own run; its cap is tried as well.
        batches: Global batches; each candidate plans the first few.
        tp_sizes: Tensor-parallel sizes to try; by default that of the run.

    Raises:
        ValueError: No candidate fits the memory, or packs are padded to one length.
    """
    if run.padding.pad_to_length is not None:
        raise ValueError(
            f"--suggest tries other caps, which pad_to_length={run.padding.pad_to_length} fixes: "
            "leave one out, or use pad_to_length_bucket"
        )
    tp_sizes = tuple(dict.fromkeys(tp_sizes or (run.sizes.tensor_model_parallel_size,)))
    tried = [settings for size in tp_sizes for settings in _settings(run, batches, size)]
    if not tried:
        raise ValueError(_nothing_fits(run, batches, tp_sizes))
    candidates = []
    for settings in tqdm(tried, desc="Trying splits", unit="split", disable=len(tried) < 8):
        result = PlannerResult(settings=settings)
        for index in range(min(_NUM_BATCHES, len(batches))):
            result.add(batches[index])
        used = run.state_bytes(settings) + result.peak_activation_bytes
        candidates.append(Candidate(result=result, bytes_per_device=used))
    return recommend(run, candidates)


def _divides(run: PredictedRun, tp_size: int) -> bool:
    """Whether a tensor-parallel size divides the devices of a stage and the heads."""
    devices = run.sizes.dp_cp_size * run.sizes.tensor_model_parallel_size
    return devices % tp_size == 0 and run.model.num_attention_heads % tp_size == 0


def _settings(run: PredictedRun, batches: Batches, tp_size: int) -> Iterator[PlanSettings]:
    """What to try with one tensor-parallel size; nothing where it cannot work."""
    if not _divides(run, tp_size):
        return
    longest = int(batches.lengths.max())
    for cap in _caps(run, batches, run.settings("balanced", tp_size=tp_size)):
        dynamic = run.settings("balanced", tp_size=tp_size, cap=cap)
        yield dynamic
        for size in static_cp_sizes(longest, dynamic):
            yield run.settings("static", tp_size=tp_size, cap=cap, context_parallel_size=size)


def _caps(run: PredictedRun, batches: Batches, settings: PlanSettings) -> list[int]:
    """Powers of two that hold the longest sample and fit the memory, and the user's own cap."""
    num_ranks, tp_size, padding = settings.num_ranks, settings.tp_size, settings.padding
    free = max(0.0, run.memory_bytes - run.state_bytes(settings))
    most = settings.cost_model.rows_that_fit(free)
    least = rows_per_rank(int(batches.lengths.max()), num_ranks, tp_size, padding)
    least = padding.pack_rows(least, num_ranks, tp_size)
    # More rows than a whole batch gives each rank change nothing.
    enough = max(least, -(-int(batches[0].sum()) // num_ranks))
    powers = [1 << k for k in range(least.bit_length() - 1, enough.bit_length() + 1)]
    caps = [power for power in powers if least <= power <= most][-_NUM_CAPS:]
    return sorted({*caps, *(cap for cap in (run.cap, least) if least <= cap <= most)})


def recommend(run: PredictedRun, candidates: Sequence[Candidate]) -> Suggestion:
    """The least tensor parallelism, memory and change with which a run is about as fast."""
    by_tp = {
        size: [c for c in candidates if c.settings.tp_size == size]
        for size in sorted({c.settings.tp_size for c in candidates})
    }
    rates = {size: _fastest(same).rate for size, same in by_tp.items()}
    tp_size = next(
        size for size in rates if rates[size] * _WORTH_TENSOR_PARALLEL > max(rates.values())
    )
    same, fastest = by_tp[tp_size], rates[tp_size]
    memory = run.memory_bytes
    # Of those about as fast: with room in the memory, then static, then the most room.
    best = min(
        (c for c in same if c.rate * _WORTHWHILE > fastest),
        key=lambda c: (c.bytes_per_device > _FULL * memory, not c.is_static, c.bytes_per_device),
    )
    if best.is_static:
        why = f"dynamic groups would gain less than {_WORTHWHILE - 1:.0%} for these lengths"
    else:
        static = _fastest(same, static=True)
        why = f"{best.rate / static.rate:.2f} times the best static split ({static.describe()})"
    reason = (
        f"It is predicted to run {best.rate:,.0f} tokens/s; {why}. It takes "
        f"{best.bytes_per_device / GIB:.1f} of {memory / GIB:.1f} GiB a device, and none of the "
        f"others with tp_size {tp_size} is {_WORTHWHILE - 1:.0%} faster."
    )
    for size in sorted(rates.keys() - {tp_size}):
        reason += f" tp_size {size}: {rates[size] / fastest - 1:+.1%} at best."
    if max(rates) > 1:
        reason += " Tensor parallelism's own communication has no price in these figures."
    return Suggestion(best=best, reason=reason, candidates=tuple(candidates))


def _fastest(candidates: Sequence[Candidate], *, static: bool | None = None) -> Candidate:
    chosen = (c for c in candidates if static is None or c.is_static == static)
    return max(chosen, key=lambda c: c.rate)


def _nothing_fits(run: PredictedRun, batches: Batches, tp_sizes: Sequence[int]) -> str:
    longest, heads = int(batches.lengths.max()), run.model.num_attention_heads
    devices = run.sizes.dp_cp_size * run.sizes.tensor_model_parallel_size
    tried = []
    for size in tp_sizes:
        if not _divides(run, size):
            tried.append(f"tp_size={size} does not divide {devices} devices and {heads} heads")
            continue
        settings = run.settings("balanced", tp_size=size)
        rows = rows_per_rank(longest, settings.num_ranks, size)
        activations = settings.cost_model.activation_bytes(rows) / GIB
        tried.append(
            f"tp_size={size} needs {run.state_bytes(settings) / GIB:.1f} GiB for weights and "
            f"optimizer states and {activations:.1f} GiB for {rows} rows, the least that hold "
            f"{longest} tokens"
        )
    return (
        f"no cap fits a device of {run.memory_bytes / GIB:.1f} GiB: {'; '.join(tried)}. Use more "
        "devices, recompute, a larger tensor-, pipeline- or expert-parallel size, or a smaller "
        "max_length"
    )
