"""Strict streaming readers: from a file to numbered documents, and a problem with its place for anything unreadable.

JSONL is read line by line, CSV row by row, Parquet batch by batch: memory does not grow with the file. A JSON array is
read whole. Nothing is guessed from the text: a CSV field is text, and a date in JSON stays as it is written.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from tunebook.data.files import CSV_SUFFIXES, JSON_SUFFIXES, PARQUET_SUFFIXES, TSV_SUFFIXES
from tunebook.data.keys import KeyAccount
from tunebook.data.problems import DocumentError, DocumentProblems, type_name
from tunebook.errors import DataError, first_line

if TYPE_CHECKING:
    import datasets

UTF8_BOM = b"\xef\xbb\xbf"

Record = tuple[int, dict[str, Any]]  # a document's number in its file, from 1, and its keys

# First bytes of files whose names are wrong, and what to do.
_FOREIGN_STARTS = {
    b"\x1f\x8b": "is gzip: give it a name ending in .gz",
    b"PAR1": "is Parquet: give it a name ending in .parquet",
    b"\xff\xfe": "is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"PK\x03\x04": "is a zip archive: unpack it",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Documents that are reported together: those of a file, or of a split of the hub."""

    problems: DocumentProblems
    records: Iterator[Record]
    label: str  # for a document's origin


def read_records(path: Path, problems: DocumentProblems, keys: KeyAccount | None = None) -> Iterator[Record]:
    """Every document of a file with its number; unreadable ones are added to `problems`.

    `keys` knows the keys of documents and counts columns that are not read. Raises: DataError if the file as a whole
    cannot be read or is empty.
    """
    keys = keys or KeyAccount()
    name = path.name.lower()
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty (0 bytes); it needs one document per line", problem_id="data-file-empty")
        if name.endswith(PARQUET_SUFFIXES):
            yield from _read_parquet(path, problems, keys)
            return
        with _open(path) as stream:
            start = stream.peek(64).removeprefix(UTF8_BOM)  # type: ignore[attr-defined]
            _refuse_foreign(path, start)
            if name.endswith(CSV_SUFFIXES + TSV_SUFFIXES):
                yield from _read_csv(stream, problems, "\t" if name.endswith(TSV_SUFFIXES) else ",")
            else:
                is_value = name.endswith(JSON_SUFFIXES) and _is_one_value(stream)
                stream.seek(0)
                yield from (_read_value(stream, problems, keys) if is_value else _read_lines(stream, problems))
    except gzip.BadGzipFile as error:
        raise DataError(
            f"{path} has a name of gzip and is not gzip: give it a name without .gz, or copy it again",
            problem_id="data-file-broken",
        ) from error
    except (EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is not a complete gzip file ({error}); was it cut off while it was copied? `gzip -t {path}`",
            problem_id="data-file-broken",
        ) from error
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        raise DataError(message, problem_id="data-file-not-found") from error


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")


def _refuse_foreign(path: Path, start: bytes) -> None:
    for signature, advice in _FOREIGN_STARTS.items():
        if start.startswith(signature):
            raise DataError(f"{path} {advice}", problem_id="data-file-broken")


def _is_one_value(stream: IO[bytes]) -> bool:
    """Whether a file named .json is one JSON value, and not a document on each line."""
    lines = filter(None, (line.removeprefix(UTF8_BOM).strip() for line in stream))
    first = next(lines, b"{}")
    return not (first.startswith(b"{") and first.endswith(b"}") and any(lines))


def _read_value(stream: IO[bytes], problems: DocumentProblems, keys: KeyAccount) -> Iterator[Record]:
    """The items of a JSON array, of an object that holds one under any key, or an object that is a document itself.

    Raises: DataError for broken JSON, and for an object with several arrays of objects.
    """
    problems.unit = "item"
    try:
        text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(stream, problems.location) from error
    try:
        value = _parse(text)
    except DocumentError as error:
        raise DataError(f"{problems.location}: {error.message}", problem_id=error.problem_id) from error
    if isinstance(value, dict) and keys.known.isdisjoint(value):
        value = _array_within(value, problems, keys)
    for number, item in enumerate(value if isinstance(value, list) else [value], 1):
        try:
            record = _check_object(item)
        except DocumentError as error:
            problems.add(number, error)
        else:
            yield number, record


def _array_within(value: dict[str, Any], problems: DocumentProblems, keys: KeyAccount) -> Any:
    """The documents in a file's object, whose other keys are accounted for; the object itself if it has no array."""
    names = [name for name, held in value.items() if isinstance(held, list) and held and isinstance(held[0], dict)]
    if not keys.known or not names:
        return value
    if len(names) > 1:
        raise DataError(
            f"{problems.location} is one JSON object with documents under {' and '.join(map(repr, names))}, and some "
            "may be meant for testing; write those to train on into a file of their own: "
            f"jq -c '.{names[0]}[]' FILE > train.jsonl",
            problem_id="data-several-arrays",
        )
    problems.notes.append(f"its documents are the array under '{names[0]}'")
    try:
        keys.check(keys.without_ignored(value), names)
    except DocumentError as error:
        raise DataError(f"{problems.location}: {error.message}", problem_id=error.problem_id) from error
    return value[names[0]]


