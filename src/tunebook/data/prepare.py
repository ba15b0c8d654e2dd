"""Prepare a run's documents: read, tokenize, mask, fit to length, and keep the result under a fingerprint.

Runs once, on the CPU, before any rank starts, so that no rank waits for another to tokenize. The result is made in a
folder of another name and renamed, under a lock: a killed preparation leaves nothing that looks finished, and of two
processes that want the same data one prepares and the other waits.

The fingerprint is a hash over everything that could change a prepared token, computed without reading documents or
loading a tokenizer. Every start computes it, so it imports neither torch nor transformers nor datasets. The images that
documents name are known once these were read: their paths are then kept beside the data, under the hash of all else.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.book import CHATML_TEMPLATE, resolve_path
from tunebook.config.choices import Format, ModelPart, PackingMode, PeftMethod, Source
from tunebook.config.schema import DatasetConfig, ModelConfig, RunConfig, sources_of
from tunebook.data.prepared import (
    ARROW_FILE,
    LENGTHS_FILE,
    PREPARED_FILE,
    WIDTHS_FILE,
    PartCounts,
    Prepared,
    hash_documents,
    load_prepared,
    write_prepared,
)
from tunebook.data.problems import Skipped
from tunebook.data.sources import corpus_identity, load_corpus, note_images
from tunebook.errors import DataError, RequestError, TunebookError
from tunebook.facts.architectures import IMAGE_MASK_ARCHITECTURES, PACKED_IMAGE_ARCHITECTURES
from tunebook.facts.attention import attention_facts
from tunebook.facts.methods import METHODS, method_facts
from tunebook.facts.strategies import strategy_facts
from tunebook.files import (
    CACHE_VARIABLE,
    atomic_write_json,
    cache_root,
    remembered_hashes,
    sha256_file,
    sha256_text,
)
from tunebook.hardware.disk import is_disk_full, no_space
from tunebook.model.base_config import read_vocab_size
from tunebook.model.tokenizer_files import tokenizer_files_hash

if TYPE_CHECKING:
    import datasets

    from tunebook.data.chunks import ChunkSettings
    from tunebook.data.corpus import Corpus

# Modules of this package that only read prepared data. A change in any other module prepares everything again.
_READERS = ("view.py", "packing.py", "sampler.py", "batch.py")
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "datasets")


def needs_tokenizer(dataset: DatasetConfig) -> bool:
    """Whether documents have to be tokenized; false only if the configuration says that they are tokens already."""
    return not all(
        source.source is Source.synthetic or source.format is Format.pretokenized
        for source in sources_of(dataset).values()
    )


def vocabulary(config: RunConfig) -> tuple[int | None, int | None]:
    """The model's vocabulary size and, for generated documents, their last token: both None if unknown.

    Generated documents end with the vocabulary's last token, not the tokenizer's EOS: they must not need a tokenizer,
    since they are made for machines without the hub. Raises: RequestError if the vocabulary size is unknown.
    """
    vocab_size = read_vocab_size(config.model)
    if not any(source.source is Source.synthetic for source in sources_of(config.dataset).values()):
        return vocab_size, None
    if vocab_size is None:
        raise RequestError(
            "dataset=synthetic draws tokens from the model's vocabulary, whose size is not known here; choose a model "
            "that has facts (such as model=qwen25_05b), or a folder with a config.json: model=FOLDER",
            problem_id="synthetic-without-vocabulary",
        )
    return vocab_size, vocab_size - 1


def fingerprint(config: RunConfig) -> str:
    """The hash of everything that could change a prepared token or image, as hexadecimal digits.

    Raises: RequestError if data or tokenizer are missing, or a hub that is needed cannot be reached.
    """
    base = _hash_without_images(config)
    images = _images_file(config, base)
    if not images.is_file():
        return base
    paths = [Path(path) for path in json.loads(images.read_text())]
    hashes = remembered_hashes(path for path in paths if path.is_file())
    return sha256_text(json.dumps([base, *((str(path), hashes.get(path)) for path in paths)]))


def _images_file(config: RunConfig, base: str) -> Path:
    """The list of images that the documents name. A copy of them in another folder may have other images beside it."""
    sources = sources_of(config.dataset).values()
    typed = [config.dataset.validation_path, *(source.path for source in sources)]
    places = [str(resolve_path(text)) for text in typed if text]
    folders = [resolve_path(source.name) for source in sources if source.name]
    places += [str(folder) for folder in folders if folder.is_dir()]  # others are on the hub
    return cache_root() / "prepared" / f"{sha256_text(json.dumps([base, *places]))}.images"


def _hash_without_images(config: RunConfig) -> str:
    here = Path(__file__).parent
    code = [file for file in sorted(here.glob("*.py")) if file.name not in _READERS]
    code += [here.parent / "model" / name for name in ("tokenizer.py", "tokenizer_files.py", "processor.py")]
    made_from = {
        "code": [sha256_file(file) for file in code],
        "libraries": {name: version(name) for name in _LIBRARIES},
        "corpus": corpus_identity(config.dataset),
        "vocabulary": vocabulary(config),
        "tokenizer": tokenizer_files_hash(config.model) if needs_tokenizer(config.dataset) else None,
        "template_date": config.model.template_date,
        "max_length": config.training.max_length,
    }
    return sha256_text(json.dumps(made_from, sort_keys=True))


# Called with the progress: documents done, documents in all (None: unknown), and a description.
Progress = Callable[[int, int | None, str], None]


def prepare(config: RunConfig, progress: Progress | None = None) -> Prepared:
    """The prepared data of a run: found under its fingerprint, or made now.

    Raises: RequestError for missing data, tokenizer or template, or a cache that cannot be written; DataError for
    documents that cannot be trained on; DoesNotFitError if the disk is full.
    """
    _refuse_added_tokens(config)
    root = cache_root() / "prepared"
    folder = root / fingerprint(config)
    report = progress or (lambda done, total, what: None)
    if (folder / PREPARED_FILE).is_file():
        return _for_run(config, load_prepared(folder))
    try:
        report(0, None, "reading documents")
        with _lock(folder):
            if (folder / PREPARED_FILE).is_file():  # another process made it meanwhile
                return _for_run(config, load_prepared(folder))
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a preparation that was killed
            try:
                folder = root / _make(config, partial, report)
                if not (folder / PREPARED_FILE).is_file():  # images that changed may be as before
                    partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except TunebookError:
        raise
    except Exception as error:  # libraries have errors of their own for a full disk
        if is_disk_full(error):
            advice = f"free some space, or name a folder on another disk: {CACHE_VARIABLE}=DIR"
            raise no_space("prepared data", root, advice) from error
        raise
    return load_prepared(folder, was_cached=False)


def _for_run(config: RunConfig, prepared: Prepared) -> Prepared:
    from tunebook.data.corpus import CorpusKind

    require_method(config, CorpusKind(prepared.kind).reads)
    require_images(config, prepared.has_images)
    return prepared


def require_images(config: RunConfig, has_images: bool) -> None:
    """Raises: RequestError for settings that documents with images, or without, cannot be trained with."""
    if not has_images:
        if parts := [part.name for part in config.model.train if part is not ModelPart.language]:
            raise RequestError(
                f"model.train names {' and '.join(parts)}, and no document has an image; type 'model.train=[language]'",
                problem_id="train-without-images",
            )
        return
    note_images(config.dataset)
    facts = config.model.facts
    require_image_model(config.model, "the documents")
    is_proven = facts is not None and facts.architecture in PACKED_IMAGE_ARCHITECTURES
    if config.packing.mode is PackingMode.isolated and not is_proven:
        raise RequestError(
            "packing=isolated: the documents have images, and packed rows of "
            f"{'this model' if facts is None else facts.architecture} were not proven to keep these apart; type "
            "packing=padded",
            problem_id="images-packed",
        )
    if facts is not None and facts.architecture in IMAGE_MASK_ARCHITECTURES and not attention_facts(config).has_mask:
        raise RequestError(
            f"attention={config.attention.implementation.value}: {facts.architecture} lets the tokens of an image see "
            "each other, by a mask that this kernel leaves out; type attention=sdpa",
            problem_id="images-without-mask",
        )
    if config.parallelism.sequence_group_size > 1:
        raise RequestError(
            f"parallelism.sequence_group_size={config.parallelism.sequence_group_size}: the documents have images, and "
            "GPUs cannot share a row with these; type parallelism.sequence_group_size=1",
            problem_id="images-in-groups",
        )


def require_image_model(model: ModelConfig, what: str) -> None:
    """Raises: RequestError for a model of text alone, and `what` that has images."""
    if model.facts is not None and model.facts.architecture.endswith("ForCausalLM"):
        raise RequestError(
            f"{what} have images, and the model is trained as {model.facts.architecture}, which reads text alone; "
            "name a model for images and text, such as model=qwen25_vl_3b, or data without images",
            problem_id="model-without-images",
        )


def require_method(config: RunConfig, reads: str) -> None:
    """Raises: DataError for data, pairs or documents, that the run's method does not read."""
    own = method_facts(config).reads
    if reads != own:
        readers = " or ".join(f"method={name}" for name, facts in METHODS.items() if facts.reads == reads)
        form = "a chosen and a rejected answer to a prompt" if own == "pairs" else "one answer, or text"
        is_generated = config.dataset.source is Source.synthetic
        other = f"dataset.synthetic.pairs={str(own == 'pairs').lower()}" if is_generated else "name other data"
        raise DataError(
            f"the data are {reads}, and method={config.method.name} reads {own} ({form}); type {readers}, or {other}",
            problem_id="data-for-another-method",
        )


