"""Sequence lengths for synthetic data: length files and distributions. NumPy only, no torch."""

from __future__ import annotations

import csv
import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.checks import check_one_of

Kind = Literal["uniform", "lognormal", "bimodal", "constant", "long_tail"]


@dataclass(frozen=True, eq=False)
class LengthTable:
    """How many sequences have which length.

    Attributes:
        lengths: Lengths in tokens, ascending, without duplicates; int64, ``[num_lengths]``.
        counts: How many sequences have that length, positive; int64, ``[num_lengths]``.
    """

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]

    def sample(self, num_samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draws lengths with replacement, in proportion to their counts; int64, ``[num_samples]``.

        Equal generators give equal draws, and a smaller number of samples a prefix of them.
        """
        cumulative = np.cumsum(self.counts)
        # One random number a sample, so that fewer samples are a prefix of more.
        targets = (rng.random(num_samples) * cumulative[-1]).astype(np.int64)
        # "right": a target that equals a cumulative count is the first of the next length.
        drawn: NDArray[np.int64] = self.lengths[np.searchsorted(cumulative, targets, side="right")]
        return drawn


@dataclass(frozen=True)
class LengthDistribution:
    """Sequence lengths drawn from a distribution by name; every length is in ``[low, high]``."""

    kind: Kind = "long_tail"
    """uniform; lognormal around `median`; bimodal: the lowest and the highest quarter of the range;
    constant: `low` always; long_tail: a Pareto tail, most lengths near `low`."""
    low: int = 64
    """The shortest length, in tokens."""
    high: int | None = None
    """The longest length, in tokens (16 times `low` if not given). For constant: none, or `low`."""
    median: float | None = None
    """lognormal: the median length, in tokens (the geometric mean of low and high if not given)."""
    sigma: float = 1.0
    """lognormal: the standard deviation of the logarithm."""
    alpha: float = 1.2
    """long_tail: the exponent of the tail, P(length > x) = (low / x) ** alpha."""
    long_fraction: float = 0.1
    """bimodal: the share of sequences in the highest quarter of the range."""

    def __post_init__(self) -> None:
        check_one_of("lengths: kind", self.kind, get_args(Kind))
        if self.low < 1:
            raise ValueError(f"lengths: low={self.low}, but a sequence has 1 token or more")
        if self.longest < self.low:
            raise ValueError(f"lengths: high={self.high} is below low={self.low}")
        if self.kind == "constant" and self.longest != self.low:
            raise ValueError(
                f"lengths: kind='constant' with low={self.low} and high={self.high}: leave high out"
            )
        if self.median is not None and not self.low <= self.median <= self.longest:
            raise ValueError(
                f"lengths: median={self.median} is outside [low, high] ="
                f" [{self.low}, {self.longest}]"
            )
        if not (self.sigma > 0 and self.alpha > 0):
            raise ValueError(
                f"lengths: sigma={self.sigma} and alpha={self.alpha} must both be above 0"
            )
        if not 0 <= self.long_fraction <= 1:
            raise ValueError(f"lengths: long_fraction={self.long_fraction} is outside [0, 1]")

    @property
    def longest(self) -> int:
        """``high``, or what stands for it when it is not given."""
        if self.high is not None:
            return self.high
        return self.low if self.kind == "constant" else 16 * self.low

    def sample(self, num_samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draws lengths; arguments and result as for :meth:`LengthTable.sample`."""
        low, high = self.low, self.longest
        match self.kind:
            case "constant":
                drawn = np.full(num_samples, float(low))
            case "uniform":
                drawn = low + rng.random(num_samples) * (high - low + 1)
            case "lognormal":
                median = self.median or np.sqrt(float(low) * high)
                drawn = median * np.exp(self.sigma * rng.standard_normal(num_samples))
            case "bimodal":
                # One row a sample, so that fewer samples are a prefix of more.
                choice, position = rng.random((num_samples, 2)).T
                quarter = (high - low) // 4
                start = np.where(choice < self.long_fraction, high - quarter, low)
                drawn = start + position * (quarter + 1)
            case "long_tail":
                # 1 - u, which is never 0: u may be.
                drawn = low * (1.0 - rng.random(num_samples)) ** (-1.0 / self.alpha)
        # Clipped as floats: the end of a long tail may be above what int64 holds.
        clipped: NDArray[np.int64] = np.clip(drawn, low, high).astype(np.int64)
        return clipped


def read_length_file(path: str | os.PathLike[str]) -> LengthTable:
    """Reads a length file: a CSV, gzipped if the name ends in ``.gz``, with ``length,count`` lines.

    Args:
        path: The file. Its first line is the header ``length,count``; every other line holds two
            positive integers. A length may come more than once: its counts add up.

    Raises:
        ValueError: The file does not exist or is not of that form; the message names the file, the
            line and what was found there.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"length_file: there is no file {str(path)!r}")
    try:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8", newline="") as stream:
            pairs = np.array(list(_rows(file, stream)), dtype=np.int64).reshape(-1, 2)
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"length_file: {file} cannot be read as a (gzipped) CSV: {error}"
        ) from error
    except OverflowError as error:
        raise ValueError(f"length_file: {file} holds a number above 2**63 - 1") from error
    if len(pairs) == 0:
        raise ValueError(f"length_file: {file} holds no line of numbers below its header")
    lengths, index = np.unique(pairs[:, 0], return_inverse=True)
    counts = np.zeros(len(lengths), dtype=np.int64)
    # Not bincount's weights, which add up as floats: counts stay exact above 2**53.
    np.add.at(counts, index, pairs[:, 1])
    return LengthTable(lengths=lengths, counts=counts)


def _rows(file: Path, stream: TextIO) -> Iterator[tuple[int, int]]:
    reader = csv.reader(stream)
    header = next(reader, None)
    if header != ["length", "count"]:
        raise ValueError(
            f"length_file: {file}, line 1: expected the header 'length,count', found {header!r}"
        )
    for row in reader:
        # A blank line, such as one at the end.
        if not row:
            continue
        # int() alone takes "1_000", "-1", " 7" and the digits of other scripts as well.
        numbers = [int(field) for field in row if field.isascii() and field.isdigit()]
        if len(row) != 2 or len(numbers) != 2 or min(numbers) < 1:
            raise ValueError(
                f"length_file: {file}, line {reader.line_num}: expected two positive integers"
                f" (length,count), found {','.join(row)!r}"
            )
        yield numbers[0], numbers[1]
