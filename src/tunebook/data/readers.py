"""Strict streaming readers: from a file to numbered documents, and a problem with its place for anything unreadable.

JSONL is read line by line, CSV row by row, Parquet batch by batch: memory does not grow with the file. A JSON array is
read whole. Nothing is guessed from the text: a CSV field is text, and a date in JSON stays as it is written.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from tunebook.data.files import CSV_SUFFIXES, JSON_SUFFIXES, PARQUET_SUFFIXES, TSV_SUFFIXES
from tunebook.data.problems import DocumentError, DocumentProblems, KeyAccount, type_name
from tunebook.errors import DataError, first_line

Record = tuple[int, dict[str, Any]]  # a document's number in its file, from 1, and its keys
_ROWS_PER_BATCH = 1000


def read_records(path: Path, problems: DocumentProblems, keys: KeyAccount | None = None) -> Iterator[Record]:
    """Every document of a file with its number; unreadable ones are added to `problems`.

    `keys` knows the keys of documents. Raises: DataError if the file as a whole cannot be read.
    """
    name = path.name.lower()
    try:
        if name.endswith(PARQUET_SUFFIXES):
            problems.unit = "row"
            yield from _read_parquet(path)
            return
        with cast(IO[bytes], gzip.open(path)) if name.endswith(".gz") else path.open("rb") as stream:
            if name.endswith(CSV_SUFFIXES + TSV_SUFFIXES):
                yield from _read_csv(stream, problems, "\t" if name.endswith(TSV_SUFFIXES) else ",")
            elif name.endswith(JSON_SUFFIXES) and not _is_lines(stream):
                problems.unit = "item"
                yield from _read_value(stream, problems, keys or KeyAccount())
            else:
                yield from _read_lines(stream, problems)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is not a complete gzip file ({error}); was it cut off while it was copied? `gzip -t {path}`",
            problem_id="data-file-broken",
        ) from error
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        raise DataError(message, problem_id="data-file-not-found") from error


def _is_lines(stream: IO[bytes]) -> bool:
    """Whether a file named .json has a document on each line, and not one JSON value."""
    lines = (line.strip() for line in stream)
    is_lines = all(line.startswith(b"{") and line.endswith(b"}") for line in (next(lines, b""), next(lines, b"")))
    stream.seek(0)
    return is_lines


def _read_value(stream: IO[bytes], problems: DocumentProblems, keys: KeyAccount) -> Iterator[Record]:
    """The items of a JSON array, of an object that holds one under any key, or an object that is a document itself.

    Raises: DataError for broken JSON, and for an object with several arrays of objects.
    """
    try:
        value = _parse(stream.read())
        if isinstance(value, dict) and keys.known.isdisjoint(value):
            value = _array_within(value, keys)
    except DocumentError as error:
        raise DataError(f"{problems.location}: {error.message}", problem_id=error.problem_id) from error
    for number, item in enumerate(value if isinstance(value, list) else [value], 1):
        with problems.noted(number):
            yield number, _check_object(item)


def _array_within(value: dict[str, Any], keys: KeyAccount) -> Any:
    """The documents in a file's object; the object itself if it has no array. Raises: DocumentError."""
    names = [name for name, held in value.items() if isinstance(held, list) and held and isinstance(held[0], dict)]
    if len(names) > 1:
        raise DocumentError(
            f"it is one JSON object with documents under {' and '.join(map(repr, names))}, and some may be meant for "
            "testing; write those to train on into a file of their own",
            problem_id="data-several-arrays",
        )
    if not names:
        return value
    keys.check(keys.without_ignored(value), names, "the file")
    return value[names[0]]


def _read_lines(stream: IO[bytes], problems: DocumentProblems) -> Iterator[Record]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            with problems.noted(number):
                yield number, _check_object(_parse(line.rstrip()))


def _parse(data: bytes) -> Any:
    """One JSON value. Raises: DocumentError."""
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_without_repeated_keys)
        if "\\ud" in text or "\\uD" in text:  # half a character, which cannot be written
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        near = text[max(0, error.pos - 15) : error.pos + 15]
        hint = "; JSONL needs each document on one line" if text in ("{", "[") else ""
        message = f"broken JSON at {line}column {error.colno}: {error.msg}, near {near!r}{hint}"
        raise DocumentError(message, problem_id="data-broken-json") from error
    except UnicodeError as error:
        raise DocumentError(f"not UTF-8: {error}", problem_id="data-not-utf8") from error
    except (RecursionError, ValueError) as error:
        raise DocumentError(f"JSON that cannot be read: {error}", problem_id="data-broken-json") from error


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, if no key is in it twice: Python keeps the last value, other readers the first."""
    made = dict(pairs)
    if len(made) < len(pairs):
        repeated = _repeated(name for name, _ in pairs)
        message = f"the key {repeated} is twice in the object {str(made)[:60]}...; keep one value"
        raise DocumentError(message, problem_id="data-repeated-key")
    return made


def _repeated(names: Iterable[str]) -> str:
    return " and ".join(repr(name) for name, count in Counter(names).items() if count > 1)


def _check_object(value: object) -> dict[str, Any]:
    """The value if it is a JSON object. Raises: DocumentError."""
    if not isinstance(value, dict):
        hint = " (a JSON array of documents belongs in a file named .json)" if isinstance(value, list) else ""
        raise DocumentError(f"{type_name(value)} where an object {{...}} belongs{hint}", problem_id="data-broken-json")
    return value


def _read_csv(stream: IO[bytes], problems: DocumentProblems, delimiter: str) -> Iterator[Record]:
    """The rows of a table with a header by the lines on which they end, every field as the text it is.

    Raises: DataError for a header that names a column twice, and for broken quotes or encoding.
    """
    csv.field_size_limit(sys.maxsize)  # 128 KiB otherwise, which a long document has
    lines = (line.decode("utf-8-sig") for line in stream)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next(filter(None, rows), [])
        _refuse_repeated_columns(header, problems.location)
        for row in filter(None, rows):
            if len(row) == len(header):
                yield rows.line_num, dict(zip(header, row, strict=True))
            else:
                message = f"{len(row)} fields, the header has {len(header)}; quote those that hold a {delimiter!r}"
                problems.add(rows.line_num, DocumentError(message))
    except csv.Error as error:
        message = f"{problems.location}, line {rows.line_num}: broken CSV: {error}"
        raise DataError(message, problem_id="data-file-broken") from error
    except UnicodeDecodeError as error:
        message = f"{problems.location}, line {rows.line_num + 1}: not UTF-8: {error}"
        raise DataError(message, problem_id="data-not-utf8") from error


def _refuse_repeated_columns(names: list[str], location: str) -> None:
    if repeated := _repeated(names):
        message = f"{location}: there are several columns {repeated}; rename all but one"
        raise DataError(message, problem_id="data-repeated-key")


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _refuse_repeated_columns(file.schema_arrow.names, str(path))
            rows = (row for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield number, without_nulls(row)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        message = f"{path} is not a readable Parquet file: {first_line(error)}"
        raise DataError(message, problem_id="data-file-broken") from error


def without_nulls(value: Any) -> Any:
    """A value of a table without the keys that have no value: each object has the keys of all objects there.

    An argument of one call would otherwise be written, as null, into all calls.
    """
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    is_of_objects = isinstance(value, list) and bool(value) and isinstance(value[0], dict | list)
    return [without_nulls(entry) for entry in value] if is_of_objects else value
