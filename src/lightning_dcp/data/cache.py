"""Tokenised documents on disk: written once, memory-mapped by every rank and worker."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from tqdm import tqdm

from lightning_dcp.config.files import whole_file
from lightning_dcp.data.documents import file_state, read_documents
from lightning_dcp.data.tokenizers import Tokenizer

_FORMAT_VERSION = 1
_DOCUMENT = np.dtype(
    [("end", "<i8"), ("file", "<i8"), ("line", "<i8"), ("num_replaced", "<i8"), ("hash", "<u8")]
)
_PROGRESS_FROM_BYTES = 16 * 2**20


@dataclass(frozen=True)
class CacheSource:
    """What a cache is made from; equal sources share one cache.

    Attributes:
        files: Absolute paths, in order.
        text_field: The field of JSON lines that holds the text.
        append_eos: Whether the end-of-document token follows every document that has text.
    """

    files: tuple[str, ...]
    text_field: str
    append_eos: bool

    def key(self, tokenizer: Tokenizer) -> str:
        """Hash of the paths, sizes and times of the files, the tokenizer, options and format."""
        parts = {
            "format": _FORMAT_VERSION,
            # Not their content: that would read the whole corpus at every start.
            "files": [file_state(file) for file in self.files],
            "tokenizer": list(tokenizer.identity),
            "text_field": self.text_field,
            "append_eos": self.append_eos,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class TokenCache:
    """A finished cache.

    Attributes:
        tokens_file: All tokens, one document after the other, as raw ``dtype``.
        dtype: The smallest unsigned type that holds the vocabulary.
        documents: One record a document, in order: ``end`` of its tokens (the end of the one before
            is its start), index of its ``file``, its ``line`` (0: the whole file), ``num_replaced``
            undecodable bytes, and the ``hash`` of its text. Memory-mapped, ``[num_documents]``.
        files: The files that ``file`` counts.
    """

    tokens_file: Path
    dtype: np.dtype
    documents: NDArray[np.void]
    files: tuple[str, ...]

    def name_of(self, document: int) -> str:
        """File, and line if it has one, of a document."""
        record = self.documents[document]
        line = f", line {record['line']}" if record["line"] else ""
        return f"{self.files[record['file']]}{line}"


def open_cache(folder: Path) -> TokenCache | None:
    """Memory-maps the cache in ``folder``; ``None`` if there is none, or not a whole one."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        dtype, num_documents = np.dtype(meta["dtype"]), meta["num_documents"]
        tokens_size = os.path.getsize(folder / "tokens.bin")
        documents_size = os.path.getsize(folder / "documents.bin")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # A copy that broke off shows in the sizes, without reading it all.
    if (tokens_size, documents_size) != (
        meta["num_tokens"] * dtype.itemsize,
        num_documents * _DOCUMENT.itemsize,
    ):
        return None
    documents: NDArray[np.void] = np.memmap(folder / "documents.bin", dtype=_DOCUMENT, mode="r")
    files = tuple(meta["source"]["files"])
    return TokenCache(folder / "tokens.bin", dtype, documents, files)


def load_or_build(
    source: CacheSource, tokenizer: Tokenizer, root: Path, *, retry: bool
) -> TokenCache:
    """The cache of ``source``: opened if it exists, else tokenised and written first.

    One process at a time builds a cache; the others wait for it.

    Args:
        source: Files and options.
        tokenizer: Makes tokens of texts.
        root: The folder of all caches.
        retry: Whether to read the input again where an earlier try found it wrong, and to show
            a progress bar if it is large.

    Raises:
        ValueError: The input is wrong (see :func:`read_documents`), or holds no text at all, or
            ``root`` cannot be written.
    """
    key = source.key(tokenizer)
    folder = root / key
    cache = open_cache(folder)
    if cache is not None:
        return cache
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cache_dir={str(root)!r} cannot be made: {error}") from error
    if not os.access(root, os.W_OK):
        raise ValueError(f"cache_dir={str(root)!r} is not writable: name another folder")
    fault_file = root / f"{key}.error"
    with FileLock(root / f"{key}.lock"):
        # The process that held the lock before may have built it, or found the input wrong.
        cache = open_cache(folder)
        if cache is not None:
            return cache
        if fault_file.exists() and not retry:
            raise ValueError(fault_file.read_text())
        fault_file.unlink(missing_ok=True)
        try:
            _build(source, tokenizer, folder, progress=retry)
        except ValueError as error:
            # Kept beside the cache: the other ranks of the run, which wait for the lock, then fail
            # alike without reading it all again.
            with whole_file(fault_file) as file:
                file.write_text(str(error))
            raise
    cache = open_cache(folder)
    if cache is None:
        raise RuntimeError(f"the token cache {folder} was written, but cannot be read back")
    return cache


