"""Strict streaming readers: from a file to numbered documents, and a problem with its place for anything unreadable.

JSONL is read line by line, a JSON array item by item, CSV row by row, Parquet batch by batch: memory does not grow with
the file. Nothing is guessed from the text: a CSV field is text, and a date in JSON stays as it is written.
"""

from __future__ import annotations

import csv
import gzip
import io
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from tunebook.data.files import CSV_SUFFIXES, JSON_SUFFIXES, PARQUET_SUFFIXES, TSV_SUFFIXES
from tunebook.data.json_file import (
    Record,
    continues_on_the_next_line,
    holds_array,
    parse_object,
    read_array,
    read_object,
)
from tunebook.data.keys import KeyAccount
from tunebook.data.problems import DocumentError, DocumentProblems
from tunebook.errors import DataError, first_line

UTF8_BOM = b"\xef\xbb\xbf"

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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a file is written if its name does not tell, as for files of the hub."""

    suffix: str | None = None  # read as a file of this ending
    delimiter: str | None = None  # of CSV
    field: str | None = None  # the key of the documents in a JSON object


def read_records(
    path: Path, problems: DocumentProblems, keys: KeyAccount | None = None, layout: Layout | None = None
) -> Iterator[Record]:
    """Every document of a file with its number; unreadable ones are added to `problems`.

    `keys` knows the keys of documents and counts columns that are not read. Raises: DataError if the file as a whole
    cannot be read or is empty.
    """
    keys, layout = keys or KeyAccount(), layout or Layout()
    name = layout.suffix or path.name.lower()
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
                delimiter = layout.delimiter or ("\t" if name.endswith(TSV_SUFFIXES) else ",")
                yield from _read_csv(stream, problems, delimiter)
            else:
                is_json = name.endswith(JSON_SUFFIXES)
                yield from _read_json(stream, problems, keys.known, layout.field, is_json=is_json)
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


def _read_json(
    stream: IO[bytes], problems: DocumentProblems, known_keys: frozenset[str], field: str | None, *, is_json: bool
) -> Iterator[Record]:
    """Read JSON in any layout of the file. `is_json`: by its name it need not have one document per line.

    Raises: DataError for a file of lines that is one JSON value over several lines.
    """
    first = ""
    while not first.strip() and (line := stream.readline()):
        first = line.removeprefix(UTF8_BOM).decode(errors="replace")
    is_one_value = bool(first.strip()) and continues_on_the_next_line(first)
    is_object = field is not None or (not is_one_value and _is_array_on_one_line(first, stream, known_keys))
    stream.seek(0)
    if is_json and first.lstrip().startswith("["):
        yield from read_array(stream, problems)
    elif is_object or (is_json and is_one_value):
        yield from read_object(stream, problems, known_keys, field)
    elif is_one_value:
        raise DataError(
            f"{problems.location} is one JSON value over several lines, and a file with its ending has one document on "
            "each; give it a name ending in .json, or rewrite it with `jq -c`",
            problem_id="data-broken-json",
        )
    else:
        yield from _read_lines(stream, problems)


def _is_array_on_one_line(first: str, rest: IO[bytes], known_keys: frozenset[str]) -> bool:
    """Whether a file's only line is an object that holds the documents."""
    try:
        return holds_array(parse_object(first), known_keys) and not any(line.strip() for line in rest)
    except DocumentError:
        return False


def _read_lines(stream: IO[bytes], problems: DocumentProblems) -> Iterator[Record]:
    num_bytes_before = 0
    for number, line in enumerate(stream, 1):
        content = line.removeprefix(UTF8_BOM) if number == 1 else line
        if not content.strip():
            problems.num_blank_lines += 1
        else:
            try:
                record = parse_object(_decode(content.rstrip(), num_bytes_before + len(line) - len(content)))
            except DocumentError as error:
                problems.add(number, error)
            else:
                yield number, record
        num_bytes_before += len(line)


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
