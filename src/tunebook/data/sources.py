"""From a data set's configuration to its documents: files, the hub, generated documents, or a mixture of these.

`load_corpus` reads everything once, strictly, into Arrow files in a folder of the caller. `corpus_identity` returns
what the documents depend on, without reading them, so that the caller can tell whether they were prepared before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tunebook.config.choices import BadDocuments, Format, Reasoning, Source, SpecialText
from tunebook.config.schema import DatasetConfig, DatasetSource, sources_of
from tunebook.data import hub
from tunebook.data.corpus import CONTENT_HASH, Corpus, CorpusKind, Loaded, Progress, Row, SourceRecord, write_rows
from tunebook.data.files import DataFile, find_files, named_files
from tunebook.data.formats import FormatSettings, Normalizer, field_templates, known_columns
from tunebook.data.keys import KeyAccount
from tunebook.data.mixture import check_validation, count_repeated, count_shared, hold_out, mix
from tunebook.data.problems import DocumentError, DocumentProblems, Skipped
from tunebook.data.readers import Part, read_records, read_rows
from tunebook.data.synthetic import load_synthetic
from tunebook.errors import DataError, RequestError
from tunebook.files import remembered_hash, sha256_file


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
        account = KeyAccount(known_columns(settings), source.ignore_keys, key)
        return Normalizer(source.format, settings, account)

    def load(
        self, parts: Sequence[Part], normalizer: Normalizer, limit: int | None, file: Path, location: str
    ) -> Loaded:
        """Write the first `limit` documents of some files or of a split; the caller adds records and notes.

        The first document settles the kind, which the file's columns depend on. Raises: DataError for bad documents,
        or without any document.
        """
        rows = self._rows(parts, normalizer)
        first, kind, dataset = next(rows, None), normalizer.kind, None
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
        return Loaded(kind=kind, dataset=dataset, records=[], skipped=skipped)

    def _rows(self, parts: Sequence[Part], normalizer: Normalizer) -> Iterator[Row]:
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
                raise DataError(
                    f"{problems.location} is empty: {problems.num_blank_lines:,} blank lines and no document",
                    problem_id="data-file-empty",
                )


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
    """The path of a source of files. Raises: RequestError if there is none."""
    if source.path is None:
        raise RequestError(
            f"{key}.source=files needs {key}.path=FILE_OR_GLOB, such as {key}.path='data/*.jsonl'",
            problem_id="data-file-not-found",
        )
    return source.path


def load_files(source: DatasetSource, key: str, files: list[DataFile], arrow_file: Path, loader: Loader) -> Loaded:
    """The documents of some files, up to `source.max_documents`; `key` is where they are configured."""
    normalizer = loader.normalizer(source, key)
    parts = []
    for file in files:
        problems = DocumentProblems(str(file.path))
        stored = read_records(file.path, problems, normalizer.account)
        parts.append(Part(problems=problems, records=stored, label=file.label))
    location = files[0].location if len(files) == 1 else f"{key}: {len(files)} files"
    loaded = loader.load(parts, normalizer, source.max_documents, arrow_file, location)
    # Files after the last document that `max_documents` allows were not read.
    read = [(file, part.problems) for file, part in zip(files, parts, strict=True) if part.problems.num_documents]
    records = [
        SourceRecord(
            location=file.location,
            revision=None,
            sha256=sha256_file(file.path),
            format=normalizer.format.value,
            num_documents=problems.num_documents,
        )
        for file, problems in read
    ]
    notes = _source_notes(normalizer, key, read[0][0].location, len(loaded.dataset))
    for file, problems in read:
        blank = problems.num_blank_lines
        notes += [f"{file.location}: skipped {blank:,} blank line{'s' if blank > 1 else ''}"] if blank else []
        notes += [f"{file.location}: {note}" for note in problems.notes]
    return replace(loaded, records=records, notes=notes)


def load_hub_split(source: DatasetSource, split: str, key: str, loader: Loader) -> Loaded:
    """The documents of one split, up to `source.max_documents`."""
    repository = hub.find_repository(source, key)
    location = hub.split_location(source, split)
    normalizer = loader.normalizer(source, key)
    rows = hub.load_split(source, repository, split, key, loader.cache_dir / "hub")
    records = read_rows(rows, normalizer.account)
    part = Part(problems=DocumentProblems(location, "row"), records=records, label=location)
    file = loader.file(key, "train" if split == source.train_split else "validation")
    loaded = loader.load([part], normalizer, source.max_documents, file, location)
    record = SourceRecord(
        location=location,
        revision=repository.revision,
        sha256=repository.sha256,
        format=normalizer.format.value,
        num_documents=len(loaded.dataset),
    )
    notes = _source_notes(normalizer, key, location, len(loaded.dataset))
    return replace(loaded, records=[record], notes=notes)


def _source_notes(normalizer: Normalizer, key: str, location: str, num_documents: int) -> list[str]:
    """The detected format, the keys that were not read, and a text's field that was named for nothing."""
    notes = [f"{location}: {note}" for note in normalizer.account.notes(num_documents)]
    text_field = normalizer.settings.text_field
    if text_field != DatasetSource.text_field and normalizer.format is not Format.text:
        notes.insert(
            0,
            f"{key}.text_field={text_field} is not used: the documents are of format {normalizer.format.value}; to "
            f"train on this field type {key}.format=text",
        )
    if normalizer.was_detected:
        notes.insert(0, f"{location}: format {normalizer.format.value}, by the keys of its first document")
    return notes


