"""Prepare a run's documents: read, tokenize, mask, fit to length, and keep the result under a fingerprint.

Runs once, on the CPU, before any rank starts, so that no rank waits for another to tokenize. The result is made in a
folder of another name and renamed, under a lock: a killed preparation leaves nothing that looks finished, and of two
processes that want the same data one prepares and the other waits.

The fingerprint is a hash over everything that could change a prepared token, computed without reading documents or
loading a tokenizer. Every start computes it, so it imports neither torch nor transformers nor datasets.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.book import CHATML_TEMPLATE
from tunebook.config.choices import BadDocuments, Format, PeftMethod, Source
from tunebook.config.schema import DatasetConfig, RunConfig, sources_of
from tunebook.data.prepared import (
    ARROW_FILE,
    LENGTHS_FILE,
    PartCounts,
    Prepared,
    hash_documents,
    is_complete,
    load_prepared,
    write_prepared,
)
from tunebook.data.sources import corpus_identity, load_corpus
from tunebook.errors import DataError, RequestError, TunebookError
from tunebook.facts.strategies import strategy_facts
from tunebook.files import CACHE_VARIABLE, cache_root, sha256_file, sha256_text
from tunebook.hardware.disk import is_disk_full, no_space
from tunebook.model.base_config import read_vocab_size
from tunebook.model.tokenizer_files import tokenizer_files_hash

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.chunks import ChunkSettings
    from tunebook.data.corpus import Corpus

# Modules of this package that only read prepared data. A change in any other module prepares everything again.
_READERS = ("view.py", "packing.py", "sampler.py", "prepared.py")
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
            "group that has facts (such as model=qwen25_05b), or model.path=DIR with a config.json",
            problem_id="synthetic-without-vocabulary",
        )
    return vocab_size, vocab_size - 1


def made_from(config: RunConfig) -> dict[str, Any]:
    """Everything that could change a prepared token, as plain JSON values.

    Raises: RequestError if data or tokenizer are missing, or a hub that is needed cannot be reached.
    """
    vocab_size, eos_token_id = vocabulary(config)
    return {
        "code": _code_hash(),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "corpus": corpus_identity(config.dataset, vocab_size=vocab_size, eos_token_id=eos_token_id),
        "tokenizer": tokenizer_files_hash(config.model) if needs_tokenizer(config.dataset) else None,
        "template_date": config.model.template_date,
        "train_on": config.dataset.train_on.name,
        "special_tokens_in_content": config.dataset.special_tokens_in_content.name,
        "reasoning": config.dataset.reasoning.name,
        "overlong": config.dataset.overlong.name,
        "max_length": config.training.max_length,
    }


def fingerprint(content: dict[str, Any]) -> str:
    """The hash of `made_from`, as hexadecimal digits."""
    return sha256_text(json.dumps(content, sort_keys=True))


def _code_hash() -> str:
    here = Path(__file__).parent
    files = [file for file in sorted(here.glob("*.py")) if file.name not in _READERS]
    files += [here.parent / "model" / name for name in ("tokenizer.py", "chat_templates.py")]
    return sha256_text("".join(sha256_file(file) for file in files))


# Called with the progress: documents done, documents in all (None: unknown), and a description.
Progress = Callable[[int, int | None, str], None]

_PARTIAL = ".partial"  # the ending of a folder that is being made
_LOCK = ".lock"


def prepare(config: RunConfig, progress: Progress | None = None) -> Prepared:
    """The prepared data of a run: found under its fingerprint, or made now.

    Raises: RequestError for missing data, tokenizer or template, or a cache that cannot be written; DataError for
    documents that cannot be trained on; DoesNotFitError if the disk is full.
    """
    _refuse_added_tokens(config)
    content = made_from(config)
    name = fingerprint(content)
    root = cache_root() / "prepared"
    folder = root / name
    if is_complete(folder):
        return _with_padding(load_prepared(folder), config)
    report = progress or _ignore_progress
    try:
        with _lock(folder, report):
            if is_complete(folder):  # another process made it meanwhile
                return _with_padding(load_prepared(folder), config)
            _make(config, content, folder, report)
    except TunebookError:
        raise
    except Exception as error:  # libraries have errors of their own for a full disk
        if is_disk_full(error):
            advice = f"free some space, or name a folder on another disk: {CACHE_VARIABLE}=DIR"
            raise no_space("prepared data", root, advice) from error
        raise
    return load_prepared(folder, was_cached=False)


def _refuse_added_tokens(config: RunConfig) -> None:
    """Raises: RequestError for tokens that PEFT 0.21 cannot train: it needs the whole embeddings on each GPU."""
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


def _with_padding(prepared: Prepared, config: RunConfig) -> Prepared:
    """Return cached data if this run can use it: padding needs a padding token, which preparing may not have needed."""
    from tunebook.model.tokenizer import load_tokenizer, needs_padding

    if prepared.can_pad is False and needs_padding(config):
        load_tokenizer(config.model, is_padded=True)  # raises with advice
    return prepared


def _ignore_progress(done: int, total: int | None, what: str) -> None:
    """The default progress function."""


@contextmanager
def _lock(folder: Path, report: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(f"{folder}{_LOCK}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        report(0, None, "waiting for another process that is preparing the same data")
        lock.acquire()
    except OSError as error:
        if is_disk_full(error):
            raise
        raise RequestError(
            f"prepared data cannot be written to {folder.parent} ({error.strerror}); name a folder you may write to: "
            f"{CACHE_VARIABLE}=DIR",
            problem_id="cache-not-writable",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _make(config: RunConfig, content: dict[str, Any], folder: Path, report: Progress) -> None:
    """Prepare into a folder of another name, then rename it."""
    _remove_abandoned(folder.parent)
    partial = folder.with_name(folder.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # of a preparation that was killed
    partial.mkdir()
    try:
        _fill(config, content, folder.name, partial, report)
        shutil.rmtree(folder, ignore_errors=True)  # one that is not complete
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(root: Path) -> None:
    """Remove what killed preparations of other data left, unless a process holds its lock."""
    from filelock import FileLock, Timeout

    for partial in root.glob(f"*{_PARTIAL}"):
        lock = FileLock(str(partial).removesuffix(_PARTIAL) + _LOCK)
        with suppress(Timeout, OSError), lock.acquire(timeout=0):
            shutil.rmtree(partial, ignore_errors=True)


def _fill(config: RunConfig, content: dict[str, Any], name: str, folder: Path, report: Progress) -> None:
    started = time.monotonic()
    report(0, None, "reading documents")
    corpus_folder = folder / "corpus"
    corpus_folder.mkdir()
    vocab_size, eos_token_id = vocabulary(config)
    corpus = load_corpus(
        config.dataset,
        cache_dir=corpus_folder,
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        progress=lambda done: report(done, None, "reading documents"),
    )
    settings, tokenizer_facts = _settings(config, corpus, vocab_size)
    parts = {"train": corpus.train} | ({"validation": corpus.validation} if corpus.validation is not None else {})
    counts = {
        part: _write_part(folder / part, documents, settings, config, report) for part, documents in parts.items()
    }
    for part, skipped in corpus.skipped.items():
        counts[part].skipped.update(skipped.reasons)
        counts[part].first |= skipped.first
        _check_skipped(part, counts[part], settings)  # unreadable and not encodable ones together
    shutil.rmtree(corpus_folder)
    about = {
        "fingerprint": name,
        "content_sha256": hash_documents(folder / part for part in parts),
        "kind": corpus.kind.value,
        "max_length": config.training.max_length,
        **tokenizer_facts,
        "records": [asdict(record) for record in corpus.records],
        "notes": corpus.notes,
        "made_from": content,
        "seconds": round(time.monotonic() - started, 3),
    }
    write_prepared(folder, about, counts)


def _settings(config: RunConfig, corpus: Corpus, vocab_size: int | None) -> tuple[ChunkSettings, dict[str, Any]]:
    """The settings of the encoding, and the facts about tokenizer and template to record."""
    from tunebook.data.chunks import ChunkSettings
    from tunebook.data.corpus import CorpusKind
    from tunebook.data.template import template_hash
    from tunebook.model.tokenizer import (
        added_token_ids,
        has_padding_token,
        load_tokenizer,
        needs_padding,
        tokenizer_hash,
        writes_date,
    )

    tokenizer = None
    about: dict[str, Any] = {
        "tokenizer_sha256": None, "chat_template_sha256": None, "template_date": None, "can_pad": None,
    }  # fmt: skip
    if corpus.kind is not CorpusKind.tokens:
        assert needs_tokenizer(config.dataset)
        tokenizer = load_tokenizer(config.model, is_padded=needs_padding(config))
        about = {
            "tokenizer_sha256": tokenizer_hash(tokenizer),
            "chat_template_sha256": template_hash(tokenizer),
            "template_date": config.model.template_date if writes_date(tokenizer) else None,
            "can_pad": has_padding_token(tokenizer),
        }
        if added_token_ids(config.model, tokenizer):
            vocab_size = max(vocab_size or 0, len(tokenizer))
        if config.model.chat_template is not None and corpus.kind is CorpusKind.conversation:
            corpus.notes.append(f"answers end with {tokenizer.eos_token}, the EOS token of this run")
        if corpus.kind is CorpusKind.conversation:
            _check_template_kwargs(config, tokenizer)
    settings = ChunkSettings(
        kind=corpus.kind,
        tokenizer=tokenizer,
        train_on=config.dataset.train_on,
        overlong=config.dataset.overlong,
        max_length=config.training.max_length,
        vocab_size=vocab_size,
        special_text=config.dataset.special_tokens_in_content,
        max_bad_share=config.dataset.max_bad_share if config.dataset.bad_documents is BadDocuments.skip else None,
        reasoning=config.dataset.reasoning,
        template_date=config.model.template_date,
    )
    return settings, about


def _check_template_kwargs(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises: RequestError for a variable of the configuration that the chat template does not read."""
    from tunebook.data.template import require_template, template_variables

    known = template_variables(require_template(tokenizer)) | template_variables(
        require_template(tokenizer, for_tools=True)
    )
    for key, source in sources_of(config.dataset).items():
        unknown = sorted(source.chat_template_kwargs.keys() - known)
        if unknown:
            raise RequestError(
                f"{key}.chat_template_kwargs sets {', '.join(unknown)}, which the chat template does not read; it "
                f"reads: {', '.join(sorted(known))}",
                problem_id="template-variable-unknown",
            )


