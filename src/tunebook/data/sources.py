"""From a data set's configuration to its documents: files, the hub, generated documents, or a mixture of these.

`load_corpus` reads everything once, strictly, into Arrow files in a folder of the caller. `corpus_identity` returns
what the documents depend on, without reading them, so that the caller can tell whether they were prepared before.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tunebook.config.choices import BadDocuments, Format, Reasoning, Source
from tunebook.config.schema import DatasetConfig, DatasetSource, sources_of
from tunebook.data import hub
from tunebook.data.conversation import Conversation
from tunebook.data.corpus import (
    CONTENT_HASH,
    Corpus,
    CorpusKind,
    Loaded,
    Row,
    SourceRecord,
    way_to_one_kind,
    write_rows,
)
from tunebook.data.files import JSON_SUFFIXES, PARQUET_SUFFIXES, find_files
from tunebook.data.formats import FormatSettings, Normalizer, detect_format, document_keys, field_templates
from tunebook.data.images import MARK, ImageReader, Size
from tunebook.data.mixture import content_hashes, hold_out, mix
from tunebook.data.problems import DocumentError, DocumentProblems, KeyAccount, Skipped
from tunebook.data.readers import Record, read_records, without_nulls
from tunebook.data.synthetic import load_synthetic
from tunebook.errors import DataError, RequestError
from tunebook.files import remembered_hash


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Documents that are reported together: those of a file, or of a split of the hub."""

    records: Iterator[Record]
    problems: DocumentProblems
    label: str  # for a document's origin
    location: str
    revision: str | None = None
    sha256: str | None
    folder: Path | None = None  # of the file, which its images are relative to


@dataclass(frozen=True, kw_only=True)
class _Loader:
    """Loads the sources of one data set into Arrow files in `cache_dir`."""

    config: DatasetConfig
    cache_dir: Path
    vocab_size: int | None
    eos_token_id: int | None
    images: list[ImageReader] = field(default_factory=list)  # of each source

    def load(self, source: DatasetSource, key: str) -> Loaded:
        """The training documents of one source; `key` is where it is configured, for messages."""
        if source.source is Source.files:
            return self.load_files(source, key, "path")
        if source.source is Source.hub:
            return self.load_split(source, key, source.train_split)
        assert source.source is Source.synthetic, "a rule refuses mixtures of mixtures"
        assert self.vocab_size is not None and self.eos_token_id is not None
        return load_synthetic(
            source.synthetic,
            num_documents=min(source.max_documents or source.synthetic.num_documents, source.synthetic.num_documents),
            vocab_size=self.vocab_size,
            eos_token_id=self.eos_token_id,
            file=self._file(key, "train"),
        )

    def load_files(self, source: DatasetSource, key: str, field: str) -> Loaded:
        """The documents of the files that the source's `field` names, up to `source.max_documents`."""
        normalizer = self._normalizer(source, key)
        parts = []
        for file in find_files(getattr(source, field), f"{key}.{field}"):
            problems = DocumentProblems(str(file.path))
            parts.append(
                _Part(
                    records=read_records(file.path, problems, normalizer.account),
                    problems=problems,
                    label=file.label,
                    location=file.location,
                    sha256=remembered_hash(file.path),
                    folder=file.path.parent,
                )
            )
        location = parts[0].location if len(parts) == 1 else f"{key}: {len(parts)} files"
        return self._write(parts, normalizer, source.max_documents, self._file(key, field), location)

    def load_split(self, source: DatasetSource, key: str, split: str) -> Loaded:
        """The documents of one split of the hub, up to `source.max_documents`."""
        repository = hub.find_repository(source, key)
        location = "/".join(part for part in (source.name, source.subset, split) if part)
        rows = hub.load_split(source, repository, split, key, self.cache_dir / "hub")
        part = _Part(
            records=((number, without_nulls(row)) for number, row in enumerate(hub.rows_of(rows), 1)),
            problems=DocumentProblems(location, "row"),
            label=location,
            location=location,
            revision=repository.revision,
            sha256=repository.sha256,
            folder=repository.folder,
        )
        file = self._file(key, "train" if split == source.train_split else "validation")
        return self._write([part], self._normalizer(source, key), source.max_documents, file, location)

    def _file(self, key: str, part: str) -> Path:
        return self.cache_dir / f"{key.replace('/', '_')}.{part}.arrow"

    def _normalizer(self, source: DatasetSource, key: str) -> Normalizer:
        self.images.append(ImageReader(may_download=self.config.download_images))
        settings = FormatSettings(
            images=self.images[-1],
            text_field=source.text_field,
            system_prompt=self.config.system_prompt,
            vocab_size=self.vocab_size,
            template_kwargs=source.chat_template_kwargs,
            fields=field_templates(source, key),
        )
        return Normalizer(source.format, settings, KeyAccount(document_keys(settings), source.ignore_keys, key))

    def _write(
        self, parts: Sequence[_Part], normalizer: Normalizer, limit: int | None, file: Path, location: str
    ) -> Loaded:
        """Write the first `limit` documents of some files or of a split.

        The first document settles the kind, which the file's columns depend on. Raises: DataError for bad documents,
        or without any document.
        """
        skips = self.config.bad_documents is BadDocuments.skip
        for part in parts:
            part.problems.skipped = Skipped() if skips else None
        rows = self._rows(parts, normalizer)
        first = next(rows, None)
        kind, dataset = normalizer.kind, None
        if first is not None and kind is not None:
            dataset = write_rows(islice(chain([first], rows), limit), kind, file)
        skipped = Skipped()
        for part in parts:  # `limit` may have ended the reading before the end of a file
            part.problems.raise_if_any()
            skipped.update(part.problems.skipped or Skipped())
        if skips:
            num_documents = sum(part.problems.num_documents + part.problems.num_problems for part in parts)
            skipped.check_share(num_documents, self.config.max_bad_share, location)
        if dataset is None or kind is None:
            raise DataError(f"{location} holds no document", problem_id="data-file-empty")
        notes = [f"{location}: {note}" for note in normalizer.account.notes()]
        if number := normalizer.settings.images.num_as_text:
            notes.append(f"{location}: documents with {MARK} as text, since they name no image: {number:,}")
        if normalizer.was_detected:
            notes.insert(0, f"{location}: format {normalizer.format.value}, by the keys of its first document")
        records = [
            SourceRecord(
                location=part.location,
                revision=part.revision,
                sha256=part.sha256,
                format=normalizer.format.value,
                num_documents=part.problems.num_documents,
            )
            for part in parts
            if part.problems.num_documents  # not after the last document that `limit` allows
        ]
        return Loaded(kind=kind, dataset=dataset, records=records, notes=notes, skipped=skipped)

    def _rows(self, parts: Sequence[_Part], normalizer: Normalizer) -> Iterator[Row]:
        """Rows with their origins. Raises: DataError at the end of a file or split, with all its problems together."""
        for part in parts:
            problems, normalizer.settings.images.folder = part.problems, part.folder
            for number, record in part.records:
                with problems.noted(number):
                    row = normalizer.row(record)
                    problems.num_documents += 1
                    yield {**row, "origin": f"{part.label}:{number}"}
            problems.raise_if_any()
            if problems.num_documents == 0 and not problems.num_problems:
                raise DataError(f"{problems.location} is empty: it holds no document", problem_id="data-file-empty")


