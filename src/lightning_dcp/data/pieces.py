"""Which tokens of the documents make samples: the policy for long and short documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LongDocuments = Literal["split", "truncate", "drop", "error"]


@dataclass(frozen=True, kw_only=True)
class DocumentCounts:
    """What became of the documents, of which ``documents`` counts all, empty ones too.

    ``str`` of it says each number in words. ``split`` to ``dropped_short`` count documents,
    ``dropped_tokens`` those in no sample, whatever the reason.
    """

    documents: int
    samples: int
    tokens: int
    split: int
    truncated: int
    dropped_long: int
    dropped_short: int
    dropped_tokens: int
    replaced_bytes: int

    def __str__(self) -> str:
        parts = {
            "documents split": self.split,
            "documents truncated": self.truncated,
            "documents dropped as too long": self.dropped_long,
            "documents dropped as too short or empty": self.dropped_short,
            "tokens in no sample": self.dropped_tokens,
            "undecodable bytes replaced": self.replaced_bytes,
        }
        notes = "".join(f", {number:,} {what}" for what, number in parts.items() if number)
        return (
            f"{self.samples:,} samples with {self.tokens:,} tokens from"
            f" {self.documents:,} documents{notes}"
        )


@dataclass(frozen=True, eq=False)
class Pieces:
    """The samples of some documents, as ranges of tokens, and what became of the documents."""

    starts: NDArray[np.int64]
    """Index of the first token of each sample, ``[num_samples]``."""
    ends: NDArray[np.int64]
    """Index after its last token, ``[num_samples]``."""
    counts: DocumentCounts


def cut_documents(
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    *,
    max_length: int,
    min_length: int,
    long_documents: LongDocuments,
    replaced_bytes: int = 0,
) -> Pieces:
    """Makes samples of documents.

    A document below ``min_length`` is dropped. One above ``max_length`` is dropped, cut off, or
    split in pieces of ``max_length``, of which the last is dropped if it is below ``min_length``.
    The samples come in the order of the documents, whose ``starts`` and ``ends`` are as those of
    :class:`Pieces`. ``long_documents="error"`` is the caller's business.
    """
    lengths = ends - starts
    short, long = lengths < min_length, lengths > max_length
    dropped = short | (long if long_documents == "drop" else False)
    pieces = np.where(dropped, 0, 1)
    if long_documents == "split":
        # A rest that is too short to be a sample is dropped.
        whole, rest = np.divmod(lengths, max_length)
        pieces = np.where(long, whole + (rest >= min_length), pieces)
    # All pieces of all documents at once: a corpus has millions. A piece's number within its
    # document is its number among all pieces less that of its document's first.
    first = np.cumsum(pieces) - pieces
    index_in_document = np.arange(pieces.sum()) - np.repeat(first, pieces)
    sample_starts = np.repeat(starts, pieces) + index_in_document * max_length
    sample_ends = np.minimum(sample_starts + max_length, np.repeat(ends, pieces))
    tokens = int((sample_ends - sample_starts).sum())
    num_long = int(long.sum())
    counts = DocumentCounts(
        documents=len(lengths),
        samples=len(sample_starts),
        tokens=tokens,
        split=num_long if long_documents == "split" else 0,
        truncated=num_long if long_documents == "truncate" else 0,
        dropped_long=num_long if long_documents == "drop" else 0,
        dropped_short=int(short.sum()),
        dropped_tokens=int(lengths.sum()) - tokens,
        replaced_bytes=replaced_bytes,
    )
    return Pieces(sample_starts, sample_ends, counts)
