"""Look for evaluation items and validation documents in the training documents.

Texts are compared by their words: Unicode form NFKC, lower case, no punctuation. An item counts as

- exact if one training document has its whole question: every field of it, such as a passage and a question about it. A
  question of fewer than 8 words must be a whole turn or field there, and the expected answer must be there too;
- overlapping if it is not exact, but 13 consecutive words of its question, choices or answer are in a document;
- shared_passage if those words are only in the longest of several fields: another question about the same passage may
  have been trained on;
- clean otherwise.

Thirteen words in more than 10 items of a task, or in more than half of a small task, are ignored: an instruction or a
template. Source: "Language Models are Few-Shot Learners" (GPT-3, arXiv 2005.14165), appendix C: 13-grams, lower case
without punctuation, and at least 8 words of a shorter item.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tunebook.config.choices import Contamination, Format, Source
from tunebook.config.schema import RunConfig
from tunebook.data.corpus import Corpus, CorpusKind
from tunebook.data.formats import FormatSettings, Normalizer
from tunebook.data.prepare import vocabulary
from tunebook.data.problems import DocumentError, DocumentProblems
from tunebook.data.readers import read_records
from tunebook.data.sources import load_corpus
from tunebook.data.turns import texts_of_turn
from tunebook.errors import DataError, TunebookError
from tunebook.evaluate.harness import LoadedTask, loaded_without_model
from tunebook.evaluate.results import Answer, mean_with_error
from tunebook.evaluate.task_files import Task
from tunebook.files import atomic_write_json, cache_root, sha256_text
from tunebook.record.contamination import CONTAMINATION_FILE, KINDS, read_contamination, request_of, result_lines
from tunebook.record.manifest import manifest_or_empty
from tunebook.record.run_folder import RUN_FILE

GRAM = 13  # consecutive words that mark an item
ANCHOR = 8  # consecutive words by which a whole question is found; a shorter one is compared as a whole
MAX_ITEMS_WITH_GRAM = 10
MAX_WORDS = 2000  # of a text whose 13-grams are looked for: memory grows by about 100 bytes for each
MAX_VALIDATION_ITEMS = 10_000
VALIDATION = "validation part"  # with a blank, which no task has in its name
NUM_EXAMPLES = 3  # of each group
_EXCERPT = 200  # characters of an item
_FEW_WORDS = 3  # a shorter field, such as a subject or a label, does not decide whether a question was found
_TOLERANCE = 1e-6  # between a score and the mean of its items' values; metrics that are no means differ by more

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
    """Words as a text to search in, with a blank around each."""
    return f" {' '.join(words)} "


def _grams(words: Sequence[str], length: int = GRAM) -> set[int]:
    """Hashes of all runs of `length` words; none for a shorter text."""
    return set(map(hash, zip(*(words[start:] for start in range(length)), strict=False)))


def _anchors(words: Sequence[str]) -> set[int]:
    """Hashes of all runs of 8 words; of a shorter text, of the whole."""
    return _grams(words, ANCHOR) or {hash(tuple(words))}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One item as texts without the template around them."""

    number: int  # its index in the task's data, as in the saved answers
    question: tuple[str, ...]  # the fields or turns that one document must all hold
    answers: tuple[str, ...] = ()  # the expected answer
    others: tuple[str, ...] = ()  # such as choices: only searched for 13 words


@dataclass(frozen=True, kw_only=True)
class ItemGroup:
    """The items of one task, or of the validation part."""

    name: str
    items: list[Item]
    num_all: int  # before the limit on validation documents

    @property
    def sha256(self) -> str:
        """Hash of all texts."""
        return sha256_text(ascii([(item.number, item.question, item.answers, item.others) for item in self.items]))


def task_items(name: str, task: LoadedTask, limit: int | None) -> ItemGroup:
    """The items of a loaded task, without examples, description and chat template."""
    if task.source.conversations is not None:
        return conversation_items(name, task.source.conversations, limit)
    documents = task.task.doc_iterator(rank=0, limit=limit, world_size=1)
    items = [_task_item(task.task, number, document) for number, document in documents]
    return ItemGroup(name=name, items=items, num_all=len(items))