def _build(source: CacheSource, tokenizer: Tokenizer, folder: Path, *, progress: bool) -> None:
    # Beside the folder, and renamed when complete: nobody opens half of a cache.
    prefix = f"{folder.name}.tmp-"
    for left_behind in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_behind)  # by a process that was killed: we hold the lock
    scratch = folder.with_name(f"{prefix}{os.getpid()}")
    scratch.mkdir()
    try:
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        with (
            open(scratch / "tokens.bin", "wb") as tokens,
            open(scratch / "documents.bin", "wb") as documents,
        ):
            num_documents, num_tokens = _tokenise(
                source, tokenizer, dtype, tokens, documents, progress=progress
            )
            # On disk before the rename: a power cut must not leave a whole folder of empty files.
            for stream in (tokens, documents):
                stream.flush()
                os.fsync(stream.fileno())
        meta = {
            "format": _FORMAT_VERSION,
            "dtype": dtype.name,
            "num_documents": num_documents,
            "num_tokens": num_tokens,
            "source": asdict(source),
        }
        (scratch / "meta.json").write_text(json.dumps(meta))
        if folder.exists():  # not a whole cache, else we would not be here
            shutil.rmtree(folder)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tokenise(
    source: CacheSource,
    tokenizer: Tokenizer,
    dtype: np.dtype,
    tokens: BinaryIO,
    documents: BinaryIO,
    *,
    progress: bool,
) -> tuple[int, int]:
    """Writes all tokens and document records; returns the number of documents and of tokens."""
    sizes = [os.path.getsize(file) for file in source.files]
    total = sum(sizes)
    end = num_documents = 0
    eos = np.array([tokenizer.eos_id] if source.append_eos else [], dtype=np.int64)
    # A small corpus is done before a bar says anything, and only one process shows it.
    hidden = not (progress and total >= _PROGRESS_FROM_BYTES)
    with tqdm(total=total, desc="Tokenising", unit="B", unit_scale=True, disable=hidden) as bar:
        done = 0
        for index, file in enumerate(source.files):
            for document in read_documents(file, source.text_field):
                ids = tokenizer.encode(document.text)
                # An empty document has a record, for the counts, and no end token of its own.
                if len(ids):
                    tokens.write(_as_bytes(np.append(ids, eos), dtype, file))
                    end += len(ids) + len(eos)
                # Not Python's hash(), which differs from process to process.
                digest = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
                text_hash = int.from_bytes(digest, "little")
                record = (end, index, document.line, document.num_replaced, text_hash)
                documents.write(np.array(record, dtype=_DOCUMENT).tobytes())
                num_documents += 1
                bar.update(done + document.position - bar.n)
            done += sizes[index]
    if end == 0:
        more = f" and {len(sizes) - 1} more files" if len(sizes) > 1 else ""
        raise ValueError(
            f"there is no text in {source.files[0]}{more}: {num_documents} documents, all empty"
        )
    return num_documents, end


def _as_bytes(ids: NDArray[Any], dtype: np.dtype, file: str) -> bytes:
    # astype would wrap ids that do not fit, silently.
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest > np.iinfo(dtype).max:
        raise ValueError(
            f"{file}: the tokenizer gave ids from {lowest} to {highest}, but its vocabulary ends"
            f" below {np.iinfo(dtype).max + 1}"
        )
    return ids.astype(dtype).tobytes()
