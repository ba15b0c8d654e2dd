"""Find and hash the document files that a configuration names."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from tunebook.config.book import is_in_book, resolve_path
from tunebook.config.choices import Source
from tunebook.config.schema import DatasetConfig, sources_of
from tunebook.errors import DataError, did_you_mean, first_few
from tunebook.files import sha256_file

LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
JSON_SUFFIXES = (".json", ".json.gz")  # an array, an object that holds one, or one document per line
PARQUET_SUFFIXES = (".parquet",)
CSV_SUFFIXES = (".csv", ".csv.gz")
TSV_SUFFIXES = (".tsv", ".tsv.gz")
SUFFIXES = LINES_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES + CSV_SUFFIXES + TSV_SUFFIXES

_NUM_NAMED = 8  # files in a message; the others are counted


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of documents."""

    path: Path  # absolute
    location: str  # for records: the absolute path, or `book:...`, which is the same on every machine
    label: str  # for a document's origin: the name, with folders only if several files share it


def missing_files(config: DatasetConfig) -> DataError | None:
    """The error for files of a configuration that cannot be trained on here; None if all can."""
    sources = sources_of(config).items()
    named = {f"{key}.path": source.path for key, source in sources if source.source is Source.files}
    named["dataset.validation_path"] = config.validation_path
    for key, text in named.items():
        try:
            if text:
                find_files(text, key)
        except DataError as error:
            return error
    return None


def find_files(text: str, key: str) -> list[DataFile]:
    """The files of a path, a folder or a glob, in alphabetical order; `key` is where it was configured.

    Of a folder only the files of documents in it are taken, not those of its folders. Raises: DataError for nothing
    found, and for a kind of file that holds no documents.
    """
    pattern = resolve_path(text)
    if pattern.is_dir():
        paths = _documents_in(pattern)
        _refuse_held_out(paths, key)
    else:
        matches = [str(pattern)] if pattern.exists() else glob.glob(str(pattern), recursive=True)  # noqa: PTH207
        paths = sorted(Path(match) for match in matches if Path(match).is_file())
    if not paths:
        raise _not_found_error(pattern, text, key)
    for path in paths:
        if not path.name.lower().endswith(SUFFIXES):
            raise DataError(
                f"{key}: {path} is not a kind of file that documents are read from; they end in {', '.join(SUFFIXES)}",
                problem_id="data-file-kind",
            )
    common = Path(os.path.commonpath([path.parent for path in paths]))
    book = resolve_path("book:")
    return [
        DataFile(
            path=path,
            location=f"book:{path.relative_to(book).as_posix()}" if is_in_book(text) else str(path),
            label=str(path.relative_to(common)),
        )
        for path in paths
    ]


def hash_folder(folder: Path) -> str:
    """The SHA-256 over the names and hashes of all files under a folder, except hidden ones."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            total.update(f"{relative.as_posix()}\0{sha256_file(path)}\n".encode())
    return total.hexdigest()


def _refuse_held_out(paths: list[Path], key: str) -> None:
    """Refuse a folder of several files of which one, by its name, is not meant to be trained on."""
    held_out = next((path for path in paths if re.match(r"(test|val|valid|validation|dev|eval)\b", path.stem)), None)
    if held_out is not None and len(paths) > 1:
        other = next(path for path in paths if path != held_out)
        raise DataError(
            f"{key}: by its name {held_out} is not for training; type the file to train on and the one to validate "
            f"on: dataset.path={other} dataset.validation_path={held_out}",
            problem_id="data-held-out-file",
        )


def _documents_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.lower().endswith(SUFFIXES) and path.is_file())


def _not_found_error(pattern: Path, text: str, key: str) -> DataError:
    if pattern.is_dir():
        message = (
            f"{key}: the folder {pattern} holds no file that ends in {', '.join(SUFFIXES)}; for files in its folders "
            f"type a glob such as '{pattern / '**' / '*.jsonl'}', for a folder in the layout of the hub "
            f"dataset=hub dataset.name={pattern}"
        )
        return DataError(message, problem_id="data-file-not-found")
    if "://" in text:
        message = f"{key}: {text} is a URL, and data is read from files: download it, and type its path"
        return DataError(message, problem_id="data-file-not-found")
    if is_in_book(text):
        message = f"{key}: {pattern} is not made yet; type the first command of the card in recipes/NAME/README.md"
        return DataError(message, problem_id="data-file-not-found")
    folder = next(parent for parent in pattern.parents if parent.is_dir())
    names = [path.name for path in _documents_in(folder)]
    return DataError(
        f"{key}: no file matches {pattern}.{did_you_mean(pattern.name, names)} {folder} holds: "
        f"{first_few(names, _NUM_NAMED) or 'no file of documents'}",
        problem_id="data-file-not-found",
    )