def _refuse_added_tokens(config: RunConfig) -> None:
    """Raises: RequestError for added tokens in divided embeddings, which PEFT cannot train."""
    from tunebook.model.tokenizer import added_token_ids, load_tokenizer

    if config.model.chat_template != CHATML_TEMPLATE or config.peft.method is PeftMethod.full:
        return
    if not strategy_facts(config).divides_weights:
        return
    if added_token_ids(config.model, load_tokenizer(config.model, is_padded=False)):
        raise RequestError(
            "model.chat_template=chatml adds tokens to this model, and parallelism="
            f"{config.parallelism.strategy.name} divides the embeddings that an adapter would train for them; type "
            "parallelism=ddp or parallelism=zero2, or peft=full",
            problem_id="added-tokens-divided",
        )


def _lock(folder: Path) -> AbstractContextManager[Any]:
    """Wait for the lock of a folder. Raises: RequestError for a cache that cannot be written."""
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{folder}.lock").acquire()
    except OSError as error:
        if is_disk_full(error):
            raise
        raise RequestError(
            f"prepared data cannot be written to {folder.parent} ({error.strerror}); name a folder you may write to: "
            f"{CACHE_VARIABLE}=DIR",
            problem_id="cache-not-writable",
        ) from error


def _make(config: RunConfig, folder: Path, report: Progress) -> str:
    """Prepare everything into a new folder; returns the fingerprint."""
    started = time.monotonic()
    corpus_folder = folder / "corpus"
    corpus_folder.mkdir(parents=True)
    vocab_size, eos_token_id = vocabulary(config)
    corpus = load_corpus(config.dataset, cache_dir=corpus_folder, vocab_size=vocab_size, eos_token_id=eos_token_id)
    require_method(config, corpus.kind.reads)
    require_images(config, corpus.has_images)
    settings, tokenizer_facts = _settings(config, corpus, vocab_size)
    parts = {"train": corpus.train} | ({"validation": corpus.validation} if corpus.validation is not None else {})
    images: set[str] = set()
    counts = {
        part: _write_part(folder / part, documents, settings, corpus.skipped.get(part, Skipped()), report, images)
        for part, documents in parts.items()
    }
    if images:
        atomic_write_json(_images_file(config, _hash_without_images(config)), sorted(images))
    shutil.rmtree(corpus_folder)
    name = fingerprint(config)
    about = {
        "fingerprint": name,
        "content_sha256": hash_documents(folder / part for part in parts),
        "kind": corpus.kind.value,
        "has_images": corpus.has_images,
        "image_folders": _folders_of(images),
        "max_length": config.training.max_length,
        **tokenizer_facts,
        "records": [asdict(record) for record in corpus.records],
        "notes": corpus.notes,
        "seconds": round(time.monotonic() - started, 3),
    }
    write_prepared(folder, about, counts)
    return name


