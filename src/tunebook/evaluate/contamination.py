"""Look for evaluation items and validation documents in the training documents.

Texts are compared by their words: Unicode form NFKC, lower case, no punctuation. An item counts as

- exact if one training document has its whole question: every field of it, such as a passage and a question about it. A
  field of fewer than 8 words must be a whole turn or field there;
- overlapping if it is not exact, but 13 consecutive words of its question are in a document;
- shared_passage if those words are only in the longest of several fields;
- clean otherwise.

Thirteen words in more than 10 items of a task, or in more than half of a small task, are ignored: an instruction or a
template. Source: "Language Models are Few-Shot Learners" (GPT-3, arXiv 2005.14165), appendix C.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunebook.config.choices import Contamination, Source
from tunebook.config.schema import RunConfig
from tunebook.data.prepare import vocabulary
from tunebook.data.sources import load_corpus
from tunebook.data.turns import texts_of_turn
from tunebook.errors import DataError, TunebookError
from tunebook.evaluate.harness import LoadedTask, load_tasks, read_conversations
from tunebook.evaluate.results import Answer, mean_with_error
from tunebook.evaluate.task_files import Task
from tunebook.files import atomic_write_json, cache_root, sha256_text
from tunebook.record.contamination import CONTAMINATION_FILE, KINDS, read_contamination, request_of, result_lines
from tunebook.record.manifest import manifest_or_empty
from tunebook.record.run_folder import RUN_FILE

Question = tuple[str, ...]  # the fields or turns that one document must all hold; an item's number is its place

GRAM = 13  # consecutive words that mark an item
ANCHOR = 8  # consecutive words by which a whole question is found; a shorter one is compared as a whole
MAX_ITEMS_WITH_GRAM = 10
MAX_WORDS = 2000  # of a text whose 13-grams are looked for: memory grows by about 100 bytes for each
MAX_VALIDATION_ITEMS = 10_000
VALIDATION = "validation part"  # with a blank, which no task has in its name
NUM_EXAMPLES = 3  # of each group
_EXCERPT = 200  # characters of an item
_FEW_WORDS = 3  # a shorter field, such as a subject or a label, does not decide whether a question was found

# Chinese and Japanese write no spaces: each of their characters is one word.
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")
# Ten times as fast as `_WORD` on ASCII text: lower case, and a blank for all that is no letter or digit.
_ASCII = "".join(chr(code).lower() if chr(code).isalnum() else " " for code in range(128))


def words_of(text: str) -> list[str]:
    """The normalized words of a text."""
    if text.isascii():
        return text.translate(_ASCII).split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def _join(words: Sequence[str]) -> str:
    return f" {' '.join(words)} "


def _grams(words: Sequence[str], length: int = GRAM) -> set[int]:
    """Hashes of all runs of `length` words; none for a shorter text."""
    return set(map(hash, zip(*(words[start:] for start in range(length)), strict=False)))


def _anchors(words: Sequence[str]) -> set[int]:
    return _grams(words, ANCHOR) or {hash(tuple(words))}


def loaded_questions(loaded: Iterable[LoadedTask], config: RunConfig) -> dict[str, list[Question]]:
    """The items of loaded tasks by name, without examples, description and chat template."""
    questions, limit = {}, config.evaluation.limit
    for requested in loaded:
        for name, task in requested.content["tasks"].items():
            if requested.source.conversations is not None:
                questions[name] = conversation_questions(requested.source.conversations, config)
            else:
                documents = task.doc_iterator(rank=0, limit=limit, world_size=1)
                questions[name] = [_task_question(task, document) for _, document in documents]
    return questions


def _task_question(task: Any, document: Mapping[str, Any]) -> Question:
    """The fields that are in an item's prompt: training may show them in another template."""
    prompt = ""
    with suppress(Exception):  # a task's own function may raise anything; the evaluation reports it
        prompt = str(task.doc_to_text(document))
    texts = dict.fromkeys(text for text in document.values() if isinstance(text, str))
    fields = [text for text in texts if len(words_of(text)) >= _FEW_WORDS]
    within = _join(words_of(prompt))
    return tuple(text for text in fields if _join(words_of(text)) in within) or ((prompt,) if prompt else tuple(fields))


def conversation_questions(file: Path, config: RunConfig) -> list[Question]:
    """The items of a file of held-out conversations, in the order in which the harness numbers them."""
    read = read_conversations(file, None, download_images=config.dataset.download_images)
    return [_question_of(held_out.conversation.messages) for held_out in read][: config.evaluation.limit]


