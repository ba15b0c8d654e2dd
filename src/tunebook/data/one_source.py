"""Loading one source: its files, a split of the hub, or generated documents, checked and written to Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.config.choices import Source
from tunebook.config.schema import DatasetSource
from tunebook.data import hub
from tunebook.data.corpus import CorpusKind, Loaded, Progress, Row, SourceRecord, write_rows
from tunebook.data.files import DataFile, find_files
from tunebook.data.formats import FormatSettings, Normaliser, known_columns
from tunebook.data.json_file import Record
from tunebook.data.keys import KeyAccount
from tunebook.data.problems import DocumentError, DocumentProblems
from tunebook.data.readers import Part, read_records
from tunebook.data.synthetic import load_synthetic
from tunebook.errors import DataError, RequestError
from tunebook.files import sha256_file

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True, kw_only=True)
class Loader:
    """What loading a source needs beside its configuration."""

    cache_dir: Path  # Arrow files are written here; the caller removes it
    system_prompt: str | None = None
    vocab_size: int | None = None
    eos_token_id: int | None = None
    progress: Progress | None = None

    def file(self, key: str, part: str) -> Path:
        """Where the documents of one source go: `dataset.parts.chat`, `train` -> dataset.parts.chat.train.arrow."""
        return self.cache_dir / f"{key.replace('/', '_')}.{part}.arrow"

    def normaliser(self, source: DatasetSource, key: str) -> Normaliser:
        """A new one for the source configured under `key`."""
        settings = FormatSettings(
            text_field=source.text_field, system_prompt=self.system_prompt, vocab_size=self.vocab_size
        )
        account = KeyAccount(known_columns(source.text_field), source.ignore_keys, key)
        return Normaliser(source.format, settings, account)


def load_source(source: DatasetSource, key: str, loader: Loader) -> Loaded:
    """The training documents of one source; `key` is where it is configured, for messages."""
    if source.max_documents is not None and source.max_documents < 1:
        raise RequestError(
            f"{key}.max_documents={source.max_documents} must be at least 1, or null for all",
            problem_id="max-documents",
        )
    if source.source is Source.files:
        files = find_files(required_path(source, key), f"{key}.path")
        return load_files(source, key, files, loader.file(key, "train"), loader)
    if source.source is Source.hub:
        return load_hub_split(source, source.train_split, key, loader)
    if source.source is Source.synthetic:
        assert loader.vocab_size is not None, "synthetic documents need the size of the vocabulary"
        assert loader.eos_token_id is not None, "synthetic documents need the EOS token"
        limit = source.max_documents or source.synthetic.num_documents
        return load_synthetic(
            source.synthetic,
            num_documents=min(limit, source.synthetic.num_documents),
            vocab_size=loader.vocab_size,
            eos_token_id=loader.eos_token_id,
            file=loader.file(key, "train"),
            progress=loader.progress,
        )
    raise RequestError(f"{key}.source=mixture: a part of a mixture cannot be a mixture", problem_id="mixture-parts")


def required_path(source: DatasetSource, key: str) -> str:
    """The path of a source of files. Raises: RequestError when none was said."""
    if source.path is None:
        raise RequestError(
            f"{key}.source=files needs {key}.path=FILE_OR_GLOB, such as {key}.path='data/*.jsonl'",
            problem_id="data-file-not-found",
        )
    return source.path


def load_files(source: DatasetSource, key: str, files: list[DataFile], arrow_file: Path, loader: Loader) -> Loaded:
    """The documents of some files, up to `source.max_documents`; `key` is where they are configured."""
    normaliser = loader.normaliser(source, key)
    all_problems = [DocumentProblems(str(file.path)) for file in files]
    parts = (
        Part(problems=problems, records=read_records(file.path, problems, normaliser.account), label=file.label)
        for file, problems in zip(files, all_problems, strict=True)
    )
    dataset, kind = _write(
        _read_parts(parts, normaliser), normaliser, source.max_documents, arrow_file, loader.progress, files[0].location
    )
    for problems in all_problems:  # `max_documents` may have ended the reading before the end of a file
        problems.raise_if_any()
    # Files behind the last document that `max_documents` allows were not read.
    read = [(file, problems) for file, problems in zip(files, all_problems, strict=True) if problems.num_documents]
    records = [
        SourceRecord(
            location=file.location,
            revision=None,
            sha256=sha256_file(file.path),
            format=normaliser.format.value,
            num_documents=problems.num_documents,
        )
        for file, problems in read
    ]
    notes = _source_notes(normaliser, read[0][0].location, len(dataset))
    for file, problems in read:
        blank = problems.num_blank_lines
        notes += [f"{file.location}: skipped {blank:,} blank line{'s' if blank > 1 else ''}"] if blank else []
        notes += [f"{file.location}: {note}" for note in problems.notes]
    return Loaded(kind=kind, dataset=dataset, records=records, notes=notes)


def load_hub_split(source: DatasetSource, split: str, key: str, loader: Loader) -> Loaded:
    """The documents of one split, up to `source.max_documents`."""
    repository = hub.find_repository(source, key)
    location = hub.split_location(source, split)
    normaliser = loader.normaliser(source, key)
    parts = list(hub.split_parts(source, repository, split, key, loader.cache_dir / "hub", normaliser.account))
    file = loader.file(key, "train" if split == source.train_split else "validation")
    rows = _read_parts(parts, normaliser)
    dataset, kind = _write(rows, normaliser, source.max_documents, file, loader.progress, location)
    for part in parts:
        part.problems.raise_if_any()
    record = SourceRecord(
        location=location,
        revision=repository.revision,
        sha256=repository.sha256,
        format=normaliser.format.value,
        num_documents=len(dataset),
    )
    notes = _source_notes(normaliser, location, len(dataset))
    notes += [f"{part.label}: {note}" for part in parts for note in part.problems.notes]
    return Loaded(kind=kind, dataset=dataset, records=[record], notes=notes)


def _read_parts(parts: Iterable[Part], normaliser: Normaliser) -> Iterator[Row]:
    """The rows of files or of a split, one after the other. Raises: DataError where one has no document."""
    for part in parts:
        yield from _read_rows(part.records, normaliser, part.problems, part.label)
        if part.problems.num_documents == 0:
            raise DataError(
                f"{part.problems.location} is empty: {part.problems.num_blank_lines:,} blank lines and no document",
                problem_id="data-file-empty",
            )


def _read_rows(
    records: Iterator[Record], normaliser: Normaliser, problems: DocumentProblems, label: str
) -> Iterator[Row]:
    """Rows with their origins. Raises: DataError at the end, with all problems of this file or split together."""
    for number, record in records:
        try:
            row = normaliser.row(record)
        except DocumentError as error:
            if error.problem_id == "data-unknown-format":  # nothing that follows can be read either
                raise DataError(
                    f"{problems.location}, {problems.place(number)}: {error.message}", problem_id=error.problem_id
                ) from error
            problems.add(number, error)
        else:
            problems.num_documents += 1
            yield {**row, "origin": f"{label}:{number}"}
    problems.raise_if_any()


def _write(
    rows: Iterator[Row],
    normaliser: Normaliser,
    limit: int | None,
    file: Path,
    progress: Progress | None,
    location: str,
) -> tuple[datasets.Dataset, CorpusKind]:
    """Write the first `limit` rows; the first one settles the kind, which the file's columns depend on."""
    first = next(rows, None)
    if first is None or normaliser.kind is None:
        raise DataError(f"{location} is empty: it holds no document", problem_id="data-file-empty")
    dataset = write_rows(islice(chain([first], rows), limit), normaliser.kind, file, progress)
    return dataset, normaliser.kind


def _source_notes(normaliser: Normaliser, location: str, num_documents: int) -> list[str]:
    """How the documents were understood, and which of their keys were not read."""
    notes = [f"{location}: {note}" for note in normaliser.account.notes(num_documents)]
    if normaliser.was_detected:
        notes.insert(0, f"{location}: format {normaliser.format.value}, by the keys of its first document")
    return notes