def _folders_of(files: set[str]) -> list[str]:
    """The folders of files, without those inside of another one."""
    kept: list[Path] = []
    for folder in sorted({Path(file).parent for file in files}):
        if not kept or not folder.is_relative_to(kept[-1]):
            kept.append(folder)
    return [*map(str, kept)]


def _settings(config: RunConfig, corpus: Corpus, vocab_size: int | None) -> tuple[ChunkSettings, dict[str, Any]]:
    """The settings of the encoding, and the facts about tokenizer and template to record."""
    from tunebook.data.chunks import ChunkSettings
    from tunebook.data.template import require_template, template_hash, template_variables
    from tunebook.model.processor import load_image_processor
    from tunebook.model.tokenizer import added_token_ids, load_tokenizer, needs_padding, tokenizer_hash, writes_date

    tokenizer = images = None
    about: dict[str, Any] = dict.fromkeys(("tokenizer_sha256", "chat_template_sha256", "template_date"))
    if not corpus.kind.has_tokens:
        tokenizer = load_tokenizer(config.model, is_padded=needs_padding(config))
        about = {
            "tokenizer_sha256": tokenizer_hash(tokenizer),
            "chat_template_sha256": template_hash(tokenizer),
            "template_date": config.model.template_date if writes_date(tokenizer) else None,
        }
        if added_token_ids(config.model, tokenizer):
            vocab_size = max(vocab_size or 0, len(tokenizer))
        if corpus.has_images:
            images = load_image_processor(config.model, tokenizer, config.dataset.max_image_pixels)
        if corpus.kind.has_turns:
            if config.model.chat_template is not None:
                corpus.notes.append(f"answers end with {tokenizer.eos_token}, the EOS token of this run")
            known = template_variables(require_template(tokenizer))
            for key, source in sources_of(config.dataset).items():
                if unknown := sorted(source.chat_template_kwargs.keys() - known):
                    raise RequestError(
                        f"{key}.chat_template_kwargs sets {', '.join(unknown)}, which the chat template does not read; "
                        f"it reads: {', '.join(sorted(known))}",
                        problem_id="template-variable-unknown",
                    )
    settings = ChunkSettings(
        kind=corpus.kind,
        tokenizer=tokenizer,
        dataset=config.dataset,
        max_length=config.training.max_length,
        vocab_size=vocab_size,
        images=images,
        template_date=config.model.template_date,
    )
    return settings, about


