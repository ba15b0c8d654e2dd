"""From a data set's configuration to its documents: files, the hub, generated, or a mixture of these.

`load_corpus` reads everything once, strictly, into Arrow files in a folder of the caller's; `corpus_identity` says,
without reading documents, what they depend on, so that the caller can tell whether it has prepared them before.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tunebook.config.choices import Format, Source
from tunebook.config.schema import DatasetConfig, DatasetSource
from tunebook.data import hub
from tunebook.data.corpus import CONTENT_HASH, Corpus, CorpusKind, Loaded, Progress, SourceRecord
from tunebook.data.files import find_files
from tunebook.data.held_out import check_validation, count_repeated, count_shared, hold_out
from tunebook.data.mixture import mix
from tunebook.data.one_source import Loader, load_files, load_hub_split, load_source, required_path
from tunebook.errors import DataError, RequestError
from tunebook.files import remembered_hash

__all__ = ["Corpus", "CorpusKind", "SourceRecord", "corpus_identity", "load_corpus"]

# What of DatasetSource and DatasetConfig decides the documents; paths and names are covered by their hashes.
_SOURCE_FIELDS = (
    "source",
    "subset",
    "train_split",
    "format",
    "text_field",
    "max_documents",
    "synthetic",
    "weight",
    "ignore_keys",
)
_CORPUS_FIELDS = ("system_prompt", "validation_split", "validation_share")


def load_corpus(
    config: DatasetConfig,
    *,
    cache_dir: Path,
    vocab_size: int | None = None,
    eos_token_id: int | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Read all documents of a run; memory does not grow with their number.

    `cache_dir` must stay while the corpus is used. Raises: RequestError for what cannot be found or does not go
    together, DataError for documents that cannot be used, with file and line.
    """
    check_validation(config)
    loader = Loader(
        cache_dir=cache_dir,
        system_prompt=config.system_prompt,
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        progress=progress,
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
    )


def _check_kinds(train: Loaded, validation: Loaded | None) -> None:
    if validation is not None and validation.kind is not train.kind:
        raise DataError(
            f"the validation documents are of kind {validation.kind.value}, the training documents of kind "
            f"{train.kind.value}; bring them to one format first",
            problem_id="mixture-kinds",
        )


def _content_notes(config: DatasetConfig, train: Loaded, validation: Loaded | None) -> list[str]:
    """What looking at all documents together shows."""
    notes = []
    if train.kind is not CorpusKind.conversation and config.system_prompt is not None:
        kind = train.kind.value
        notes.append(f"dataset.system_prompt is not used: the documents are of kind {kind}, without turns")
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

    Files are hashed; for the hub the revision is asked for, unless a commit is named. Raises: RequestError as
    `load_corpus` does for what cannot be found.
    """
    check_validation(config)
    identity: dict[str, Any] = {
        "vocab_size": vocab_size,
        "eos_token_id": eos_token_id,
        **{name: getattr(config, name) for name in _CORPUS_FIELDS},
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
    if config.source is Source.files:
        training = {file.path for file in find_files(required_path(config, "dataset"), "dataset.path")}
        shared = [str(file.path) for file in files if file.path in training]
        if shared:
            raise RequestError(
                f"{key}: {', '.join(shared)} is also in dataset.path; a document cannot be in both parts. To hold out "
                "some of one file, say dataset.validation_share=0.05",
                problem_id="validation-overlap",
            )
    else:  # the format named is that of the hub's rows or of the parts
        everything = replace(everything, format=Format.auto)
    return load_files(everything, "dataset", files, loader.file("dataset", "validation"), loader)
