"""What a comparison of static and dynamic context parallelism says, from the steps of its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One training step of one run.

    Attributes:
        step: Optimizer steps so far, this one included.
        seconds: Wall-clock time, data and logging included, the device synchronised.
        predicted_seconds: Forward and backward passes, as ``plan`` predicts them.
        tokens: Target tokens of the global batch.
        sequence_tokens: Tokens of the global batch's sequences, without padding.
        loss: Mean loss of the target tokens.
        cp_sizes: Number of micro-batches by CP size.
    """

    step: int
    seconds: float
    predicted_seconds: float
    tokens: int
    sequence_tokens: int
    loss: float
    cp_sizes: dict[int, int]

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> TimedStep:
        """The step of a record that ``StepTimes`` wrote."""
        sizes = {int(size): int(number) for size, number in record["cp_sizes"].items()}
        return cls(**{**record, "cp_sizes": sizes})


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Static against dynamic context parallelism, on the same steps.

    Attributes:
        num_steps: Measured steps of each run.
        num_rounds: Runs of each kind.
        static_seconds: Median step time of the static runs.
        dynamic_seconds: Median step time of the dynamic runs.
        static_tokens: Tokens of the sequences that a static run processed.
        dynamic_tokens: The same of a dynamic run.
        ratio: Static time over dynamic time, all measured steps together; None where the two
            processed different tokens. Above 1 means that dynamic is faster.
        predicted_ratio: The same of the times that ``plan`` predicts.
        ratio_quartiles: First and third quartile of the ratio, step by step; None likewise.
        mean_loss_difference: Mean relative difference of the two losses of a step.
        max_loss_difference: The largest.
        cp_sizes: Micro-batches by CP size of a dynamic run.
    """

    num_steps: int
    num_rounds: int
    static_seconds: float
    dynamic_seconds: float
    static_tokens: int
    dynamic_tokens: int
    ratio: float | None
    predicted_ratio: float | None
    ratio_quartiles: tuple[float, float] | None
    mean_loss_difference: float
    max_loss_difference: float
    cp_sizes: dict[int, int]

    @property
    def static_tokens_per_second(self) -> float:
        """Tokens of sequences a second, of the static runs."""
        return self.static_tokens / self.num_steps / self.static_seconds

    @property
    def dynamic_tokens_per_second(self) -> float:
        """Tokens of sequences a second, of the dynamic runs."""
        return self.dynamic_tokens / self.num_steps / self.dynamic_seconds


type Runs = Sequence[Sequence[TimedStep]]


def compare_steps(static: Runs, dynamic: Runs) -> Comparison:
    """Compares runs of both kinds, made in turn.

    Args:
        static: For each round, the measured steps of the static run.
        dynamic: For each round, those of the dynamic run; the same steps.

    Raises:
        ValueError: There is nothing to compare, or the runs have different steps.
    """
    rounds = [*static, *dynamic]
    steps = [[step.step for step in run] for run in rounds]
    if not static or len(static) != len(dynamic) or not steps[0]:
        raise ValueError(
            f"Found {len(static)} static and {len(dynamic)} dynamic runs with "
            f"{[len(run) for run in steps]} measured steps; both kinds need the same number of "
            "runs, and at least one step each."
        )
    if any(run != steps[0] for run in steps):
        raise ValueError(f"The runs have different steps: {steps}.")
    # Step by step: as many tokens in all may still be other batches.
    same = _tokens(static[0]) == _tokens(dynamic[0])
    # The mean over rounds first: noise of one round is no pair of another's.
    pairs = [
        (mean(run[i].seconds for run in static), mean(run[i].seconds for run in dynamic))
        for i in range(len(steps[0]))
    ]
    differences = [
        # A loss of 0 must not divide.
        abs(a.loss - b.loss) / max(abs(a.loss), 1e-12)
        for a, b in zip(static[0], dynamic[0], strict=True)
    ]
    cp_sizes: Counter[int] = Counter()
    for step in dynamic[0]:
        cp_sizes.update(step.cp_sizes)
    return Comparison(
        num_steps=len(steps[0]),
        num_rounds=len(static),
        static_seconds=median(step.seconds for run in static for step in run),
        dynamic_seconds=median(step.seconds for run in dynamic for step in run),
        static_tokens=sum(_tokens(static[0])),
        dynamic_tokens=sum(_tokens(dynamic[0])),
        # Of sums: in a mean of ratios short steps would count as much as long ones.
        ratio=sum(a for a, _ in pairs) / sum(b for _, b in pairs) if same else None,
        predicted_ratio=_predicted(static[0]) / _predicted(dynamic[0]) if same else None,
        ratio_quartiles=_quartiles([a / b for a, b in pairs]) if same else None,
        mean_loss_difference=mean(differences),
        max_loss_difference=max(differences),
        cp_sizes=dict(sorted(cp_sizes.items())),
    )


def describe(comparison: Comparison) -> str:
    """The comparison in lines for a person."""
    c = comparison
    lines = [
        f"{c.num_steps} steps in {c.num_rounds} rounds, in turn on the same ranks",
        f"{'':9}{'step time (s)':>15}{'tokens/s':>15}{'tokens':>15}",
        _line("static", c.static_seconds, c.static_tokens_per_second, c.static_tokens),
        _line("dynamic", c.dynamic_seconds, c.dynamic_tokens_per_second, c.dynamic_tokens),
        "dynamic's CP sizes: " + ", ".join(f"{s} (x{n})" for s, n in c.cp_sizes.items()),
    ]
    if c.ratio is None or c.ratio_quartiles is None:
        lines.append(
            f"no ratio: the runs processed different tokens, {c.static_tokens:,} and "
            f"{c.dynamic_tokens:,}; they are not comparable"
        )
    else:
        low, high = c.ratio_quartiles
        lines.append(
            f"dynamic is {c.ratio:.3f} times as fast as static (quartiles of the steps "
            f"{low:.3f} to {high:.3f}); plan predicts {c.predicted_ratio:.3f}"
        )
    lines.append(
        f"losses of the same step differ by {c.mean_loss_difference:.2e} on average, "
        f"{c.max_loss_difference:.2e} at most (relative)"
    )
    return "\n".join(lines)


def _line(name: str, seconds: float, tokens_per_second: float, tokens: int) -> str:
    return f"{name:9}{seconds:>15.3f}{tokens_per_second:>15,.0f}{tokens:>15,}"


def _predicted(run: Sequence[TimedStep]) -> float:
    return sum(step.predicted_seconds for step in run)


def _tokens(run: Sequence[TimedStep]) -> list[int]:
    return [step.sequence_tokens for step in run]


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    # Inclusive: the steps are all there are, no sample of more.
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third