def load_corpus(
    config: DatasetConfig,
    *,
    cache_dir: Path,
    vocab_size: int | None = None,
    eos_token_id: int | None = None,
) -> Corpus:
    """Read all documents of a run; memory does not grow with their number.

    `cache_dir` must stay while the corpus is used. Raises: RequestError for missing data or contradicting settings,
    DataError for documents that cannot be used, with file and line.
    """
    loader = _Loader(config=config, cache_dir=cache_dir, vocab_size=vocab_size, eos_token_id=eos_token_id)
    train = _load_mixture(config, loader) if config.source is Source.mixture else loader.load(config, "dataset")
    validation = _load_validation(config, loader)
    if validation is not None and validation.kind is not train.kind:
        raise DataError(
            f"the validation documents are of kind {validation.kind.value}, the training documents of kind "
            f"{train.kind.value}; {way_to_one_kind([validation.kind, train.kind])}",
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
        has_images=any(images.num_read for images in loader.images),
    )


def _content_notes(config: DatasetConfig, train: Loaded, validation: Loaded | None) -> list[str]:
    """Remarks on all documents together."""
    import numpy as np

    notes = []
    for key, is_set in (
        ("system_prompt", config.system_prompt is not None),
        ("reasoning", config.reasoning is not Reasoning.keep),
    ):
        if is_set and not train.kind.has_turns:
            notes.append(f"dataset.{key} is not used: the documents are of kind {train.kind.value}, without turns")
    if train.kind in (CorpusKind.prompt_completion, CorpusKind.text_pair):
        notes.append("no chat template is used, because 'prompt' is a text; for a chat write it as a list of turns")
    hashes, is_paired = content_hashes(train.dataset), train.kind.reads == "pairs"
    if repeated := len(hashes) - len(np.unique(hashes)):
        what = "pairs with an earlier one's prompt" if is_paired else "documents that repeat an earlier one"
        notes.append(f"{what}: {repeated:,} of {len(hashes):,}")
    if validation and (shared := int(np.isin(content_hashes(validation.dataset), hashes).sum())):
        what = "pairs whose prompt is" if is_paired else "documents that are"
        notes.append(f"validation {what} also trained on: {shared:,} of {len(validation.dataset):,}")
    return notes


_IMAGES_IN_JSON = re.compile(r'(?<!\\)"(?:images?|image_url)"\s*:|"type"\s*:\s*"(?:image|input_image)"')
_HEAD_BYTES = 65_536


_FIRST_DOCUMENTS = 20
_LONGEST_ARRAY_BYTES = 2**26  # a JSON array is read whole


