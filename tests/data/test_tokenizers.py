import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.data import ByteTokenizer, load_tokenizer
from lightning_dcp.data import tokenizers as module


@pytest.fixture
def directory(tmp_path):
    """A word-level tokenizer of five words as transformers stores it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1, "a": 2, "short": 3, "text": 4}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    wrapped.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


def test_byte_vocabulary():
    tokenizer = load_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)


def test_a_hugging_face_directory(directory):
    tokenizer = load_tokenizer(str(directory))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (5, 1)
    assert tokenizer.encode("a short word").tolist() == [2, 3, 0]
    assert tokenizer.decode([2, 3, 4, 1]) == "a short text"


def test_identity_changes_with_the_directory(directory):
    before = load_tokenizer(str(directory)).identity
    assert load_tokenizer(str(directory)).identity == before
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["longer"] = 5
    file.write_text(json.dumps(content))
    assert load_tokenizer(str(directory)).identity != before


def test_what_is_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="tokenizer='no/such' is not a directory"):
        load_tokenizer("no/such")
    with pytest.raises(ValueError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(str(tmp_path))


def test_without_transformers_the_error_says_what_to_install(tmp_path, monkeypatch):
    missing = type(module.TRANSFORMERS_AVAILABLE)("no-such-package>=5.0")
    monkeypatch.setattr(module, "TRANSFORMERS_AVAILABLE", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -U .no-such-package>=5\.0"):
        load_tokenizer(str(tmp_path))
