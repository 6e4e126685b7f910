"""Text to token ids: bytes by default, or a Hugging Face tokenizer directory."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.config.requirements import TRANSFORMERS_AVAILABLE
from lightning_dcp.data.documents import file_state


class Tokenizer(Protocol):
    """What :class:`~lightning_dcp.data.TextDataModule` needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    @property
    def eos_id(self) -> int | None:
        """The token that ends a document, if there is one."""

    @property
    def identity(self) -> Sequence[Any]:
        """JSON values that change when the tokenizer does."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids of a text, ``[length]``, without special tokens."""

    def decode(self, ids: Any) -> str:
        """The text of token ids."""


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token, 0 to 255; 256 ends a document."""

    vocab_size: int = 257
    eos_id: int | None = 256
    identity: Sequence[Any] = ("bytes", 1)

    def encode(self, text: str) -> NDArray[np.int64]:
        """The bytes of a text as token ids, ``[num_bytes]``; no end-of-document token."""
        # Lone surrogates have no UTF-8 form; text from files holds none.
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Any) -> str:
        """The text of token ids, ``[length]``; ends of documents leave nothing behind."""
        array = np.asarray(ids, dtype=np.int64)
        return bytes(array[array != self.eos_id].astype(np.uint8)).decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """A tokenizer that transformers can load from a directory, used without special tokens.

    Args:
        directory: Holds ``tokenizer.json`` or the files of a slower tokenizer.

    Raises:
        ValueError: The directory does not exist or holds no tokenizer.
        ModuleNotFoundError: transformers is not installed.
    """

    def __init__(self, directory: str) -> None:
        folder = Path(directory).expanduser()
        if not folder.is_dir():
            raise ValueError(f"tokenizer={directory!r} is not a directory")
        if not TRANSFORMERS_AVAILABLE:
            raise ModuleNotFoundError(f"tokenizer={directory!r}: {TRANSFORMERS_AVAILABLE}")
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers and tokenizers raise a dozen kinds here
            raise ValueError(
                f"tokenizer={directory!r} holds no tokenizer that transformers can load: {error}"
            ) from error
        ids = self._tokenizer.get_vocab().values()
        # Ids may have gaps, so that the largest can be above the number of tokens.
        self.vocab_size: int = max(len(self._tokenizer), 1 + max(ids, default=0))
        self.eos_id: int | None = self._tokenizer.eos_token_id
        files = sorted(file for file in folder.iterdir() if file.is_file())
        self.identity: Sequence[Any] = [
            "transformers",
            # Another release may tokenise otherwise.
            version("transformers"),
            [file_state(str(file)) for file in files],
        ]

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids of a text, ``[length]``; no special tokens are added."""
        # verbose=False: no warning about the model's own length limit, `max_length` rules here.
        ids = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Any) -> str:
        """The text of token ids, ``[length]``, special tokens left out."""
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True))


def load_tokenizer(directory: str | None = None) -> Tokenizer:
    """The tokenizer of a directory (see :class:`HuggingFaceTokenizer`), or the byte-level one."""
    return ByteTokenizer() if directory is None else HuggingFaceTokenizer(directory)
