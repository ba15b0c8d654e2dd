"""Strict streaming readers: a file becomes numbered JSON objects, and everything unreadable a problem with its place.

JSONL is read line by line, a JSON array item by item, Parquet batch by batch: memory does not grow with the file.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from tunebook.data.files import JSON_SUFFIXES, PARQUET_SUFFIXES
from tunebook.data.json_array import read_array
from tunebook.data.json_objects import parse_object
from tunebook.data.problems import DocumentError, DocumentProblems
from tunebook.errors import DataError, RequestError

UTF8_BOM = b"\xef\xbb\xbf"

# What a file starts with that is not what its name says, and what to do about it.
_FOREIGN_STARTS = {
    b"\x1f\x8b": "is gzip: give it a name ending in .gz",
    b"PAR1": "is Parquet: give it a name ending in .parquet",
    b"\xff\xfe": "is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"PK\x03\x04": "is a zip archive: unpack it",
}

Record = tuple[int, dict[str, Any]]  # a document's number in its file, from 1, and its keys


def read_records(path: Path, problems: DocumentProblems, columns: frozenset[str] | None = None) -> Iterator[Record]:
    """Every JSON object of a file with its number; unreadable ones are added to `problems`.

    `columns` limits what is read of Parquet. Raises: DataError where the file as a whole cannot be read or is empty,
    RequestError where it may not be opened.
    """
    name = path.name.lower()
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty (0 bytes); it needs one document per line", problem_id="data-file-empty")
        if name.endswith(PARQUET_SUFFIXES):
            yield from _read_parquet(path, problems, columns)
            return
        with _open(path) as stream:
            start = stream.peek(64).removeprefix(UTF8_BOM)  # type: ignore[attr-defined]
            _refuse_foreign(path, start)
            if name.endswith(JSON_SUFFIXES) and start.lstrip().startswith(b"["):
                yield from read_array(stream, problems)
            else:
                yield from _read_lines(stream, problems)
    except gzip.BadGzipFile as error:
        raise DataError(
            f"{path} is not gzip, which its name says it is: give it a name without .gz, or copy it again",
            problem_id="data-file-broken",
        ) from error
    except (EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is not a whole gzip file ({error}); was it cut off while it was copied? `gzip -t {path}`",
            problem_id="data-file-broken",
        ) from error
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {error.strerror or error}", problem_id="data-file-not-found"
        ) from error


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")


def _refuse_foreign(path: Path, start: bytes) -> None:
    for signature, advice in _FOREIGN_STARTS.items():
        if start.startswith(signature):
            raise DataError(f"{path} {advice}", problem_id="data-file-broken")


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


def _read_parquet(path: Path, problems: DocumentProblems, columns: frozenset[str] | None) -> Iterator[Record]:
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
            wanted = [name for name in file.schema_arrow.names if columns is None or name in columns]
            # With no column that any format knows, read all: the error names the columns there are.
            number = 0
            for batch in file.iter_batches(batch_size=1000, columns=wanted or None):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
        except (pa.ArrowException, UnicodeDecodeError) as error:
            message = f"{path} is not a readable Parquet file: {_first_line(error)}"
            raise DataError(message, problem_id="data-file-broken") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
