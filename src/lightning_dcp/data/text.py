"""TextDataModule: real documents from files as global batches."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, override

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dcp.config.checks import check_one_of
from lightning_dcp.data.base import GlobalBatchDataModule, PredictSplit
from lightning_dcp.data.cache import CacheSource, TokenCache, load_or_build
from lightning_dcp.data.documents import find_files
from lightning_dcp.data.pieces import DocumentCounts, LongDocuments, Pieces, cut_documents
from lightning_dcp.data.tokenizers import Tokenizer, load_tokenizer


class TextDataModule(GlobalBatchDataModule):
    """Documents from text files or JSON lines, tokenised once, as jagged global batches.

    Every rank yields the same global batches: ``{"input_ids": jagged int64}``, in an order that
    depends on ``seed`` and the epoch alone. Labels are the inputs; packing shifts them.

    One process per node tokenises into a cache, which all ranks and workers memory-map. What is
    wrong with the input is raised by ``setup``, on every rank alike.

    Args:
        data: Paths or globs of the training data, ``**`` for any depth of folders. Files named
            ``.jsonl``, ``.jsonl.gz`` or ``.json.gz`` hold one JSON object a line, any other file is
            one UTF-8 document (undecodable bytes are replaced and counted). ``{stdlib}`` stands for
            the folder of Python's standard library, real text that every machine has.
        text_field: Field of the JSON objects that holds the text.
        tokenizer: Directory of a Hugging Face tokenizer; none for bytes (257 token ids).
        max_length: The longest sample, in tokens.
        long_documents: What happens to documents above ``max_length``: split in pieces of that
            length, truncate, drop, or error.
        global_batch_size: Samples in one optimizer step, over all ranks.
        val_data: Paths or globs of the validation data.
        val_fraction: Share of the documents of ``data`` held out for validation instead, chosen by
            a hash of the text, so that every machine holds out the same.
        num_workers: Processes that load batches, on each rank; 0: the training process does.
        append_eos: Whether every document ends with the end-of-document token.
        min_length: The shortest sample, in tokens; shorter documents and pieces are dropped.
        shuffle: Whether training samples come in a new order every epoch.
        seed: Seed of the shuffling.
        cache_dir: Folder of the token caches; none for ``lightning-dcp`` in the user's cache folder
            (``XDG_CACHE_HOME``).
        predict_split: Whose samples ``predict`` runs on, in order: the training or the validation
            data.

    Attributes:
        train_counts: What became of the training documents; ``None`` before ``setup``.
        val_counts: The same for validation; ``None`` without validation data.
    """

    def __init__(
        self,
        data: list[str] | str,
        *,
        text_field: str = "text",
        tokenizer: str | None = None,
        max_length: int = 4096,
        long_documents: LongDocuments = "split",
        global_batch_size: int = 32,
        val_data: list[str] | str | None = None,
        val_fraction: float = 0.0,
        num_workers: int = 2,
        append_eos: bool = True,
        min_length: int = 2,
        shuffle: bool = True,
        seed: int = 0,
        cache_dir: str | None = None,
        predict_split: PredictSplit = "train",
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size,
            max_length=max_length,
            min_length=min_length,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
            predict_split=predict_split,
        )
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must be at least 0 and below 1")
        if val_fraction and val_data:
            raise ValueError(
                f"val_fraction={val_fraction} and val_data={val_data!r}: give only one"
            )
        self._data = _as_list("data", data)
        self._val_data = [] if val_data is None else _as_list("val_data", val_data)
        self._text_field = text_field
        self._tokenizer_directory = tokenizer
        choices: tuple[LongDocuments, ...] = get_args(LongDocuments)
        self._long_documents = check_one_of("long_documents", long_documents, choices)
        self._max_length = max_length
        self._val_fraction = val_fraction
        self._append_eos = append_eos
        self._cache_dir = cache_dir
        self.train_counts: DocumentCounts | None = None
        self.val_counts: DocumentCounts | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded on first use."""
        return load_tokenizer(self._tokenizer_directory)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; known before ``setup``."""
        return self.tokenizer.vocab_size

    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of each document of ``data``, int64 ``[num_documents]``, before any is cut.

        Tokenises them first; raises a ValueError that says what is wrong with the input.
        """
        cache = self._load("data", retry=True)
        assert cache is not None
        return np.diff(np.asarray(cache.documents["end"], dtype=np.int64), prepend=0)

    @override
    def prepare_data(self) -> None:
        try:
            for option in ("data", "val_data"):
                self._load(option, retry=True)
        except Exception:
            # One rank is here while the others wait in a barrier: an error would leave them there.
            # `setup` runs into it again, on every rank.
            return

    @override
    def setup(self, stage: str | None = None) -> None:
        before = (self.train_counts, self.val_counts)
        # No rank reads input again that was found wrong: all raise what the first one found.
        cache = self._load("data", retry=False)
        val_cache = self._load("val_data", retry=False)
        assert cache is not None
        # The hash as a number in [0, 1): a document is held out whatever else is in the files.
        held_out = np.asarray(cache.documents["hash"]) / 2.0**64 < self._val_fraction
        self.train_set, self.train_counts = self._samples("data", cache, ~held_out)
        if val_cache is not None:
            every = np.ones(len(val_cache.documents), dtype=bool)
            self.val_set, self.val_counts = self._samples("val_data", val_cache, every)
        elif self._val_fraction:
            self.val_set, self.val_counts = self._samples("val_fraction", cache, held_out)
        if stage in (None, "fit") and self.train_counts.samples < self.global_batch_size:
            raise ValueError(
                f"data: {self.train_counts}: fewer samples than global_batch_size="
                f"{self.global_batch_size}, so there is no full batch to train on"
            )
        # Lightning sets up once for each stage: said again only if it changed.
        if before != (self.train_counts, self.val_counts):
            rank_zero_info(f"Training data: {self.train_counts}")
            if self.val_counts:
                rank_zero_info(f"Validation data: {self.val_counts}")

    def _load(self, option: str, *, retry: bool) -> TokenCache | None:
        patterns = self._data if option == "data" else self._val_data
        if not patterns:
            return None
        files = find_files(patterns, option=option)
        if self._append_eos and self.tokenizer.eos_id is None:
            raise ValueError(
                f"append_eos=True, but tokenizer={self._tokenizer_directory!r} has no end-of-text"
                " token: set append_eos=False, or give the tokenizer an eos_token"
            )
        source = CacheSource(tuple(files), self._text_field, self._append_eos)
        root = _cache_root(self._cache_dir)
        return load_or_build(source, self.tokenizer, root, retry=retry)

    def _samples(
        self, option: str, cache: TokenCache, chosen: NDArray[np.bool_]
    ) -> tuple[TokenRanges, DocumentCounts]:
        """Samples of the chosen documents, ``[num_documents]``; refuses to make none."""
        ends = np.asarray(cache.documents["end"])
        lengths = np.diff(ends, prepend=0)
        starts = ends - lengths
        too_long = np.flatnonzero(chosen & (lengths > self._max_length))
        if self._long_documents == "error" and len(too_long):
            first = int(too_long[0])
            raise ValueError(
                f"{option}: {cache.name_of(first)} has {lengths[first]} tokens, above max_length="
                f"{self._max_length}, as {len(too_long)} of {len(lengths)} documents do: raise "
                "max_length, or set long_documents to split, truncate or drop"
            )
        pieces = cut_documents(
            starts[chosen],
            ends[chosen],
            max_length=self._max_length,
            min_length=self._min_length,
            long_documents=self._long_documents,
            replaced_bytes=int(cache.documents["num_replaced"][chosen].sum()),
        )
        if len(pieces.starts) == 0:
            raise ValueError(
                f"{option}: {pieces.counts}: nothing is left (val_fraction={self._val_fraction},"
                f" min_length={self._min_length}, max_length={self._max_length},"
                f" long_documents={self._long_documents!r})"
            )
        return TokenRanges(cache, pieces), pieces.counts