@dataclass(frozen=True, kw_only=True)
class FirstImages:
    """The images of the first documents of each source, by which a run is planned. The preparation knows all."""

    are_there: bool  # also if they cannot be read here
    sizes: list[list[Size]]  # of each document


_first_images: dict[str, FirstImages] = {}  # in this process, by the configuration and its files


def first_images(config: DatasetConfig) -> FirstImages | None:
    """The images of the first documents, read as for training but never downloaded; None if no file is at hand."""
    files = _first_files(config)
    key = _key_of(config, files)
    if files and key not in _first_images:
        _first_images[key] = _images_of_first(config, files)
    return _first_images.get(key)


def note_images(config: DatasetConfig) -> None:
    """Remember that the documents have images, as their preparation found, for what is planned after it."""
    first = first_images(config)
    sizes = [] if first is None else first.sizes
    _first_images[_key_of(config, _first_files(config))] = FirstImages(are_there=True, sizes=sizes)


def _key_of(config: DatasetConfig, files: dict[str, Path]) -> str:
    return repr([config, *((file, file.stat().st_mtime_ns) for file in files.values())])


def begins_with_images(config: DatasetConfig) -> bool:
    """Whether the first documents have images; false if they are not at hand."""
    first = first_images(config)
    return first is not None and first.are_there


def _first_files(config: DatasetConfig) -> dict[str, Path]:
    """The first file of each source that has files here, by the key of the source."""
    files = {}
    for key, source in sources_of(config).items():
        if source.source is Source.files and source.path:
            with suppress(DataError):
                files[key] = find_files(source.path, key)[0].path
    return files


def first_reads(config: DatasetConfig) -> set[str]:
    """What the first documents of the sources that can be read are for: documents or pairs, as in `MethodFacts`."""
    reads = set()
    for key, file in _first_files(config).items():
        source = sources_of(config)[key]
        if source.question_template is not None:
            reads.add("documents")
            continue
        if _is_large_array(file):
            continue
        with suppress(OSError, ValueError, DataError, DocumentError):  # the preparation reports it
            records = read_records(file, DocumentProblems(str(file)), KeyAccount(document_keys(FormatSettings())))
            for _, record in islice(records, 1):
                is_auto = source.format is Format.auto
                format = detect_format(record, source.text_field) if is_auto else source.format
                reads.add("pairs" if format is Format.pairs else "documents")
    return reads


def _is_large_array(file: Path) -> bool:
    return file.name.lower().endswith(JSON_SUFFIXES) and file.stat().st_size > _LONGEST_ARRAY_BYTES


def _images_of_first(config: DatasetConfig, files: dict[str, Path]) -> FirstImages:
    here = replace(config, download_images=False)
    loader = _Loader(config=here, cache_dir=Path(), vocab_size=None, eos_token_id=None)
    sources, are_there, sizes = sources_of(config), False, []
    for key, file in files.items():
        try:
            if not _names_images(file):
                continue
            if _is_large_array(file):
                are_there = True
                continue
            normalizer = loader._normalizer(sources[key], key)
            images = normalizer.settings.images
            images.folder = file.parent
            records = read_records(file, DocumentProblems(str(file)), normalizer.account)
            for _, record in islice(records, _FIRST_DOCUMENTS):
                with suppress(DocumentError):  # the preparation reports it
                    row = normalizer.row(record)
                    placed = Conversation.of(row).images() if "messages" in row else []
                    sizes.append([(image["size"][0], image["size"][1]) for image in placed])
            are_there = are_there or images.num_read > 0
        except (OSError, ValueError, DataError, RequestError):  # as above
            continue
    return FirstImages(are_there=are_there, sizes=sizes)


def _names_images(file: Path) -> bool:
    """Whether the beginning of a file may name images."""
    if file.name.lower().endswith(PARQUET_SUFFIXES):
        import pyarrow.parquet as pq

        return bool(_IMAGES_IN_JSON.search(" ".join(f'"{name}":' for name in pq.read_schema(file).names)))
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        return bool(_IMAGES_IN_JSON.search(stream.read(_HEAD_BYTES).decode(errors="replace")))


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


def _load_mixture(config: DatasetConfig, loader: _Loader) -> Loaded:
    parts = {name: loader.load(part, f"dataset.parts.{name}") for name, part in config.parts.items()}
    mixture = mix(parts, config.parts)
    if config.max_documents is None or config.max_documents >= len(mixture.dataset):
        return mixture
    return replace(mixture, dataset=mixture.dataset.select(range(config.max_documents)))


def _load_validation(config: DatasetConfig, loader: _Loader) -> Loaded | None:
    """The validation documents that have a file or a split of their own."""
    everything = replace(config, max_documents=None)
    if config.validation_split is not None:
        return loader.load_split(everything, "dataset", config.validation_split)
    if config.validation_path is None:
        return None
    if config.source is not Source.files:  # the format named is that of the hub's rows or of the parts
        everything = replace(everything, format=Format.auto)
    return loader.load_files(everything, "dataset", "validation_path")
