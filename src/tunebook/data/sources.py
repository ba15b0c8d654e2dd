"""From a data set's configuration to its documents: files, the hub, generated documents, or a mixture of these.

`load_corpus` reads everything once, strictly, into Arrow files in a folder of the caller. `corpus_identity` returns
what the documents depend on, without reading them, so that the caller can tell whether they were prepared before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tunebook.config.choices import BadDocuments, Format, Reasoning, Source
from tunebook.config.schema import DatasetConfig, DatasetSource
from tunebook.data import hub
from tunebook.data.corpus import CONTENT_HASH, Corpus, CorpusKind, Loaded, Progress, Row, SourceRecord, write_rows
from tunebook.data.files import DataFile, find_files
from tunebook.data.formats import FormatSettings, Normalizer, field_templates, known_columns
from tunebook.data.keys import KeyAccount
from tunebook.data.mixture import count_repeated, count_shared, hold_out, mix
from tunebook.data.problems import DocumentError, DocumentProblems, Skipped
from tunebook.data.readers import Record, read_records, without_nulls
from tunebook.data.synthetic import load_synthetic
from tunebook.errors import DataError
from tunebook.files import remembered_hash, sha256_file


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Documents that are reported together: those of a file, or of a split of the hub."""

    records: Iterator[Record]
    problems: DocumentProblems
    label: str  # for a document's origin


@dataclass(frozen=True, kw_only=True)
class Loader:
    """What loading a source needs in addition to its configuration."""

    cache_dir: Path  # Arrow files are written here; the caller removes it
    system_prompt: str | None = None
    vocab_size: int | None = None
    eos_token_id: int | None = None
    progress: Progress | None = None
    max_bad_share: float | None = None  # of a source's documents that may be left out; None: a bad one is an error

    def file(self, key: str, part: str) -> Path:
        """The Arrow file of one source: `dataset.parts.chat`, `train` -> dataset.parts.chat.train.arrow."""
        return self.cache_dir / f"{key.replace('/', '_')}.{part}.arrow"

    def normalizer(self, source: DatasetSource, key: str) -> Normalizer:
        """A new one for the source configured under `key`."""
        settings = FormatSettings(
            text_field=source.text_field,
            system_prompt=self.system_prompt,
            vocab_size=self.vocab_size,
            template_kwargs=source.chat_template_kwargs,
            fields=field_templates(source, key),
        )
        return Normalizer(source.format, settings, KeyAccount(known_columns(settings), source.ignore_keys, key))

    def load(
        self, parts: Sequence[_Part], normalizer: Normalizer, limit: int | None, file: Path, location: str
    ) -> Loaded:
        """Write the first `limit` documents of some files or of a split; the caller adds their records.

        The first document settles the kind, which the file's columns depend on. Raises: DataError for bad documents,
        or without any document.
        """
        rows = self._rows(parts, normalizer)
        first = next(rows, None)
        kind, dataset = normalizer.kind, None
        if first is not None and kind is not None:
            dataset = write_rows(islice(chain([first], rows), limit), kind, file, self.progress)
        skipped = Skipped()
        for part in parts:  # `limit` may have ended the reading before the end of a file
            part.problems.raise_if_any()
            skipped.update(part.problems.skipped or Skipped())
        if self.max_bad_share is not None:
            num_documents = sum(part.problems.num_documents + part.problems.num_problems for part in parts)
            skipped.check_share(num_documents, self.max_bad_share, location)
        if dataset is None or kind is None:
            raise DataError(f"{location} holds no document", problem_id="data-file-empty")
        notes = [f"{location}: {note}" for note in normalizer.account.notes()]
        if normalizer.was_detected:
            notes.insert(0, f"{location}: format {normalizer.format.value}, by the keys of its first document")
        return Loaded(kind=kind, dataset=dataset, records=[], notes=notes, skipped=skipped)

    def _rows(self, parts: Sequence[_Part], normalizer: Normalizer) -> Iterator[Row]:
        """Rows with their origins. Raises: DataError at the end of a file or split, with all its problems together."""
        for part in parts:
            problems = part.problems
            problems.skipped = None if self.max_bad_share is None else Skipped()
            for number, record in part.records:
                try:
                    row = normalizer.row(record)
                except DocumentError as error:
                    problems.add(number, error)
                    if error.problem_id == "data-unknown-format":  # the other documents cannot be read either
                        problems.raise_if_any()
                else:
                    problems.num_documents += 1
                    yield {**row, "origin": f"{part.label}:{number}"}
            problems.raise_if_any()
            if problems.num_documents == 0 and not problems.num_problems:
                raise DataError(f"{problems.location} is empty: it holds no document", problem_id="data-file-empty")