def _task_item(task: Any, number: int, document: Mapping[str, Any]) -> Item:
    """An item whose question is the fields that are in its prompt: training may show them in another template."""
    prompt: Any = ""
    answers: tuple[str, ...] = ()
    with suppress(Exception):  # a task's own functions may raise anything; the evaluation reports it
        prompt = task.doc_to_text(document)
    with suppress(Exception):
        target = task.doc_to_target(document)
        target = task.doc_to_choice(document)[target] if isinstance(target, int) else target
        answers = tuple(text for text in _texts_in(target) if words_of(text))
    prompt = prompt if isinstance(prompt, str) else ""
    texts = {text: words_of(text) for text in document.values() if isinstance(text, str)}
    within = _join(words_of(prompt))
    fields = [text for text, words in texts.items() if len(words) >= _FEW_WORDS and _join(words) in within]
    question = fields or ([prompt] if prompt else [text for text, words in texts.items() if len(words) >= _FEW_WORDS])
    others = [text for value in document.values() if isinstance(value, list | dict) for text in _texts_in(value)]
    return Item(number=number, question=tuple(question), answers=answers, others=tuple(others))


def _texts_in(value: Any) -> Iterator[str]:
    """All texts within lists and sections."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(one)


def conversation_items(name: str, file: Path, limit: int | None) -> ItemGroup:
    """The items of a file of held-out conversations, in the order in which the harness numbers them."""
    normalizer = Normalizer(Format.auto, FormatSettings())
    items: list[Item] = []
    for _, record in read_records(file, DocumentProblems(str(file)), normalizer.account):
        if limit is not None and len(items) == limit:
            break
        with suppress(DocumentError):  # the evaluation itself refuses such a file
            items.append(document_item(len(items), {"messages": [], **normalizer.row(record)}))
    return ItemGroup(name=name, items=items, num_all=len(items))


def document_item(number: int, row: Mapping[str, Any]) -> Item:
    """A document as an item: its prompt, or the turns that are not the assistant's, are the question."""
    if "messages" in row:
        spoken = [(turn["role"], text) for turn in row["messages"] if turn["role"] != "system"
                  for text in texts_of_turn(turn)]  # fmt: skip
        answers = tuple(text for role, text in spoken if role == "assistant")
        asked = tuple(text for role, text in spoken if role != "assistant")
        return Item(number=number, question=asked or answers, answers=answers if asked else ())
    if "prompt" in row:
        return Item(number=number, question=(row["prompt"],), answers=(row["completion"],))
    return Item(number=number, question=(row["text"],))


class _Wanted:
    """An item as it is looked for."""

    def __init__(self, item: Item) -> None:
        self.item = item
        question = [words for text in item.question if (words := words_of(text))]
        self.longest = max(question, key=len, default=[])
        self.parts = [_join(words) for words in question]  # that a document must have if the item is exact
        if sum(map(len, question)) < ANCHOR:
            self.parts += [_join(words) for text in item.answers if (words := words_of(text))]
        self.grams = _grams_of(item.question + item.answers + item.others)  # later without common ones
        self.exact_in: int | None = None  # the first document with the whole question

    def grams_beside_passage(self) -> set[int]:
        """The 13-grams that are not only in the longest of several fields."""
        passage = max(self.item.question, key=len) if len(self.item.question) > 1 else None
        rest = [text for text in self.item.question if text != passage]
        return self.grams & _grams_of((*rest, *self.item.answers, *self.item.others))


def _grams_of(texts: Iterable[str]) -> set[int]:
    return set().union(*(_grams(words_of(text)[:MAX_WORDS]) for text in texts))


def search(groups: Sequence[ItemGroup], corpus: Corpus, documents: Iterable[Sequence[str]]) -> list[dict[str, Any]]:
    """Look for all items in one pass over the documents, each as its turns or fields; return each group's result."""
    wanted = [_without_common(group) for group in groups]
    every = [one for of_group in wanted for one in of_group]
    counts = Counter(anchor for one in every for anchor in _anchors(one.longest))
    by_anchor: defaultdict[int, list[_Wanted]] = defaultdict(list)
    for one in every:
        if one.longest:
            by_anchor[min(_anchors(one.longest), key=counts.__getitem__)].append(one)
    anchors, grams = frozenset(by_anchor), frozenset().union(*(one.grams for one in every))
    first_in: dict[int, int] = {}  # the first document with each 13-gram
    for number, texts in enumerate(documents):
        words = [words_of(text) for text in texts]
        for gram in grams & set().union(*map(_grams, words)):
            first_in.setdefault(gram, number)
        found = anchors & set().union(*map(_anchors, words))
        left = [one for anchor in found for one in by_anchor[anchor] if one.exact_in is None]
        joined = [_join(one) for one in words] if left else []
        for one in left:
            if all(any(part in text for text in joined) for part in one.parts):
                one.exact_in = number
    return [_result(group, of_group, first_in, corpus) for group, of_group in zip(groups, wanted, strict=True)]


