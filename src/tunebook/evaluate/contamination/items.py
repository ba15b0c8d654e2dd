"""The items to look for: of the harness' tasks, of held-out conversations and of a validation part."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunebook.config.choices import Format
from tunebook.data.formats import FormatSettings, Normalizer
from tunebook.data.problems import DocumentError, DocumentProblems
from tunebook.data.readers import read_records
from tunebook.data.turns import texts_of_turn
from tunebook.evaluate.contamination.words import join, words_of

MAX_ITEMS_WITH_RUN = 10  # a run of words in more items of one task is common text, such as an instruction
_FEW_WORDS = 3  # a shorter field, such as a subject or a label, does not decide whether a question was found


@dataclass(frozen=True, kw_only=True)
class Item:
    """One item as texts without the template around them."""

    number: int  # its index in the task's data, as in the saved answers
    question: tuple[str, ...]  # the fields or turns that were all found if the item is exact
    answers: tuple[str, ...] = ()  # the expected answer
    others: tuple[str, ...] = ()  # choices, earlier answers and other text: only searched for runs of words

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts."""
        return self.question + self.answers + self.others


@dataclass(frozen=True, kw_only=True)
class ItemGroup:
    """The items of one task, or of the validation part."""

    name: str
    items: list[Item]
    num_all: int  # before a limit on the number of validation documents

    @property
    def max_items_with_run(self) -> int:
        """In how many items a run of words may be without being common text."""
        return min(MAX_ITEMS_WITH_RUN, max(2, len(self.items) // 2))


def task_items(name: str, task: Any, limit: int | None) -> ItemGroup:
    """The items of a loaded task of the harness, without examples, description and chat template."""
    found, rests = [], []
    for number, doc in task.doc_iterator(rank=0, limit=limit, world_size=1):
        item, rest = _split(task, number, doc)
        found.append(item)
        rests.append(rest)
    group = ItemGroup(name=name, items=found, num_all=len(found))
    counts = Counter(text for rest in rests for text in set(rest))
    kept = [tuple(text for text in rest if counts[text] <= group.max_items_with_run) for rest in rests]
    return replace(group, items=[_with_rest(item, rest) for item, rest in zip(found, kept, strict=True)])


def _with_rest(item: Item, rest: tuple[str, ...]) -> Item:
    """Add the prompt's text that is in no field. It is the question if no field is, or else the prompt has none."""
    if item.question:
        return replace(item, others=item.others + rest)
    return replace(item, question=rest or item.answers, answers=item.answers if rest else ())


def _split(task: Any, number: int, doc: Mapping[str, Any]) -> tuple[Item, tuple[str, ...]]:
    """Return an item with its fields, and the normalized texts between them in the prompt.

    The prompt itself would not do: a training document may hold the same fields in another order or template.
    """
    prompt: Any = None
    with suppress(Exception):  # a task's own functions may raise anything; the evaluation reports it
        prompt = task.doc_to_text(doc)
    prompt = prompt if isinstance(prompt, str) else ""
    fields, choices = _fields(task, doc, is_whole=not prompt)
    pieces = [join(words_of(prompt))]
    question = []
    for field in sorted(fields, key=len, reverse=True):
        text = join(words_of(field))
        places = [place for place, piece in enumerate(pieces) if text in piece]
        if prompt and not places:
            continue
        question.append(field)
        for place in places[:1]:
            before, _, after = pieces[place].partition(text)
            pieces[place : place + 1] = [f"{before} ", f" {after}"]
    long = [field for field in question if len(words_of(field)) >= _FEW_WORDS]
    item = Item(number=number, question=tuple(long or question), answers=_answers(task, doc), others=tuple(choices))
    return item, tuple(piece.strip() for piece in pieces if piece.strip())


def _fields(task: Any, doc: Mapping[str, Any], *, is_whole: bool) -> tuple[list[str], list[str]]:
    """Return the single texts of a document that its prompt may be made of, and the texts of its lists.

    If the prompt comes from a template, only the fields that it names; without a prompt (`is_whole`) all fields.
    """
    template = getattr(task.config, "doc_to_text", None)
    is_named = isinstance(template, str) and not is_whole
    fields, choices = [], []
    for key, value in doc.items():
        if is_named and not re.search(rf"\b{re.escape(str(key))}\b", str(template)):
            continue
        if isinstance(value, str):
            if len(words_of(value)) >= (1 if is_named else _FEW_WORDS):
                fields.append(value)
        elif isinstance(value, list | dict):
            choices += list(_leaves(value))
    return fields, choices


def _leaves(value: Any) -> Iterator[str]:
    """All texts within lists and sections."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)


def _answers(task: Any, doc: Mapping[str, Any]) -> tuple[str, ...]:
    """The expected answer as text; for a task with choices, the right one."""
    with suppress(Exception):  # as in `_split`
        target = task.doc_to_target(doc)
        if isinstance(target, int):
            target = task.doc_to_choice(doc)[target]
        return tuple(text for text in _leaves([target] if isinstance(target, str) else target) if words_of(text))
    return ()


def conversation_items(name: str, file: Path, limit: int | None) -> ItemGroup:
    """The items of a file of held-out conversations, in the order in which the harness numbers them."""
    problems = DocumentProblems(str(file))
    normalizer = Normalizer(Format.auto, FormatSettings())
    items: list[Item] = []
    for _, record in read_records(file, problems, normalizer.account):
        if limit is not None and len(items) == limit:
            break
        with suppress(DocumentError):  # the evaluation itself refuses such a file
            items.append(_of_turns(len(items), normalizer.row(record).get("messages", [])))
    return ItemGroup(name=name, items=items, num_all=len(items))


def _of_turns(number: int, turns: Iterable[dict[str, Any]]) -> Item:
    """An item whose question is the user's turns, and whose expected answers are the assistant's."""
    spoken = [(turn["role"], text) for turn in turns if turn["role"] != "system" for text in texts_of_turn(turn)]
    answers = tuple(text for role, text in spoken if role == "assistant")
    asked = tuple(text for role, text in spoken if role != "assistant")
    return Item(number=number, question=asked or answers, answers=answers if asked else ())


def document_item(number: int, row: Mapping[str, Any]) -> Item:
    """A validation document, whose tokens were decoded, as an item: its prompt is the question."""
    if "messages" in row:
        return _of_turns(number, row["messages"])
    if "prompt" in row:
        return Item(number=number, question=(row["prompt"],), answers=(row["completion"],))
    return Item(number=number, question=(row["text"],))