def load_source(source: DatasetSource, key: str, loader: Loader) -> Loaded:
    """The training documents of one source; `key` is where it is configured, for messages."""
    if source.source is Source.files:
        assert source.path is not None, "a rule requires it"
        files = find_files(source.path, f"{key}.path")
        return load_files(source, key, files, loader.file(key, "train"), loader)
    if source.source is Source.hub:
        return load_hub_split(source, source.train_split, key, loader)
    assert source.source is Source.synthetic, "a rule refuses mixtures of mixtures"
    assert loader.vocab_size is not None and loader.eos_token_id is not None
    return load_synthetic(
        source.synthetic,
        num_documents=min(source.max_documents or source.synthetic.num_documents, source.synthetic.num_documents),
        vocab_size=loader.vocab_size,
        eos_token_id=loader.eos_token_id,
        file=loader.file(key, "train"),
        progress=loader.progress,
    )


def load_files(source: DatasetSource, key: str, files: list[DataFile], arrow_file: Path, loader: Loader) -> Loaded:
    """The documents of some files, up to `source.max_documents`; `key` is where they are configured."""
    normalizer = loader.normalizer(source, key)
    parts = []
    for file in files:
        problems = DocumentProblems(str(file.path))
        stored = read_records(file.path, problems, normalizer.account)
        parts.append(_Part(records=stored, problems=problems, label=file.label))
    location = files[0].location if len(files) == 1 else f"{key}: {len(files)} files"
    loaded = loader.load(parts, normalizer, source.max_documents, arrow_file, location)
    records, notes = [], loaded.notes
    for file, part in zip(files, parts, strict=True):
        if not part.problems.num_documents:  # after the last document that `max_documents` allows
            continue
        records.append(
            SourceRecord(
                location=file.location,
                revision=None,
                sha256=sha256_file(file.path),
                format=normalizer.format.value,
                num_documents=part.problems.num_documents,
            )
        )
        if part.problems.num_blank_lines:
            notes.append(f"{file.location}: skipped blank lines: {part.problems.num_blank_lines:,}")
        notes += [f"{file.location}: {note}" for note in part.problems.notes]
    return replace(loaded, records=records)


def load_hub_split(source: DatasetSource, split: str, key: str, loader: Loader) -> Loaded:
    """The documents of one split, up to `source.max_documents`."""
    repository = hub.find_repository(source, key)
    location = "/".join(part for part in (source.name, source.subset, split) if part)
    normalizer = loader.normalizer(source, key)
    rows = hub.load_split(source, repository, split, key, loader.cache_dir / "hub")
    records = ((number, without_nulls(row)) for number, row in enumerate(rows, 1))
    part = _Part(records=records, problems=DocumentProblems(location, "row"), label=location)
    file = loader.file(key, "train" if split == source.train_split else "validation")
    loaded = loader.load([part], normalizer, source.max_documents, file, location)
    record = SourceRecord(
        location=location,
        revision=repository.revision,
        sha256=repository.sha256,
        format=normalizer.format.value,
        num_documents=len(loaded.dataset),
    )
    return replace(loaded, records=[record])