def _write_part(
    folder: Path,
    documents: datasets.Dataset,
    settings: ChunkSettings,
    unreadable: Skipped,
    report: Progress,
    images: set[str],
) -> PartCounts:
    """Encode one part to an Arrow file, write its lengths, and add the files of its images to `images`."""
    import numpy as np
    import pyarrow as pa

    from tunebook.data.chunks import encode_chunks, prepared_schema
    from tunebook.data.sampler import IMAGES

    what = f"tokenizing {folder.name} documents"
    folder.mkdir()
    counts, lengths, widths = PartCounts(), [], []
    report(0, len(documents), what)
    schema = prepared_schema(settings.kind, has_images=settings.images is not None)
    with (folder / ARROW_FILE).open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for chunk in encode_chunks(documents, settings):
            writer.write_batch(chunk.batch)
            # A copy: a view would keep the tokens of all chunks in memory.
            lengths.append(chunk.batch.column("length").to_numpy().copy())
            if settings.kind.reads == "pairs":
                chosen = chunk.batch.column("chosen_length").to_numpy()
                widths.append(2 * np.maximum(chosen, lengths[-1] - chosen))
            if settings.images is not None:
                references = chunk.batch.column(IMAGES).flatten().to_pylist()
                images.update(reference.partition(" ")[2] for reference in references)
            counts.add(chunk.counts)
            report(counts.num_read + counts.skipped.reasons.total(), len(documents), what)
    counts.skipped.update(unreadable)
    num_documents = counts.num_read + counts.skipped.reasons.total()
    counts.skipped.check_share(num_documents, settings.dataset.max_bad_share, f"the {folder.name} part")
    if counts.num_documents == 0:
        other = ", or a lower dataset.max_image_pixels" if settings.images is not None else ""
        if not other and settings.kind.reads == "documents":
            other = ", or dataset.overlong=split"
        reasons = (counts.dropped + counts.skipped.reasons).most_common()
        raise DataError(
            f"all {settings.kind.reads} of the {folder.name} part were dropped ({counts.num_read:,} read), because: "
            f"{'; '.join(f'{number:,} {reason}' for reason, number in reasons)}. training.max_length is "
            f"{settings.max_length:,} tokens: try a larger one"
            f"{other}",
            problem_id="nothing-to-train-on",
        )
    all_lengths = np.concatenate(lengths).astype(np.int32)
    np.save(folder / LENGTHS_FILE, all_lengths)
    if widths:
        np.save(folder / WIDTHS_FILE, np.concatenate(widths).astype(np.int32))
    counts.measure(all_lengths)
    return counts