class TokenRanges(Dataset[dict[str, Tensor]]):
    """Samples as slices of a memory-mapped file of tokens: ``{"input_ids": int64, [length]}``."""

    def __init__(self, cache: TokenCache, pieces: Pieces) -> None:
        self._tokens_file, self._dtype = cache.tokens_file, cache.dtype
        self._starts, self._ends = pieces.starts, pieces.ends
        self.lengths = pieces.ends - pieces.starts
        self._tokens: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # Mapped on first use, in the process that reads: ranks and workers share the pages.
        if self._tokens is None:
            self._tokens = np.memmap(self._tokens_file, dtype=self._dtype, mode="r")
        tokens = self._tokens[self._starts[index] : self._ends[index]]
        # A copy: the map is read-only, which torch warns of.
        return {"input_ids": torch.from_numpy(np.array(tokens, dtype=np.int64))}

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps the file itself; pickling a memory map would send all of its tokens.
        return self.__dict__ | {"_tokens": None}


def _as_list(option: str, patterns: list[str] | str) -> list[str]:
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if not listed or not all(listed):
        raise ValueError(
            f"{option}={patterns!r}: give one path or glob or more, none of them empty"
        )
    return listed


def _cache_root(cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    # The XDG base directory specification: a value that is empty or not absolute does not count.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "lightning-dcp" / "text"