def document_question(row: Mapping[str, Any]) -> Question:
    """A document as an item: its prompt, the turns that are not the assistant's, or all of it."""
    if "messages" not in row:
        return (row.get("prompt", row.get("text")),)
    return _question_of(json.loads(row["messages"]))


def _question_of(turns: Sequence[dict[str, Any]]) -> Question:
    questions = [turn for turn in turns if turn["role"] not in ("assistant", "system")]
    return tuple(text for turn in questions or turns for text in texts_of_turn(turn))


def _texts_of(row: Mapping[str, Any]) -> list[str]:
    """The turns or fields of a training document."""
    if "messages" in row:
        turns = json.loads(row["messages"]) + json.loads(row.get("rejected", "[]"))
        return [text for turn in turns for text in texts_of_turn(turn)]
    return [row[name] for name in ("prompt", "completion", "chosen", "rejected", "text") if name in row]


class _Item:
    """An item as the search compares it."""

    def __init__(self, question: Question) -> None:
        fields = sorted((words for text in question if (words := words_of(text))), key=len)
        self.parts = [_join(words) for words in fields]  # that a document must have if the item is exact
        self.anchors = _anchors(fields[-1]) if fields else set()
        self.passage = _grams(fields[-1][:MAX_WORDS]) if len(fields) > 1 else set()
        self.grams = set().union(*(_grams(words[:MAX_WORDS]) for words in fields))  # later without common ones
        self.exact_in: str | None = None  # the first document with the whole question

    def kind(self, trained: Mapping[int, str]) -> str:
        """The kind, if the training documents have the 13-grams `trained`."""
        if self.exact_in is not None:
            return "exact"
        hits = self.grams & trained.keys()
        return "overlapping" if hits - self.passage else "shared_passage" if hits else "clean"


def search(
    groups: Mapping[str, Sequence[Question]], documents: Iterable[tuple[str, Sequence[str]]]
) -> dict[str, dict[str, Any]]:
    """Look for the items of all groups in one pass over the documents: (origin, turns or fields)."""
    items = {name: _without_common(questions) for name, questions in groups.items()}
    all_items = [item for group in items.values() for item in group]
    counts = Counter(anchor for item in all_items for anchor in item.anchors)
    by_anchor: defaultdict[int, list[_Item]] = defaultdict(list)
    for item in all_items:
        if item.anchors:
            by_anchor[min(item.anchors, key=counts.__getitem__)].append(item)
    grams = frozenset().union(*(item.grams for item in all_items))
    first_in: dict[int, str] = {}  # the first document with each 13-gram
    for origin, texts in documents:
        words = [words_of(text) for text in texts]
        for gram in grams & set().union(*map(_grams, words)):
            first_in.setdefault(gram, origin)
        joined = [_join(text) for text in words]
        for anchor in by_anchor.keys() & set().union(*map(_anchors, words)):
            for item in by_anchor[anchor]:
                if item.exact_in is None and all(any(part in text for text in joined) for part in item.parts):
                    item.exact_in = origin
    return {name: _result(groups[name], group, first_in) for name, group in items.items()}


