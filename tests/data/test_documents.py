import gzip
import json
import sysconfig

import pytest

from lightning_dcp.data.documents import find_files, read_documents


def texts(path, text_field="text"):
    return [document.text for document in read_documents(str(path), text_field)]


def test_files_in_the_order_of_the_patterns_each_once(tmp_path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    patterns = [f"{tmp_path}/d.md", f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"]
    found = find_files(patterns, option="data")
    assert found == [f"{tmp_path}/{name}" for name in ("d.md", "a.txt", "b.txt", "deep/er/c.txt")]


def test_a_path_with_glob_characters_is_taken_as_it_is(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert find_files([f"{tmp_path}/a[1].txt"], option="data") == [f"{tmp_path}/a[1].txt"]


def test_the_standard_library_without_installed_packages():
    found = find_files(["{stdlib}/**/*.py"], option="data")
    stdlib = sysconfig.get_path("stdlib")
    assert f"{stdlib}/ast.py" in found
    assert f"{stdlib}/asyncio/tasks.py" in found
    assert not [file for file in found if "site-packages" in file]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("no/such/file.txt", "val_data: no/such/file.txt matches no file$"),
        ("no/such/**/*.txt", r"val_data: no/such/\*\*/\*.txt matches no file$"),
        ("{stdlib}/*.nothing", r"val_data: \{stdlib\}/\*.nothing \(.*\) matches no file$"),
    ],
)
def test_names_the_pattern_that_matches_nothing(pattern, message):
    with pytest.raises(ValueError, match=message):
        find_files(["{stdlib}/ast.py", pattern], option="val_data")


def test_says_what_to_write_for_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"it is a folder, write .*/\*\*/\*"):
        find_files([str(tmp_path)], option="data")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz"])
def test_json_lines(tmp_path, name):
    lines = [{"text": "one"}, {"text": "two\nlines", "more": 1}, {"text": ""}]
    data = "\n".join([json.dumps(lines[0]), "", *map(json.dumps, lines[1:])]).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    documents = list(read_documents(str(tmp_path / name), "text"))
    assert [document.text for document in documents] == ["one", "two\nlines", ""]
    assert [document.line for document in documents] == [1, 3, 4]
    assert documents[-1].position == (tmp_path / name).stat().st_size


def test_any_other_file_is_one_document(tmp_path):
    (tmp_path / "a.json").write_text('{"text": 1}\n')
    assert texts(tmp_path / "a.json") == ['{"text": 1}\n']
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert texts(tmp_path / "a.txt.gz") == ["packed"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text('{"text": "line"}\n', encoding="utf-8-sig")
    assert texts(tmp_path / "a.txt") + texts(tmp_path / "a.jsonl") == ["text", "line"]


def test_undecodable_bytes_are_replaced_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff\xfec\xc3\xa9\xef\xbf\xbd\xe2\x82")
    (document,) = read_documents(str(tmp_path / "a.txt"), "text")
    assert document.text == "ab\ufffd\ufffdc\u00e9\ufffd\ufffd\ufffd"
    assert document.num_replaced == 4
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x\xff \\ud800 \\ud83d\\ude00"}\n')
    (document,) = read_documents(str(tmp_path / "a.jsonl"), "text")
    assert document.text == "x\ufffd \ufffd \U0001f600"
    assert document.num_replaced == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "line 2: not valid JSON"),
        ("[" * 200_000, "line 2: not valid JSON"),
        ('["x"]', "line 2: expected a JSON object, found list"),
        (
            '{"body": "x", "id": 1}',
            r"line 2: there is no field 'text' \(text_field\); fields: body, id",
        ),
        ("{}", "line 2: there is no field 'text' .* fields: none"),
        ('{"text": null}', "line 2: 'text' .* must be a text, found NoneType"),
    ],
)
def test_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match=f"{path}, {message}"):
        texts(path)


@pytest.mark.parametrize("data", [b"no gzip", gzip.compress(b"cut off" * 99, mtime=0)[:-9]])
def test_a_gzip_file_that_is_none(tmp_path, data):
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(ValueError, match=r"a.jsonl.gz cannot be unpacked with gzip"):
        texts(tmp_path / "a.jsonl.gz")