# Fields of DatasetSource and DatasetConfig that decide the documents; hashes cover paths and names.
_SOURCE_FIELDS = (
    "source",
    "subset",
    "train_split",
    "format",
    "text_field",
    "question_template",
    "answer_template",
    "max_documents",
    "synthetic",
    "weight",
    "ignore_keys",
    "chat_template_kwargs",
)
_CORPUS_FIELDS = ("system_prompt", "validation_split", "validation_share", "max_bad_share")


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
    check_validation(config)
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
    _check_kinds(train, validation)
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


def _check_kinds(train: Loaded, validation: Loaded | None) -> None:
    if validation is not None and validation.kind is not train.kind:
        raise DataError(
            f"the validation documents are of kind {validation.kind.value}, the training documents of kind "
            f"{train.kind.value}; bring them to one format first",
            problem_id="mixture-kinds",
        )


def _content_notes(config: DatasetConfig, train: Loaded, validation: Loaded | None) -> list[str]:
    """Remarks on all documents together."""
    notes = []
    if train.kind is not CorpusKind.conversation:
        used_for_turns = {
            "dataset.system_prompt": config.system_prompt is not None,
            "dataset.reasoning": config.reasoning is not Reasoning.keep,
            **{
                f"{key}.chat_template_kwargs": source.chat_template_kwargs for key, source in sources_of(config).items()
            },
        }
        notes = [
            f"{key} is not used: the documents are of kind {train.kind.value}, without turns"
            for key, is_set in used_for_turns.items()
            if is_set
        ]
    if train.kind is CorpusKind.tokens and config.special_tokens_in_content is not SpecialText.auto:
        notes.append("dataset.special_tokens_in_content is not used: the documents are tokens already")
    repeated = count_repeated(train.dataset)
    if repeated:
        notes.append(f"{repeated:,} of {len(train.dataset):,} documents repeat an earlier one")
    shared = count_shared(train.dataset, validation.dataset) if validation else 0
    if validation and shared:
        notes.append(f"{shared:,} of {len(validation.dataset):,} validation documents are trained on too")
    return notes


def corpus_identity(
    config: DatasetConfig, *, vocab_size: int | None = None, eos_token_id: int | None = None
) -> dict[str, Any]:
    """Everything the documents of `load_corpus` depend on, as plain JSON values, without reading a document.

    Files are hashed; for the hub the revision is asked for, unless a commit is named. Raises: RequestError for
    missing data, as `load_corpus`.
    """
    check_validation(config)
    identity: dict[str, Any] = {
        "vocab_size": vocab_size,
        "eos_token_id": eos_token_id,
        **{name: getattr(config, name) for name in _CORPUS_FIELDS},
        "bad_documents": config.bad_documents.name,
    }
    if config.source is Source.mixture:
        identity["max_documents"] = config.max_documents
        identity["parts"] = [
            {"part": name, **_source_identity(part, f"dataset.parts.{name}")} for name, part in config.parts.items()
        ]
    else:
        identity["train"] = _source_identity(config, "dataset")
    if config.validation_path is not None:
        identity["validation"] = _file_identity(config.validation_path, "dataset.validation_path")
    return identity


def _source_identity(source: DatasetSource, key: str) -> dict[str, Any]:
    fields = {name: getattr(source, name) for name in _SOURCE_FIELDS if hasattr(source, name)}
    fields["source"], fields["format"] = source.source.name, source.format.name
    fields["synthetic"] = asdict(source.synthetic) if source.source is Source.synthetic else None
    if source.source is Source.files:
        fields["files"] = _file_identity(required_path(source, key), f"{key}.path")
    if source.source is Source.hub:
        repository = hub.find_repository(source, key)
        fields["repository"] = [source.name, repository.revision, repository.sha256]
    return fields


def _file_identity(text: str, key: str) -> list[list[str]]:
    return [[file.label, remembered_hash(file.path)] for file in find_files(text, key)]


def _load_mixture(config: DatasetConfig, loader: Loader) -> Loaded:
    if not config.parts:
        raise RequestError(
            "dataset.source=mixture needs parts, such as dataset.parts.chat.path=chat.jsonl "
            "dataset.parts.code.path=code.jsonl",
            problem_id="mixture-parts",
        )
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
    key = "dataset.validation_path"
    files = find_files(config.validation_path, key)
    named = {place: text for place, text in named_files(config).items() if place != key}
    training = {file.path: place for place, text in named.items() for file in find_files(text, place)}
    if shared := [file.path for file in files if file.path in training]:
        raise RequestError(
            f"{key}: {', '.join(map(str, shared))} is also in {training[shared[0]]}; a document cannot be in both "
            "parts. To hold out some of one file, say dataset.validation_share=0.05",
            problem_id="validation-overlap",
        )
    if config.source is not Source.files:  # the format named is that of the hub's rows or of the parts
        everything = replace(everything, format=Format.auto)
    return load_files(everything, "dataset", files, loader.file("dataset", "validation"), loader)
