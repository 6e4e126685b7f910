import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from lightning_dcp.data import ByteTokenizer
from lightning_dcp.data.cache import CacheSource, load_or_build, open_cache


class Counting(ByteTokenizer):
    """Counts its calls, and raises in place of one of them."""

    def __init__(self, error=None, at=0):
        self.calls, self.error, self.at = 0, error, at

    def encode(self, text):
        self.calls += 1
        if self.error and self.calls == self.at:
            raise self.error
        return super().encode(text)


@pytest.fixture
def files(tmp_path):
    paths = []
    for name, text in (("a.txt", "first"), ("b.txt", ""), ("c.txt", "third \u00e9")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        paths.append(str(tmp_path / name))
    return tuple(paths)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def load(files, root, tokenizer=None, *, text_field="text", append_eos=True, retry=True):
    source = CacheSource(files, text_field, append_eos)
    return load_or_build(source, tokenizer or Counting(), root, retry=retry)


def folders(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_tokens_and_documents(files, root):
    cache = load(files, root)
    assert cache.dtype == np.uint16
    tokens = np.fromfile(cache.tokens_file, dtype=cache.dtype)
    assert tokens.tolist() == [*b"first", 256, *"third \u00e9".encode(), 256]
    assert cache.documents["end"].tolist() == [6, 6, 15]
    assert cache.documents["file"].tolist() == [0, 1, 2]
    assert cache.name_of(2) == files[2]
    without_eos = load(files, root, append_eos=False)
    assert without_eos.documents["end"].tolist() == [5, 5, 13]


def test_the_smallest_type_that_holds_the_vocabulary(files, root):
    tokenizer = Counting()
    for vocab_size, dtype in ((256, np.uint8), (65536, np.uint16), (65537, np.uint32)):
        tokenizer.vocab_size = vocab_size
        tokenizer.identity = ("bytes", vocab_size)
        cache = load(files, root, tokenizer, append_eos=False)
        assert cache.dtype == dtype
        assert np.fromfile(cache.tokens_file, dtype=dtype)[:5].tolist() == [*b"first"]


def test_ids_above_the_vocabulary_are_refused(files, root):
    tokenizer = Counting()
    tokenizer.vocab_size = 256
    with pytest.raises(ValueError, match=r"a.txt: the tokenizer gave ids from 102 to 256"):
        load(files, root, tokenizer)


def test_many_documents_keep_their_order(tmp_path, root):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"text": "{index}"}}\n' for index in range(9000)))
    cache = load((str(path),), root)
    assert cache.documents["line"].tolist() == list(range(1, 9001))
    lengths = np.diff(cache.documents["end"], prepend=0)
    assert lengths.tolist() == [len(str(index)) + 1 for index in range(9000)]
    assert cache.name_of(41) == f"{path}, line 42"


def test_reused_until_a_file_or_an_option_changes(files, root):
    load(files, root)
    again = Counting()
    load(files, root, again)
    assert again.calls == 0
    load(files, root, again, append_eos=False)
    assert again.calls == 3
    load(files, root, again, text_field="body")
    assert again.calls == 6
    load(files[:2], root, again)
    assert again.calls == 8

    status = os.stat(files[0])
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    load(files, root, again)
    assert again.calls == 11
    with open(files[0], "a") as stream:
        stream.write("!")
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load(files, root, again).documents["end"][0] == 7
    assert again.calls == 14


def test_an_interruption_leaves_nothing_behind(files, root):
    with pytest.raises(KeyboardInterrupt):
        load(files, root, Counting(KeyboardInterrupt(), at=3))
    assert folders(root) == []
    assert load(files, root).documents["end"].tolist() == [6, 6, 15]


def test_a_killed_process_leaves_no_cache_and_its_remains_are_removed(files, root):
    script = textwrap.dedent(
        """
        import os, sys
        from pathlib import Path
        from lightning_dcp.data import ByteTokenizer
        from lightning_dcp.data.cache import CacheSource, load_or_build

        class Dies(ByteTokenizer):
            def encode(self, text):
                if text.startswith("third"):
                    os._exit(9)
                return super().encode(text)

        source = CacheSource(tuple(sys.argv[2:]), "text", True)
        load_or_build(source, Dies(), Path(sys.argv[1]), retry=True)
        """
    )
    done = subprocess.run([sys.executable, "-c", script, str(root), *files], check=False)
    assert done.returncode == 9
    (left_behind,) = folders(root)
    assert ".tmp-" in left_behind
    assert load(files, root).documents["end"].tolist() == [6, 6, 15]
    (folder,) = folders(root)
    assert ".tmp-" not in folder


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_cache_is_made_again(files, root, name, damage):
    folder = load(files, root).tokens_file.parent
    if damage == "cut":
        os.truncate(folder / name, 3)
    else:
        (folder / name).unlink()
    assert open_cache(folder) is None
    again = Counting()
    cache = load(files, root, again)
    assert again.calls == 3
    assert cache.tokens_file.stat().st_size == 15 * 2


def test_a_fault_is_read_once_by_all_ranks_and_again_by_the_next_run(tmp_path, root):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": 1}\n')
    tokenizer = Counting()
    for retry, calls in ((True, 1), (False, 1), (False, 1), (True, 2)):
        with pytest.raises(
            ValueError, match=r"a.jsonl, line 2: 'text' .* must be a text, found int"
        ):
            load((str(path),), root, tokenizer, retry=retry)
        assert tokenizer.calls == calls
    path.write_text('{"text": "fine"}\n{"text": "now"}\n')
    assert len(load((str(path),), root, tokenizer, retry=False).documents) == 2


def test_a_progress_bar_for_large_inputs_only(files, root, monkeypatch, capsys):
    source = CacheSource(files, "text", True)
    load_or_build(source, Counting(), root / "small", retry=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("lightning_dcp.data.cache._PROGRESS_FROM_BYTES", 1)
    load_or_build(source, Counting(), root / "large", retry=True)
    shown = capsys.readouterr().err
    assert "Tokenising: 100%" in shown
    assert "13.0/13.0" in shown


def test_no_text_at_all(tmp_path, root):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(
        ValueError, match=r"there is no text in .*empty.txt: 1 documents, all empty"
    ):
        load((str(tmp_path / "empty.txt"),), root)
    (tmp_path / "empty.jsonl").write_text("\n")
    paths = (str(tmp_path / "empty.txt"), str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match=r"no text in .*empty.txt and 1 more files: 1 documents"):
        load(paths, root)


def test_a_cache_folder_that_cannot_be_made(files, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache_dir='.*file/cache' cannot be made"):
        load(files, tmp_path / "file" / "cache")