def _without_common(group: ItemGroup) -> list[_Wanted]:
    """A group's items without the 13-grams that many of them share."""
    wanted = [_Wanted(item) for item in group.items]
    counts = Counter(gram for one in wanted for gram in one.grams)
    most = min(MAX_ITEMS_WITH_GRAM, max(2, len(wanted) // 2))
    common = {gram for gram, count in counts.items() if count > most}
    for one in wanted:
        one.grams -= common
    return wanted


def _result(group: ItemGroup, wanted: list[_Wanted], first_in: Mapping[int, int], corpus: Corpus) -> dict[str, Any]:
    """Counts, the numbers of the items of each kind, and a few examples with the training document's origin."""
    found: dict[str, list[tuple[float, Item, int]]] = {kind: [] for kind in KINDS}  # share of 13-grams, item, document
    for one in wanted:
        hits = one.grams & first_in.keys()
        share = len(hits) / max(1, len(one.grams))
        if one.exact_in is not None:
            found["exact"].append((share, one.item, one.exact_in))
        elif hits:
            kind = "overlapping" if hits & one.grams_beside_passage() else "shared_passage"
            [(document, _)] = Counter(first_in[gram] for gram in hits).most_common(1)
            found[kind].append((share, one.item, document))
    ordered = [(kind, *one) for kind in KINDS for one in sorted(found[kind], key=lambda each: -each[0])]
    return {
        "items_sha256": group.sha256,
        "num_all": group.num_all,
        "num_items": len(wanted),
        **{f"num_{kind}": len(some) for kind, some in found.items()},
        "num_clean": len(wanted) - len(ordered),
        "num_half": sum(share >= 0.5 for share, *_ in found["overlapping"]),
        "items": {kind: [item.number for _, item, _ in some] for kind, some in found.items()},
        "examples": [
            {"item": item.number, "kind": kind, "share": round(share, 4), "text": _excerpt(item),
             "document": corpus.train[document]["origin"]}
            for kind, share, item, document in ordered[:NUM_EXAMPLES]
        ],
    }  # fmt: skip


def _excerpt(item: Item) -> str:
    """The question in one line, its shortest field first: a long passage says less about the item."""
    text = " / ".join(" ".join(field.split()) for field in sorted(item.question, key=len))
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 3] + "..."


@contextmanager
def _corpus_of(run: Path, config: RunConfig) -> Iterator[Corpus]:
    """Read a run's documents again: the prepared tokens know neither their origin nor the text that was cut off.

    Raises: RequestError or DataError if they cannot be read any more, or are not those that the run was trained on.
    """
    vocab_size, eos_token_id = vocabulary(config)
    cache_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_root(), prefix="contamination-") as folder:
        corpus = load_corpus(config.dataset, cache_dir=Path(folder), vocab_size=vocab_size, eos_token_id=eos_token_id)
        recorded = (manifest_or_empty(run).get("dataset") or {}).get("records")
        contents = [[(record.get("sha256"), record.get("revision")) for record in records]
                    for records in (recorded or (), map(asdict, corpus.records))]  # fmt: skip
        if recorded is not None and contents[0] != contents[1]:
            raise DataError(
                f"{', '.join(str(record['location']) for record in recorded)}: not as it was when the run was trained; "
                "put that version back to have it compared",
                problem_id="training-data-changed",
            )
        yield _decoded(corpus, config) if corpus.kind is CorpusKind.tokens else corpus


def _decoded(corpus: Corpus, config: RunConfig) -> Corpus:
    """Documents of tokens as text."""
    from tunebook.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model, is_padded=False)
    train, validation = (
        part and part.map(lambda row: {"text": tokenizer.decode(row["input_ids"], skip_special_tokens=True)})
        for part in (corpus.train, corpus.validation)
    )
    return replace(corpus, kind=CorpusKind.text, train=train, validation=validation)


def _texts_of(row: Mapping[str, Any]) -> list[str]:
    """The turns or fields of a training document."""
    if "messages" in row:
        return [text for turn in row["messages"] for text in texts_of_turn(turn)]
    return [row["prompt"], row["completion"]] if "prompt" in row else [row["text"]]


