"""From paths and globs to the documents that the files hold."""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple, cast

STDLIB = "{stdlib}"
_JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
_BOM = b"\xef\xbb\xbf"
_INSTALLED = re.compile(r"/(site|dist)-packages(/|$)")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Document(NamedTuple):
    """One text of a file."""

    text: str
    line: int
    """The line of the file that it comes from, from 1; 0 if the whole file is the document."""
    num_replaced: int
    """Bytes that are not UTF-8, each replaced by U+FFFD."""
    position: int
    """Bytes of the file, as stored, that were read so far."""


def find_files(patterns: Sequence[str], *, option: str) -> list[str]:
    """The files of paths and globs, each once; in the order of the patterns, sorted in each.

    Args:
        patterns: Paths or globs, ``**`` for any depth of folders. ``{stdlib}`` stands for the
            folder of Python's standard library; packages installed beneath it are left out.
        option: The option that the patterns come from, for the error.

    Raises:
        ValueError: A pattern matches no file.
    """
    found: dict[str, None] = {}
    stdlib = sysconfig.get_path("stdlib")
    for pattern in patterns:
        path = os.path.expanduser(pattern.replace(STDLIB, stdlib))
        # A path that is there is meant as it is, though its name may look like a glob ("a[1].txt").
        matches = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
        if STDLIB in pattern:
            # Else a corpus would depend on what is installed: packages lie beneath it.
            matches = [match for match in matches if not _INSTALLED.search(match[len(stdlib) :])]
        # Sorted: every machine then numbers the documents alike.
        files = sorted(os.path.abspath(match) for match in matches if os.path.isfile(match))
        if not files:
            shown = pattern if path == pattern else f"{pattern} ({path})"
            folder = f": it is a folder, write {shown}/**/* for the files in it"
            raise ValueError(
                f"{option}: {shown} matches no file" + (folder if os.path.isdir(path) else "")
            )
        found.update(dict.fromkeys(files))
    return list(found)


def file_state(path: str) -> list[Any]:
    """Path, size in bytes and time of last change (nanoseconds), as JSON values."""
    status = os.stat(path)
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns]


def read_documents(path: str, text_field: str) -> Iterator[Document]:
    """The documents of one file, in order; one is in memory at a time.

    Args:
        path: ``.jsonl``, ``.jsonl.gz`` and ``.json.gz`` hold one JSON object a line; any other file
            is one document. ``.gz`` is unpacked. A byte order mark is skipped.
        text_field: The field of the JSON objects that holds the text.

    Raises:
        ValueError: A line that is no JSON object with a text in ``text_field``, or a file that
            is no gzip in spite of its name; the message names the file and the line.
    """
    with open(path, "rb") as raw:
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if path.endswith(".gz") else raw
        try:
            if path.endswith(_JSON_LINES):
                for number, line in enumerate(stream, start=1):
                    line = line.removeprefix(_BOM) if number == 1 else line
                    if line.strip():
                        text = _text_of_line(line, f"{path}, line {number}", text_field)
                        text, num_replaced = _clean(text)
                        # raw, not stream: the progress bar counts bytes of the file as stored.
                        yield Document(text, number, num_replaced, raw.tell())
            else:
                text, num_replaced = _clean(_decode(stream.read().removeprefix(_BOM)))
                yield Document(text, 0, num_replaced, raw.tell())
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be unpacked with gzip: {error}") from error


def _decode(data: bytes) -> str:
    # Bytes that are no UTF-8 become surrogates, which _clean counts and replaces.
    return data.decode("utf-8", "surrogateescape")


def _clean(text: str) -> tuple[str, int]:
    """Replaces undecodable bytes, and lone surrogates that JSON escapes may hold, by U+FFFD."""
    return _SURROGATE.subn("\ufffd", text)


def _text_of_line(line: bytes, where: str, text_field: str) -> str:
    try:
        record = json.loads(_decode(line))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(record).__name__}")
    if text_field not in record:
        keys = ", ".join(sorted(record)) or "none"
        raise ValueError(f"{where}: there is no field {text_field!r} (text_field); fields: {keys}")
    text = record[text_field]
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: {text_field!r} (text_field) must be a text, found {type(text).__name__}"
        )
    return text