def _write_part(
    folder: Path, documents: datasets.Dataset, settings: ChunkSettings, config: RunConfig, report: Progress
) -> PartCounts:
    """Encode one part to an Arrow file in the layout of `datasets.load_from_disk`, and write its lengths."""
    import datasets
    import numpy as np
    import pyarrow as pa

    from tunebook.data.chunks import encode_chunks, prepared_schema

    what = f"tokenizing {folder.name} documents"
    folder.mkdir()
    features = datasets.Features.from_arrow_schema(prepared_schema())
    counts, lengths = PartCounts(), []
    report(0, len(documents), what)
    with (folder / ARROW_FILE).open("wb") as file, pa.ipc.new_stream(file, features.arrow_schema) as writer:
        for chunk in encode_chunks(documents, settings, config.dataset.num_workers):
            table = pa.ipc.open_stream(chunk.stream).read_all()
            writer.write_table(table.cast(features.arrow_schema))
            lengths.append(lengths_of(table))
            counts.add(chunk.counts)
            report(counts.num_read + counts.skipped.total(), len(documents), what)
    _check_skipped(folder.name, counts, settings)
    if counts.num_documents == 0:
        raise _nothing_left(folder.name, counts, settings)
    all_lengths = np.concatenate(lengths).astype(np.int32)
    np.save(folder / LENGTHS_FILE, all_lengths)
    counts.measure(all_lengths)
    datasets.DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": [{"filename": ARROW_FILE}],
        "_fingerprint": folder.parent.name[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return counts


def lengths_of(table: pa.Table) -> npt.NDArray[np.int32]:
    """A copy of the column of lengths: a view would keep the tokens of all chunks in memory."""
    lengths: npt.NDArray[np.int32] = table["length"].to_numpy().copy()
    return lengths


def _check_skipped(part: str, counts: PartCounts, settings: ChunkSettings) -> None:
    """Raises: DataError if more documents could not be encoded than may be left out."""
    from tunebook.data.problems import Skipped

    if settings.max_bad_share is not None:
        skipped = Skipped(reasons=counts.skipped, first=counts.first)
        skipped.check_share(counts.num_read + counts.skipped.total(), settings.max_bad_share, f"the {part} part")


def _nothing_left(part: str, counts: PartCounts, settings: ChunkSettings) -> DataError:
    reasons = "; ".join(f"{number:,} {reason}" for reason, number in (counts.dropped + counts.skipped).most_common())
    return DataError(
        f"every document of the {part} part was dropped ({counts.num_read:,} were read), because: {reasons}. "
        f"training.max_length is {settings.max_length:,} tokens: try a larger one, or dataset.overlong=split",
        problem_id="nothing-to-train-on",
    )
