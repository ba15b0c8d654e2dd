"""Look for a run's items in its training documents: before the training, and for an evaluation of other tasks.

The documents are read again from their sources, and not taken from the prepared tokens, which know neither a document's
origin nor the text that was cut off.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from tunebook import __version__
from tunebook.config.choices import Contamination, Source
from tunebook.config.schema import RunConfig
from tunebook.data.corpus import Corpus, CorpusKind
from tunebook.data.prepare import needs_tokenizer, vocabulary
from tunebook.data.sources import corpus_identity
from tunebook.data.turns import texts_of_turn
from tunebook.errors import DataError, TunebookError
from tunebook.evaluate.contamination.index import build_index
from tunebook.evaluate.contamination.items import Item, ItemGroup, conversation_items, document_item, task_items
from tunebook.evaluate.contamination.result import group_results, items_hash, write_result
from tunebook.evaluate.contamination.search import Search, Texts
from tunebook.evaluate.harness import HarnessSettings, LoadedTask, load_tasks
from tunebook.evaluate.task_files import Task
from tunebook.files import atomic_write_json, cache_root, sha256_text
from tunebook.model.tokenizer_files import tokenizer_files_hash
from tunebook.record.contamination import FORMAT, dataset_of, read_contamination, request_of, result_lines
from tunebook.record.run_folder import RUN_FILE

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase


_NO_CONTEXT = sys.maxsize  # no model reads the items here


def check_run(run: Path, config: RunConfig, tasks: Sequence[Task]) -> None:
    """Check a run before its training, write the result, and print it."""
    started = time.monotonic()
    request = request_of(run, config)
    groups = _groups_of(tasks if request["tasks"] else [], config.evaluation.limit)
    result = _search(run, config, groups, with_validation=True)
    result |= {"request": request, "seconds": round(time.monotonic() - started, 1)}
    write_result(run, result)
    _print(result)


def _groups_of(tasks: Sequence[Task], limit: int | None) -> list[ItemGroup]:
    """The items of tasks, without a model or a chat template. Tasks whose data is missing are left out."""
    groups = [conversation_items(task.name, task.conversations, limit) for task in tasks if task.conversations]
    if others := [task for task in tasks if not task.conversations]:
        with TemporaryDirectory(prefix="tunebook-evaluation-") as folder:
            settings = HarnessSettings(
                tokenizer=cast(Any, None),  # only prompts of conversations are rendered
                max_length=_NO_CONTEXT,
                num_fewshot=None,
                limit=limit,
                system_prompt=None,
                items_folder=Path(folder),
                cache_folder=Path(folder),
            )
            groups += [
                task_items(name, found.task, limit) for name, found in load_tasks(others, settings).tasks.items()
            ]
    return groups


def _search(run: Path, config: RunConfig, groups: list[ItemGroup], *, with_validation: bool) -> dict[str, Any]:
    """Return the content of the file, without the request. If documents cannot be read, it says why.

    A search of the same documents for the same items is not repeated, in a sweep for example.
    """
    empty: dict[str, Any] = {"not_checked": None, "num_documents": 0, "groups": {}}
    recorded = dataset_of(run).get("records")
    try:
        file = _result_file(config, groups, with_validation=with_validation)
        known = _known_result(file)
        if known is not None and (recorded is None or is_same_data(known["sources"], recorded)):
            return empty | known
        with open_documents(config, recorded) as documents:
            validation = documents.validation_group() if with_validation else None
            groups = [group for group in [*groups, *([validation] if validation else [])] if group.items]
            found = _search_documents(documents, groups)
    except TunebookError as error:
        return empty | {"not_checked": error.message.splitlines()[0]}
    with suppress(OSError):  # a full disk costs only another search
        atomic_write_json(file, found)
    return empty | found


def _result_file(config: RunConfig, groups: Sequence[ItemGroup], *, with_validation: bool) -> Path:
    """Where the result of a search is kept: its name covers the documents, the items and the method.

    Raises: RequestError if the documents are not there any more.
    """
    vocab_size, eos_token_id = vocabulary(config)
    asked = {
        "corpus": corpus_identity(config.dataset, vocab_size=vocab_size, eos_token_id=eos_token_id),
        "tokenizer": tokenizer_files_hash(config.model) if needs_tokenizer(config.dataset) else None,
        "items": {group.name: items_hash(group) for group in groups},
        "with_validation": with_validation,
        "format": FORMAT,
        "version": __version__,
    }
    name = sha256_text(json.dumps(asked, sort_keys=True))
    return results_folder() / f"{name}.json"


def _known_result(file: Path) -> dict[str, Any] | None:
    """A kept result; None if there is none, or it is damaged."""
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    keys = {"num_documents", "sources", "groups"}
    return found if isinstance(found, dict) and keys <= found.keys() else None


def _search_documents(documents: Documents, groups: Sequence[ItemGroup]) -> dict[str, Any]:
    search = Search(build_index(groups))
    for batch in documents.batches():
        search.add(batch)
    results = group_results(groups, search.finish(), documents.origin)
    return {
        "num_documents": search.num_documents,
        "sources": [asdict(record) for record in documents.corpus.records],
        "groups": {group.name: result for group, result in zip(groups, results, strict=True)},
    }


def check_evaluated(
    run: Path,
    config: RunConfig,
    loaded: Mapping[str, LoadedTask],
    limit: int | None,
) -> dict[str, Any] | None:
    """Return the result for the tasks of an evaluation, of the same items as an earlier check or checked now.

    None if it is switched off, and for a model that belongs to no run.
    """
    is_off = config.evaluation.contamination is Contamination.disabled or config.dataset.source is Source.synthetic
    if is_off or not (run / RUN_FILE).is_file():
        return None
    groups = [
        task_items(name, task.task, limit)
        if task.source.conversations is None
        else conversation_items(name, task.source.conversations, limit)
        for name, task in loaded.items()
    ]
    known = read_contamination(run) or {
        "not_checked": None,
        "num_documents": 0,
        "groups": {},
        "request": None,
        "seconds": 0,
    }
    kept = {} if known["not_checked"] else known["groups"]
    new = [group for group in groups if kept.get(group.name, {}).get("items_sha256") != items_hash(group)]
    if new:
        found = _search(run, config, new, with_validation=False)
        if found["not_checked"]:
            return {**known, "not_checked": found["not_checked"], "groups": {}}
        known = {**known, **found, "groups": {**kept, **found["groups"]}}
        if limit is None:  # the file keeps what is known of all items
            write_result(run, {key: value for key, value in known.items() if key not in ("format", "method")})
    return {**known, "groups": {group.name: known["groups"][group.name] for group in groups if group.items}}


def _print(result: Mapping[str, Any]) -> None:
    for line, is_warning in result_lines(result["groups"], result["not_checked"]):
        print(f"{'warning: ' if is_warning else ''}contamination: {line}", file=sys.stderr, flush=True)


MAX_VALIDATION_ITEMS = 10_000  # of a larger part, so many from all over it: the index keeps items in memory
VALIDATION = "validation part"  # with a blank, which no task has in its name
_BATCH = 500  # documents in memory ...
_BATCH_CHARACTERS = 4_000_000  # ... and their text that is searched at once


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a run, while their files are open."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase | None  # only for documents that are tokens

    def batches(self) -> Iterator[list[Texts]]:
        """The training documents in their order, each as its turns or fields."""
        for batch in self.corpus.train.iter(batch_size=_BATCH):
            documents: list[Texts] = []
            size = 0
            for row in _rows(batch):
                documents.append(self._texts(row))
                size += sum(map(len, documents[-1]))
                if size > _BATCH_CHARACTERS:
                    yield documents
                    documents, size = [], 0
            if documents:
                yield documents

    def origin(self, number: int) -> str:
        """Where a training document is from, such as `train.jsonl:17`."""
        return str(self.corpus.train[number]["origin"])

    def validation_group(self) -> ItemGroup | None:
        """The validation documents as items; None without a validation part."""
        part = self.corpus.validation
        if part is None:
            return None
        step = max(1.0, len(part) / MAX_VALIDATION_ITEMS)
        numbers = [int(place * step) for place in range(min(len(part), MAX_VALIDATION_ITEMS))]
        items = [
            self._item(number, row)
            for start in range(0, len(numbers), _BATCH)
            for number, row in zip(numbers[start : start + _BATCH], self._chosen(part, numbers, start), strict=True)
        ]
        return ItemGroup(name=VALIDATION, items=items, num_all=len(part))

    def _chosen(self, part: datasets.Dataset, numbers: list[int], start: int) -> list[dict[str, Any]]:
        return _rows(part[numbers[start : start + _BATCH]])

    def _item(self, number: int, row: dict[str, Any]) -> Item:
        is_tokens = self.corpus.kind is CorpusKind.tokens
        return document_item(number, {"text": self._decode(row)} if is_tokens else row)

    def _texts(self, row: Mapping[str, Any]) -> Texts:
        kind = self.corpus.kind
        if kind is CorpusKind.conversation:
            return [text for turn in row["messages"] for text in texts_of_turn(turn)]
        if kind is CorpusKind.prompt_completion:
            return [row["prompt"], row["completion"]]
        return [self._decode(row) if kind is CorpusKind.tokens else row["text"]]

    def _decode(self, row: Mapping[str, Any]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(row["input_ids"], skip_special_tokens=True))


def _rows(batch: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


@contextmanager
def open_documents(config: RunConfig, recorded: Sequence[Mapping[str, Any]] | None) -> Iterator[Documents]:
    """Read the documents of a run into temporary files. `recorded` are the sources in its manifest.

    Raises: RequestError or DataError if they cannot be read any more, or are not those that the run was trained on.
    """
    from tunebook.data.sources import load_corpus
    from tunebook.model.tokenizer import load_tokenizer

    folder = results_folder()
    vocab_size, eos_token_id = vocabulary(config)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        corpus = load_corpus(config.dataset, cache_dir=Path(name), vocab_size=vocab_size, eos_token_id=eos_token_id)
        _require_same(corpus, recorded)
        is_tokens = corpus.kind is CorpusKind.tokens
        tokenizer = load_tokenizer(config.model, is_padded=False) if is_tokens else None
        yield Documents(corpus=corpus, tokenizer=tokenizer)


def results_folder() -> Path:
    """The folder of kept results and temporary files, made if it is not there."""
    folder = cache_root() / "contamination"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_same_data(sources: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two lists of source records are of the same contents."""
    one, other = ([(record.get("sha256"), record.get("revision")) for record in each] for each in (sources, recorded))
    return one == other


def _require_same(corpus: Corpus, recorded: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises: DataError if a source is not as it was when the run was trained."""
    if recorded is not None and not is_same_data([asdict(record) for record in corpus.records], recorded):
        names = ", ".join(str(record["location"]) for record in recorded)
        raise DataError(
            f"{names}: not as it was when the run was trained; put that version back to have it compared",
            problem_id="training-data-changed",
        )
