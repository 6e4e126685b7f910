"""The lengths that a plan is for: where they come from, and the global batches they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.checks import check_at_least
from lightning_dcp.data.lengths import LengthDistribution, LengthTable, read_length_file
from lightning_dcp.data.pieces import DocumentCounts, LongDocuments, cut_documents

_MOST_SEQUENCES = 2**27  # one GiB of lengths


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """The lengths: one of length_file, data and lengths."""

    length_file: str | None = None
    """CSV with the header length,count, gzipped if its name ends in .gz."""
    data: list[str] | str | None = None
    """Paths or globs of text files and JSONL, as TextDataModule takes them; the token cache that
    this makes is the one that a fit uses."""
    tokenizer: str | None = None
    """data: directory of a Hugging Face tokenizer; none for bytes."""
    text_field: str = "text"
    """data: field of the JSON objects that holds the text."""
    append_eos: bool = True
    """data: whether every document ends with the end-of-document token."""
    cache_dir: str | None = None
    """data: folder of the token caches; none for the user's cache folder."""
    lengths: LengthDistribution | None = None
    """A distribution, e.g. --lengths.kind long_tail --lengths.low 1024; --lengths.help lists its
    options."""
    max_length: int | None = None
    """The longest sample, in tokens; none for the longest that the pool holds."""
    long_sequences: LongDocuments = "truncate"
    """What happens to longer ones: truncate, split in pieces, drop, or error. They are counted."""
    global_batch_size: int = 256
    """Samples of one optimizer step, over all ranks."""
    num_batches: int | Literal["all"] = 16
    """Global batches that are drawn from the lengths, or all: the whole input once, in an order
    that seed decides."""
    seed: int = 0
    """Of the drawing and the order."""

    def __post_init__(self) -> None:
        given = [n for n in ("length_file", "data", "lengths") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(
                f"the lengths come from {' and '.join(given) or 'nowhere'}: give one of "
                "length_file, data and lengths"
            )
        check_at_least("global_batch_size", self.global_batch_size)
        if self.num_batches != "all":
            check_at_least("num_batches", self.num_batches)
        elif self.lengths is not None:
            raise ValueError("num_batches='all' with lengths: a distribution has no end; say a few")
        if self.max_length is not None:
            check_at_least("max_length", self.max_length)
        check_at_least("seed", self.seed, 0)


@dataclass(frozen=True, eq=False)
class Batches:
    """Global batches of lengths.

    Attributes:
        lengths: Of all samples, in order; int64, ``[num_samples]``.
        global_batch_size: Samples of each batch but the last, which may have fewer.
        counts: What became of the sequences that were too long.
    """

    lengths: NDArray[np.int64]
    global_batch_size: int
    counts: DocumentCounts

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.global_batch_size)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.global_batch_size
        return self.lengths[start : start + self.global_batch_size]


def read_batches(options: LengthOptions, *, longest: int) -> Batches:
    """Reads or draws lengths and makes global batches of them.

    ``longest`` is the most tokens that the pool holds of one sample.

    Raises:
        ValueError: The input is wrong, ``max_length`` is more than the pool holds, or nothing is
            left of the lengths.
    """
    max_length = options.max_length or longest
    if max_length > longest:
        raise ValueError(
            f"max_length={max_length}, but at most {longest} tokens fit the pool: raise "
            "max_seqlen_per_dp_cp_rank or num_ranks, or lower max_length"
        )
    rng = np.random.default_rng(options.seed)
    drawn = _draw(options, rng)
    num_long = int((drawn > max_length).sum())
    if options.long_sequences == "error" and num_long:
        raise ValueError(
            f"{num_long:,} of {len(drawn):,} lengths are above {max_length}, up to "
            f"{int(drawn.max())}: raise max_seqlen_per_dp_cp_rank or num_ranks, or set "
            "long_sequences to truncate, split or drop"
        )
    pieces = cut_documents(
        np.zeros_like(drawn),
        drawn,
        max_length=max_length,
        min_length=1,
        long_documents=options.long_sequences,
    )
    # Pieces of one sequence are neighbours, and a whole table comes sorted.
    lengths = rng.permutation(pieces.ends - pieces.starts)
    if options.num_batches != "all":
        lengths = lengths[: options.num_batches * options.global_batch_size]
    if not len(lengths):
        raise ValueError(
            f"nothing is left of {len(drawn):,} lengths with max_length={max_length} and "
            f"long_sequences={options.long_sequences!r}"
        )
    return Batches(lengths, options.global_batch_size, pieces.counts)


def _draw(options: LengthOptions, rng: np.random.Generator) -> NDArray[np.int64]:
    source = _source(options)
    if options.num_batches != "all":
        return source.sample(options.num_batches * options.global_batch_size, rng)
    assert isinstance(source, LengthTable)
    num_sequences = int(source.counts.sum())
    if num_sequences > _MOST_SEQUENCES:
        raise ValueError(
            f"num_batches='all' of {num_sequences:,} sequences: at most "
            f"{_MOST_SEQUENCES:,}; draw a number of batches instead"
        )
    return np.repeat(source.lengths, source.counts)


def _source(options: LengthOptions) -> LengthTable | LengthDistribution:
    if options.lengths is not None:
        return options.lengths
    if options.length_file is not None:
        return read_length_file(options.length_file)
    assert options.data is not None
    # Here alone: it loads torch and Lightning.
    from lightning_dcp.data.text import TextDataModule

    data = TextDataModule(
        options.data,
        text_field=options.text_field,
        tokenizer=options.tokenizer,
        append_eos=options.append_eos,
        cache_dir=options.cache_dir,
    )
    return LengthTable(*np.unique(data.document_lengths(), return_counts=True))