def _validation_group(corpus: Corpus) -> list[ItemGroup]:
    """The validation documents as items, of a large part so many from all over it; empty without one."""
    part = corpus.validation
    if part is None:
        return []
    numbers = range(0, len(part), -(-len(part) // MAX_VALIDATION_ITEMS))
    items = [document_item(number, row) for number, row in zip(numbers, part.select(numbers), strict=True)]
    return [ItemGroup(name=VALIDATION, items=items, num_all=len(part))]


def _search_run(run: Path, config: RunConfig, groups: list[ItemGroup], *, with_validation: bool) -> dict[str, Any]:
    """Return what a run's file holds; if documents cannot be read, why."""
    try:
        with _corpus_of(run, config) as corpus:
            groups = [*groups, *(_validation_group(corpus) if with_validation else [])]
            groups = [group for group in groups if group.items]
            results = search(groups, corpus, map(_texts_of, corpus.train))
            num_documents = len(corpus.train)
    except TunebookError as error:
        return {"not_checked": error.message.splitlines()[0], "num_documents": 0, "groups": {}}
    named = {group.name: result for group, result in zip(groups, results, strict=True)}
    return {"not_checked": None, "num_documents": num_documents, "groups": named}


def check_run(run: Path, config: RunConfig, tasks: Sequence[Task]) -> None:
    """Look for a run's items before its training; write and print what was found."""
    request = request_of(config)
    groups = _groups_of(tasks if request["tasks"] else [], config.evaluation.limit)
    result = _search_run(run, config, groups, with_validation=True)
    atomic_write_json(run / CONTAMINATION_FILE, result | {"request": request})
    for line in result_lines(result["groups"], result["not_checked"]):
        print(line, file=sys.stderr, flush=True)


def _groups_of(tasks: Sequence[Task], limit: int | None) -> list[ItemGroup]:
    """The items of tasks, without a model or a chat template. Tasks whose data is missing are left out."""
    groups = [conversation_items(task.name, task.conversations, limit) for task in tasks if task.conversations]
    if others := [task for task in tasks if not task.conversations]:
        with loaded_without_model(others, limit) as loaded:
            groups += [task_items(name, task, limit) for name, task in loaded.tasks.items()]
    return groups


def check_evaluated(
    run: Path, config: RunConfig, tasks: Mapping[str, LoadedTask], limit: int | None
) -> dict[str, Any] | None:
    """Return what is known of an evaluation's items, and look for those that no earlier check looked for.

    None if it is switched off, and for a model that belongs to no run.
    """
    is_off = config.evaluation.contamination is Contamination.disabled or config.dataset.source is Source.synthetic
    if is_off or not (run / RUN_FILE).is_file():
        return None
    groups = [task_items(name, task, limit) for name, task in tasks.items()]
    known = read_contamination(run) or {"not_checked": None, "num_documents": 0, "groups": {}, "request": None}
    new = [group for group in groups if known["groups"].get(group.name, {}).get("items_sha256") != group.sha256]
    if new:
        found = _search_run(run, config, new, with_validation=False)
        if found["not_checked"]:
            return found
        known |= found | {"groups": known["groups"] | found["groups"]}
        if limit is None:  # the file keeps what is known of all items
            atomic_write_json(run / CONTAMINATION_FILE, known)
    return known | {"groups": {group.name: known["groups"][group.name] for group in groups if group.items}}


def with_scores(
    result: Mapping[str, Any] | None, answers: Mapping[str, Sequence[Answer]], scores: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return what an evaluation's record says about contamination: counts and scores of each task."""
    if result is None:
        return None
    tasks = {
        name: {key: value for key, value in group.items() if key.startswith("num_") or key == "examples"}
        | {"scores": split_scores(group, answers[name], scores.get(name))}
        for name, group in result["groups"].items()
        if name in answers
    }
    return {"not_checked": result["not_checked"], "num_documents": result["num_documents"], "tasks": tasks}


def split_scores(
    group: Mapping[str, Any], answers: Sequence[Answer], score: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """The mean with its standard error on the items of each kind that there are.

    Empty if every item is clean, and for a metric that is no mean of its items' values, such as a perplexity.
    """
    values = {answer.item: answer.value for answer in answers if answer.value is not None}
    kinds = {number: kind for kind in KINDS for number in group["items"][kind]}
    if score is None or not kinds.keys() & values.keys():
        return {}
    if abs(statistics.fmean(values.values()) - score["value"]) > _TOLERANCE:
        return {}
    by_kind: dict[str, list[float]] = {kind: [] for kind in ("clean", *KINDS)}
    for number, value in values.items():
        by_kind[kinds.get(number, "clean")].append(value)
    return {kind: {**mean_with_error(some), "num_items": len(some)} for kind, some in by_kind.items() if some}
