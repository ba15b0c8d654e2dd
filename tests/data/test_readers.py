"""Reading files: every kind of broken file gives its place and what is wrong with it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tunebook.config.schema import DatasetConfig
from tunebook.data.formats import FormatSettings, document_keys
from tunebook.data.problems import DocumentProblems, KeyAccount
from tunebook.data.readers import read_records
from tunebook.data.sources import load_corpus
from tunebook.errors import DataError

RECORDS: list[dict[str, Any]] = [{"text": f"document {number}"} for number in range(1, 6)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


def read(path: Path) -> list[tuple[int, dict[str, Any]]]:
    problems = DocumentProblems(str(path))
    records = list(read_records(path, problems))
    problems.num_documents = len(records)
    problems.raise_if_any()
    return records


def write(tmp_path: Path, content: bytes | str, name: str = "data.jsonl") -> Path:
    path = tmp_path / name
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.jsonl", LINES),
        ("data.jsonl.gz", LINES),
        ("data.json", json.dumps(RECORDS, indent=2) + "\n\n"),
        ("data.JSON.gz", "\ufeff" + json.dumps(RECORDS)),
        ("data.jsonl", "\ufeff" + LINES.replace("\n", "\r\n")),
        ("data.ndjson", LINES.rstrip("\n")),
    ],
)
def test_lines_and_arrays_are_read_plain_or_compressed(tmp_path: Path, name: str, content: str) -> None:
    assert read(write(tmp_path, content, name)) == list(enumerate(RECORDS, 1))


def test_blank_lines_count_and_files_that_are_no_documents_are_refused(tmp_path: Path) -> None:
    blank = write(tmp_path, '{"text": "a"}\n\n  \n{"text": "b"}\n\n')
    assert read(blank) == [(1, {"text": "a"}), (4, {"text": "b"})]
    cut_off = tmp_path / "data.jsonl.gz"
    cut_off.write_bytes(gzip.compress(LINES.encode())[:-12])
    several = write(tmp_path, '{"train": [{"text": "a"}], "test": [{"text": "b"}]}', "data.json")
    for path, problem_id in ((cut_off, "data-file-broken"), (several, "data-several-arrays")):
        with pytest.raises(DataError) as caught:
            load_corpus(DatasetConfig(path=str(path)), cache_dir=tmp_path / "cache")
        assert caught.value.problem_id == problem_id


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a" "b"}', "line 17: broken JSON at column 14: "),
        (b"{", r"line 17: broken JSON at column 2: .*JSONL needs each document on one line"),
        (b'"only text"', "line 17: a JSON string"),
        (b'[{"text": "a"}]', r"line 17: a JSON array .* file named .json"),
        (b'{"text": "\\ud83d"}', "line 17: not UTF-8: "),
        ('{"text": "caf\xe9"}'.encode("latin-1"), "line 17: not UTF-8: .*byte 0xe9"),
        (b'{"text": ' + b"[" * 100_000, "line 17: JSON that cannot be read"),
    ],
)
def test_a_broken_line_17_is_named_with_its_problem(tmp_path: Path, line: bytes, message: str) -> None:
    good = b'{"text": "a"}\n'
    path = write(tmp_path, good * 16 + line + b"\n" + good)
    with pytest.raises(DataError, match=f"{path}, {message}"):  # the absolute path
        read(path)


def test_ten_problems_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(write(tmp_path, '{"text": "a"}\n' * 3 + "{\n" * 12))
    first, *places, rest, last = caught.value.message.splitlines()
    assert first.endswith(": 12 of 15 documents cannot be used") and rest == "  and 2 more"
    assert "dataset.bad_documents=skip" in last
    assert [place.split(":")[0] for place in places] == [f"  line {number}" for number in range(4, 14)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[\n{"text": "a"},\n{"text": }]', "broken JSON at line 3, column 10: Expecting value, near"),
        ('{\n"data": [\n{"text": "a"},\n{"text" }]}', "broken JSON at line 4, column 9"),
        ('[{"text": "a"},\n"b"]', r"item 2: a JSON string where an object"),
        (b'[{"text": "a"},\n{"text": "\xe9"}]', "not UTF-8: .*byte 0xe9"),
    ],
)
def test_a_broken_array_names_the_item_or_the_line(tmp_path: Path, content: bytes | str, message: str) -> None:
    with pytest.raises(DataError, match=f"data.json[,:] .*{message}"):
        read(write(tmp_path, content, "data.json"))


KNOWN = KeyAccount(document_keys(FormatSettings()))


@pytest.mark.parametrize(("name", "indent"), [("data.json", None), ("data.json.gz", 1)])
def test_documents_under_a_key_of_the_file_are_read(tmp_path: Path, name: str, indent: int | None) -> None:
    key = "\u00fcbungen"
    content = {"version": {"a": [1]}, "tags": ["a", "b"], "none": [], key: RECORDS, "license": "x"}
    path = write(tmp_path, json.dumps(content, indent=indent, ensure_ascii=False), name)
    problems, account = DocumentProblems(str(path)), KeyAccount({"text", "messages"})
    assert list(read_records(path, problems, account)) == list(enumerate(RECORDS, 1))
    problems.raise_if_any()
    assert account.notes() == ["keys not read: " + ", ".join(f"{k} (1)" for k in content if k != key)]


def test_a_key_for_all_documents_of_a_file_that_means_something_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"tools": "", "data": RECORDS}), "data.json")
    assert len(list(read_records(path, DocumentProblems(str(path)), KNOWN))) == 5
    path = write(tmp_path, json.dumps({"tools": "some", "data": RECORDS}), "data.json")
    with pytest.raises(DataError, match="'tools' of the file") as caught:
        list(read_records(path, DocumentProblems(str(path)), KNOWN))
    assert caught.value.problem_id == "data-key-not-supported"


def test_a_document_over_several_lines_is_one_document(tmp_path: Path) -> None:
    document = {"id": 1, "messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}
    path = write(tmp_path, json.dumps(document, indent=2), "data.json")
    assert list(read_records(path, DocumentProblems(str(path)), KNOWN)) == [(1, document)]
    only_line = write(tmp_path, json.dumps(document), "one.json")
    assert list(read_records(only_line, DocumentProblems(str(only_line)), KNOWN)) == [(1, document)]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("data.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}\n{"text": "d"}', ", line 2"),
        ("data.json", '[{"text": "a"},\n{"text": "b", "more": {"x": 1, "x": 2}},\n{"text": "d"}]', ""),
        ("data.json", '{\n"data": [{"text": "a"}, {"text": "b", "text": "c"}, {"text": "d"}]}', ""),
    ],
)
def test_a_key_that_stands_twice_is_named(tmp_path: Path, name: str, content: str, place: str) -> None:
    message = rf"{name}{place}: the key '(text|x)' is twice in the object {{'(text': 'c'|x': 2)}}"
    with pytest.raises(DataError, match=message) as caught:
        read(write(tmp_path, content, name))
    assert caught.value.problem_id == "data-repeated-key"


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
    for table in (path, write(tmp_path, "text,id,text\na,1,b\n", "data.csv")):
        with pytest.raises(DataError, match="there are several columns 'text'; rename all but one"):
            read(table)


def test_a_table_of_text_is_read_as_it_is_written(tmp_path: Path) -> None:
    rows = '\ufeff"text",id\r\n"a ""b""\nc, d",007\r\n\r\nNA,\r\n'
    expected = [(3, {"text": 'a "b"\nc, d', "id": "007"}), (5, {"text": "NA", "id": ""})]  # by their last lines
    assert read(write(tmp_path, rows, "data.csv")) == expected
    assert read(write(tmp_path, rows, "data.csv.gz")) == expected
    tabs = "text\tid\na, b\tnull\n"
    assert read(write(tmp_path, tabs, "data.tsv")) == [(2, {"text": "a, b", "id": "null"})]
    assert len(read(write(tmp_path, f"text\n{'a' * 200_000}\n", "long.csv"))[0][1]["text"]) == 200_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text,id\na,1\nb\n", "line 3: 1 fields, the header has 2"),
        (b'text,id\n"a,1\n', "line 2: broken CSV: unexpected end of data"),
        (b"text,id\ncaf\xe9,1\n", "line 2: not UTF-8: .*byte 0xe9"),
        (b'text\n"a\nb"\n' + b"c\n" * 9000 + b"\xff\n", "line 9004: not UTF-8: .*byte 0xff"),
    ],
)
def test_a_broken_table_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path, content, "data.csv"))


def test_an_object_of_a_table_has_only_the_keys_that_it_was_written_with(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"city": "Rome"}}, {"name": "f", "arguments": {"limit": 3}}]
    rows = [{"messages": [{"role": "assistant", "tool_calls": [call]}], "input_ids": [1, 2]} for call in calls]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert [record for _, record in read_records(path, DocumentProblems("a"))] == rows