def _without_common(questions: Sequence[Question]) -> list[_Item]:
    """A group's items without the 13-grams that many of them share."""
    items = [_Item(question) for question in questions]
    counts = Counter(gram for item in items for gram in item.grams)
    most = min(MAX_ITEMS_WITH_GRAM, max(2, len(items) // 2))
    common = {gram for gram, count in counts.items() if count > most}
    for item in items:
        item.grams -= common
    return items


def _result(questions: Sequence[Question], items: Sequence[_Item], first_in: Mapping[int, str]) -> dict[str, Any]:
    """Counts, the numbers of the items of each kind, and a few examples with the training document's origin."""
    kinds = [item.kind(first_in) for item in items]
    numbers = {kind: [number for number, other in enumerate(kinds) if other == kind] for kind in KINDS}
    examples = []
    for number in [number for kind in KINDS for number in numbers[kind]][:NUM_EXAMPLES]:
        # The shortest field first: a long passage says less about the item.
        text = " / ".join(" ".join(field.split()) for field in sorted(questions[number], key=len))[:_EXCERPT]
        item = items[number]
        document = item.exact_in or next(first_in[gram] for gram in item.grams if gram in first_in)
        examples.append({"item": number, "kind": kinds[number], "text": text, "document": document})
    return {
        "items_sha256": sha256_text(ascii(questions)),
        "num_items": len(questions),
        **{f"num_{kind}": kinds.count(kind) for kind in (*KINDS, "clean")},
        "items": numbers,
        "examples": examples,
    }


def _search_run(
    run: Path, config: RunConfig, groups: Mapping[str, Sequence[Question]], *, with_validation: bool = False
) -> dict[str, Any]:
    """Read a run's documents again, search them for items and those of the validation part, and print the result.

    Returns the content of a run's file; if the documents cannot be read or have changed, the reason.
    """
    result: dict[str, Any] = {"not_checked": None, "num_documents": 0, "groups": {}}
    vocab_size, eos_token_id = vocabulary(config)
    cache_root().mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix="contamination-") as folder:
            corpus = load_corpus(
                config.dataset, cache_dir=Path(folder), vocab_size=vocab_size, eos_token_id=eos_token_id
            )
            recorded = (manifest_or_empty(run).get("dataset") or {}).get("records")
            today = [(record.sha256, record.revision) for record in corpus.records]
            if recorded and [(record.get("sha256"), record.get("revision")) for record in recorded] != today:
                raise DataError("the documents changed after the training", problem_id="training-data-changed")
            if corpus.kind.has_tokens:
                raise DataError("the documents are token ids, not text", problem_id="training-data-tokens")
            if with_validation and (part := corpus.validation) is not None:
                rows = part.select(range(min(len(part), MAX_VALIDATION_ITEMS)))
                groups = {**groups, VALIDATION: [document_question(row) for row in rows]}
            result["groups"] = search(groups, ((row["origin"], _texts_of(row)) for row in corpus.train))
            result["num_documents"] = len(corpus.train)
    except TunebookError as error:
        result["not_checked"] = error.message.splitlines()[0]
    for line in result_lines(result["groups"], result["not_checked"]):
        print(line, file=sys.stderr, flush=True)
    return result


def check_run(run: Path, config: RunConfig, tasks: Sequence[Task]) -> None:
    """Look for a run's items before its training; write and print the result."""
    request = request_of(config)
    tasks = tasks if request["tasks"] else []
    groups = {task.name: conversation_questions(task.conversations, config) for task in tasks if task.conversations}
    with tempfile.TemporaryDirectory(prefix="tunebook-evaluation-") as cache:
        loaded = load_tasks([task for task in tasks if not task.conversations], Path(cache))
        groups |= loaded_questions(loaded, config)
    result = _search_run(run, config, groups, with_validation=True)
    atomic_write_json(run / CONTAMINATION_FILE, result | {"request": request})


def check_evaluated(run: Path, config: RunConfig, loaded: Iterable[LoadedTask]) -> dict[str, Any] | None:
    """Return what is known of an evaluation's items; look for them if the run's own check looked for others.

    None if it is switched off, and for a model that belongs to no run.
    """
    is_off = config.evaluation.contamination is Contamination.disabled or config.dataset.source is Source.synthetic
    if is_off or not (run / RUN_FILE).is_file():
        return None
    groups = loaded_questions(loaded, config)
    recorded = read_contamination(run) or {}
    known = {name: recorded.get("groups", {}).get(name, {}) for name in groups}
    if all(known[name].get("items_sha256") == sha256_text(ascii(groups[name])) for name in groups):
        return {**recorded, "groups": known}
    return _search_run(run, config, groups)


def with_scores(
    result: Mapping[str, Any], answers: Mapping[str, Sequence[Answer]], scores: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what an evaluation's record says about contamination: counts, and the score on each kind of item.

    No scores if every item is clean, and for a metric that is no mean of its items' values, such as a perplexity.
    """
    tasks = {}
    for name, group in result["groups"].items():
        kinds = {number: kind for kind in KINDS for number in group["items"][kind]}
        by_kind: dict[str, list[float]] = {kind: [] for kind in ("clean", *KINDS)}
        values = {answer.item: answer.value for answer in answers[name] if answer.value is not None}
        for number, value in values.items():
            by_kind[kinds.get(number, "clean")].append(value)
        is_mean = name in scores and values and abs(statistics.fmean(values.values()) - scores[name]["value"]) < 1e-6
        counts = {key: value for key, value in group.items() if key.startswith("num_")}
        tasks[name] = counts | {"scores": {}}
        if is_mean and len(by_kind["clean"]) < len(values):
            tasks[name]["scores"] = {
                kind: {**mean_with_error(numbers), "num_items": len(numbers)}
                for kind, numbers in by_kind.items()
                if numbers
            }
    return {"not_checked": result["not_checked"], "tasks": tasks}