def load_corpus(
    config: DatasetConfig,
    *,
    cache_dir: Path,
    vocab_size: int | None = None,
    eos_token_id: int | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Read all documents of a run; memory does not grow with their number.

    `cache_dir` must stay while the corpus is used. Raises: RequestError for missing data or contradicting settings,
    DataError for documents that cannot be used, with file and line.
    """
    loader = Loader(
        cache_dir=cache_dir,
        system_prompt=config.system_prompt,
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        progress=progress,
        max_bad_share=config.max_bad_share if config.bad_documents is BadDocuments.skip else None,
    )
    train = _load_mixture(config, loader) if config.source is Source.mixture else load_source(config, "dataset", loader)
    validation = _load_validation(config, loader)
    if validation is not None and validation.kind is not train.kind:
        raise DataError(
            f"the validation documents are of kind {validation.kind.value}, the training documents of kind "
            f"{train.kind.value}; bring them to one format first",
            problem_id="mixture-kinds",
        )
    notes = [*train.notes, *(validation.notes if validation else []), *_content_notes(config, train, validation)]
    if config.validation_share:
        train_part, validation_part = hold_out(train.dataset, config.validation_share)
    else:
        train_part, validation_part = train.dataset, validation.dataset if validation else None
    return Corpus(
        kind=train.kind,
        train=train_part.remove_columns(CONTENT_HASH),
        validation=validation_part.remove_columns(CONTENT_HASH) if validation_part is not None else None,
        records=[*train.records, *(validation.records if validation else [])],
        notes=notes,
        skipped={"train": train.skipped} | ({"validation": validation.skipped} if validation else {}),
    )


def _content_notes(config: DatasetConfig, train: Loaded, validation: Loaded | None) -> list[str]:
    """Remarks on all documents together."""
    notes = []
    for key, is_set in (
        ("system_prompt", config.system_prompt is not None),
        ("reasoning", config.reasoning is not Reasoning.keep),
    ):
        if is_set and train.kind is not CorpusKind.conversation:
            notes.append(f"dataset.{key} is not used: the documents are of kind {train.kind.value}, without turns")
    if repeated := count_repeated(train.dataset):
        notes.append(f"{repeated:,} of {len(train.dataset):,} documents repeat an earlier one")
    if validation and (shared := count_shared(train.dataset, validation.dataset)):
        notes.append(f"{shared:,} of {len(validation.dataset):,} validation documents are trained on too")
    return notes


# Fields that change no document, and places, whose content is hashed instead.
_NO_IDENTITY = ("num_workers", "mean_tokens", "num_documents", "path", "validation_path", "name", "revision", "parts")


def corpus_identity(config: DatasetConfig) -> dict[str, Any]:
    """Everything in a data set's configuration that the prepared documents depend on, as plain JSON values.

    No document is read: files are hashed; for the hub the revision is asked for, unless a commit is named. Raises:
    RequestError for missing data, as `load_corpus`.
    """
    identity = _source_identity(config, "dataset")
    if config.source is Source.mixture:
        identity["parts"] = [
            {"part": name, **_source_identity(part, f"dataset.parts.{name}")} for name, part in config.parts.items()
        ]
    if config.validation_path is not None:
        identity["validation"] = _file_identity(config.validation_path, "dataset.validation_path")
    return identity


def _source_identity(source: DatasetSource, key: str) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(source).items() if name not in _NO_IDENTITY}
    identity: dict[str, Any] = json.loads(json.dumps(fields, default=lambda choice: choice.name))
    if source.source is Source.files:
        identity["files"] = _file_identity(source.path or "", f"{key}.path")
    if source.source is Source.hub:
        repository = hub.find_repository(source, key)
        identity["repository"] = [source.name, repository.revision, repository.sha256]
    return identity


def _file_identity(text: str, key: str) -> list[list[str]]:
    return [[file.label, remembered_hash(file.path)] for file in find_files(text, key)]


def _load_mixture(config: DatasetConfig, loader: Loader) -> Loaded:
    parts = {name: load_source(part, f"dataset.parts.{name}", loader) for name, part in config.parts.items()}
    mixture = mix(parts, config.parts)
    if config.max_documents is not None and config.max_documents < len(mixture.dataset):
        mixture.notes.append(f"dataset.max_documents takes the mixture's first {config.max_documents:,} documents")
        return replace(mixture, dataset=mixture.dataset.select(range(config.max_documents)))
    return mixture


def _load_validation(config: DatasetConfig, loader: Loader) -> Loaded | None:
    """The validation documents that have a file or a split of their own."""
    everything = replace(config, max_documents=None)
    if config.validation_split is not None:
        return load_hub_split(everything, config.validation_split, "dataset", loader)
    if config.validation_path is None:
        return None
    files = find_files(config.validation_path, "dataset.validation_path")
    if config.source is not Source.files:  # the format named is that of the hub's rows or of the parts
        everything = replace(everything, format=Format.auto)
    return load_files(everything, "dataset", files, loader.file("dataset", "validation"), loader)
