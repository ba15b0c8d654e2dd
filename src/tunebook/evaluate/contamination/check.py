"""Look for a run's items in its training documents: before the training, and for an evaluation of other tasks."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from tunebook import __version__
from tunebook.config.choices import Contamination, Source
from tunebook.config.schema import RunConfig
from tunebook.data.prepare import needs_tokenizer, vocabulary
from tunebook.data.sources import corpus_identity
from tunebook.errors import TunebookError
from tunebook.evaluate.contamination.documents import Documents, is_same_data, open_documents, results_folder
from tunebook.evaluate.contamination.index import build_index
from tunebook.evaluate.contamination.items import ItemGroup, conversation_items, task_items
from tunebook.evaluate.contamination.result import group_results, items_hash, write_result
from tunebook.evaluate.contamination.search import Search
from tunebook.evaluate.harness import HarnessSettings, LoadedTask, load_tasks
from tunebook.evaluate.task_files import TaskFile
from tunebook.files import atomic_write_json
from tunebook.model.tokenizer_files import tokenizer_files_hash
from tunebook.record.contamination import FORMAT, dataset_of, read_contamination, request_of, result_lines
from tunebook.record.run_folder import RUN_FILE

_NO_CONTEXT = sys.maxsize  # no model reads the items here


def check_run(run: Path, config: RunConfig, tasks: Sequence[TaskFile | str]) -> None:
    """Check a run before its training, write the result, and print it."""
    started = time.monotonic()
    request = request_of(run, config)
    groups = _groups_of(tasks if request["tasks"] else [], config.evaluation.limit)
    result = _search(run, config, groups, with_validation=True)
    result |= {"request": request, "seconds": round(time.monotonic() - started, 1)}
    write_result(run, result)
    _print(result)


def _groups_of(tasks: Sequence[TaskFile | str], limit: int | None) -> list[ItemGroup]:
    """The items of tasks, without a model or a chat template. Tasks whose data is missing are left out."""
    local = {task.name: task for task in tasks if isinstance(task, TaskFile) and task.conversations is not None}
    others = [task for task in tasks if isinstance(task, str) or task.name not in local]
    groups = [conversation_items(name, cast(Path, task.conversations), limit) for name, task in local.items()]
    if others:
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
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
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
    tasks: Sequence[TaskFile | str],
    limit: int | None,
) -> dict[str, Any] | None:
    """Return the result for the tasks of an evaluation, of the same items as an earlier check or checked now.

    None if it is switched off, and for a model that belongs to no run.
    """
    is_off = config.evaluation.contamination is Contamination.disabled or config.dataset.source is Source.synthetic
    if is_off or not (run / RUN_FILE).is_file():
        return None
    files = {task.name: task.conversations for task in tasks if isinstance(task, TaskFile)}
    groups = []
    for name, task in loaded.items():
        file = files.get(name)
        groups.append(task_items(name, task.task, limit) if file is None else conversation_items(name, file, limit))
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