def _read_lines(stream: IO[bytes], problems: DocumentProblems) -> Iterator[Record]:
    num_bytes_before = 0
    for number, line in enumerate(stream, 1):
        content = line.removeprefix(UTF8_BOM) if number == 1 else line
        if not content.strip():
            problems.num_blank_lines += 1
        else:
            try:
                record = _check_object(_parse(_decode(content.rstrip(), num_bytes_before + len(line) - len(content))))
            except DocumentError as error:
                problems.add(number, error)
            else:
                yield number, record
        num_bytes_before += len(line)


def _parse(text: str) -> Any:
    """One JSON value. Raises: DocumentError."""
    try:
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
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        message = f"{half!r} is half of a surrogate pair, which is no character; write both halves or the character"
        raise DocumentError(message, problem_id="data-not-utf8") from error
    except (RecursionError, ValueError) as error:
        raise DocumentError(f"JSON that cannot be read: {error}", problem_id="data-broken-json") from error


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, if no key is in it twice: Python keeps the last value, other readers the first."""
    made = dict(pairs)
    if len(made) < len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        message = f"the key '{repeated}' is twice in the object {str(made)[:60]}...; keep one value"
        raise DocumentError(message, problem_id="data-repeated-key")
    return made


def _check_object(value: object) -> dict[str, Any]:
    """The value if it is a JSON object. Raises: DocumentError."""
    if not isinstance(value, dict):
        hint = " (a JSON array of documents belongs in a file named .json)" if isinstance(value, list) else ""
        raise DocumentError(f"{type_name(value)} where an object {{...}} belongs{hint}", problem_id="data-broken-json")
    return value


def _decode(line: bytes, num_bytes_before: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line (offset "
            f"{num_bytes_before + error.start} in the file); convert it, such as with `iconv -f LATIN1 -t UTF-8`",
            problem_id="data-not-utf8",
        ) from error


def _read_csv(stream: IO[bytes], problems: DocumentProblems, delimiter: str) -> Iterator[Record]:
    """The rows of a table with a header, every field as the text it is.

    Raises: DataError for a header that names a column twice, and for broken quotes or encoding.
    """
    problems.unit = "row"
    csv.field_size_limit(sys.maxsize)  # 128 KiB otherwise, which a long document has
    with io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            header = next((row for row in rows if row), [])
            _refuse_repeated_columns(header, problems.location)
            for number, row in enumerate((row for row in rows if row), 1):
                if len(row) == len(header):
                    yield number, dict(zip(header, row, strict=True))
                else:
                    message = f"{len(row)} fields, the header has {len(header)}; quote those that hold a {delimiter!r}"
                    problems.add(number, DocumentError(message), f" (line {rows.line_num})")
        except csv.Error as error:
            message = f"{problems.location}, line {rows.line_num}: broken CSV: {error}"
            raise DataError(message, problem_id="data-file-broken") from error
        except UnicodeDecodeError as error:
            raise _not_utf8(stream, problems.location) from error


def _not_utf8(stream: IO[bytes], location: str) -> DataError:
    """The error for a table that is not UTF-8. Its text is decoded ahead of its rows, so the line has to be found."""
    stream.seek(0)
    num_bytes_before = 0
    for number, line in enumerate(stream, 1):
        try:
            _decode(line, num_bytes_before)
        except DocumentError as error:
            return DataError(f"{location}, line {number}: {error.message}", problem_id=error.problem_id)
        num_bytes_before += len(line)
    raise AssertionError("every line is UTF-8, the whole is not")


def _refuse_repeated_columns(names: list[str], location: str) -> None:
    repeated = [f"'{name}'" for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(
            f"{location}: there are several columns {' and '.join(repeated)}; rename all but one",
            problem_id="data-repeated-key",
        )


def _read_parquet(path: Path, problems: DocumentProblems, keys: KeyAccount) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    problems.unit = "row"
    with tempfile.TemporaryFile() as unpacked, path.open("rb") as stored:
        stream: IO[bytes] = stored
        if path.name.lower().endswith(".gz"):  # Parquet is read from its end, which a gzip stream cannot do
            with gzip.open(path, "rb") as packed:
                shutil.copyfileobj(packed, unpacked)
            stream = unpacked
        try:
            file = pq.ParquetFile(stream)
            names = file.schema_arrow.names
            _refuse_repeated_columns(names, str(path))
            wanted = keys.wanted_columns(names)
            number = 0
            for batch in file.iter_batches(batch_size=1000):
                for name in names:
                    if name not in wanted:
                        keys.count_column(name, batch.num_rows - batch.column(name).null_count)
                for record in batch.select(wanted).to_pylist():
                    number += 1
                    yield number, without_nulls(record)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            message = f"{path} is not a readable Parquet file: {first_line(error)}"
            raise DataError(message, problem_id="data-file-broken") from error


def read_rows(rows: datasets.Dataset, keys: KeyAccount) -> Iterator[Record]:
    """The rows of a table with their numbers, from 1; columns that are not read are only counted."""
    wanted = keys.wanted_columns(rows.column_names)
    for name in rows.column_names:
        if name not in wanted:
            keys.count_column(name, len(rows) - rows.data.column(name).null_count)
    for number, row in enumerate(rows.select_columns(wanted), 1):
        yield number, without_nulls(row)


def without_nulls(value: Any) -> Any:
    """A value of a table without the keys that have no value: each object has the keys of all objects there.

    An argument of one call would otherwise be written, as null, into all calls.
    """
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) and _has_objects(value) else value


def _has_objects(values: list[Any]) -> bool:
    """Whether a list may hold objects: not one of numbers, such as tokens."""
    return bool(values) and isinstance(values[0], dict | list)
