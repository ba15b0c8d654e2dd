from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunebook.evaluate.contamination.items import Item, conversation_items, document_item, task_items


class Task:
    """A task as far as its items are read; `doc_to_text` is a template with {field}, or a function."""

    def __init__(self, docs: list[dict[str, Any]], text: Any, target: Any = "", choices: Any = None) -> None:
        self.docs, self.text, self.target, self.choices = docs, text, target, choices
        self.config = SimpleNamespace(doc_to_text=text)

    def doc_iterator(self, *, rank: int, limit: int | None, world_size: int) -> Any:
        return enumerate(self.docs[:limit])

    def doc_to_text(self, doc: dict[str, Any]) -> Any:
        return self.text.format(**doc) if isinstance(self.text, str) else self.text(doc)

    def doc_to_target(self, doc: dict[str, Any]) -> Any:
        return doc.get(self.target, self.target)

    def doc_to_choice(self, doc: dict[str, Any]) -> Any:
        return doc[self.choices]


PASSAGES = ["A passage about a king of old days", "Some words about a ship at sea"]


def test_a_passage_and_its_question_are_apart_from_their_template() -> None:
    docs = [
        {"passage": PASSAGES[0], "question": "was the king old", "label": "yes", "idx": 3},
        {"passage": PASSAGES[1], "question": "is it a ship", "label": "no", "idx": 4},
        {"passage": PASSAGES[1], "question": "is it at sea", "label": "yes", "idx": 5},
    ]
    group = task_items("boolq", Task(docs, "{passage}\nQuestion: {question}?\nAnswer:", "label"), None)
    assert group.items == [
        Item(number=place, question=(doc["passage"], doc["question"]), answers=(doc["label"],))
        for place, doc in enumerate(docs)
    ]
    assert (group.num_all, group.max_items_with_run) == (3, 2)
    limited = Task(docs, "{passage}\nQuestion: {question}?\nAnswer:", "label")
    assert len(task_items("boolq", limited, 2).items) == 2


def test_choices_are_no_part_of_the_question_and_a_subject_does_not_decide() -> None:
    docs = [{"question": "Which planet is the largest of all?", "subject": "space", "choices": ["Mars", "Jupiter"]}]
    task = Task(docs, "About {subject}: {question}\nA. {choices[0]}\nB. {choices[1]}", 1, "choices")
    [item] = task_items("mmlu", task, None).items
    assert item.question == ("Which planet is the largest of all?",)
    assert item.answers == ("Jupiter",)
    assert item.others[:2] == ("Mars", "Jupiter")


def test_a_function_that_writes_the_prompt_is_searched_for_the_fields() -> None:
    docs = [{"text": f"how many legs have {number} of these spiders", "id": "x"} for number in range(30)]
    task = Task(docs, lambda doc: f"Solve  the task.\n{doc['text'].upper()}\nIt is", "")
    items = task_items("legs", task, None).items
    assert [item.question for item in items] == [(doc["text"],) for doc in docs]
    assert {item.others for item in items} == {()}, "the template is in every item"


def test_a_prompt_of_no_field_is_the_question_and_a_task_without_a_prompt_has_its_target() -> None:
    docs = [{"numbers": [1, 2]}, {"numbers": [3, 4]}, {"numbers": [5, 6]}]
    counted = task_items("sum", Task(docs, lambda doc: f"what is {doc['numbers'][0]} and {doc['numbers'][1]}"), None)
    assert counted.items[1].question == ("what is 3 and 4",)
    whole = task_items("text", Task([{"page": "some text to be read"}], lambda doc: "", "page"), None)
    assert [item.question for item in whole.items] == [("some text to be read",)]


def test_a_task_whose_functions_fail_still_has_its_fields() -> None:
    def fail(doc: dict[str, Any]) -> str:
        raise KeyError("no such field")

    [item] = task_items("broken", Task([{"question": "a question of five words", "id": "7"}], fail), None).items
    assert item.question == ("a question of five words",)


def test_real_tasks_of_the_harness(task_file: Callable[[str], Path], quiet_harness: None) -> None:
    from lm_eval.tasks import TaskManager

    loaded = TaskManager(include_defaults=False).load([str(task_file("choice"))])["tasks"]["choice"]
    items = task_items("choice", loaded, None).items
    assert [item.question for item in items] == [("a",), ("d b",), ("c",)]
    assert [item.answers for item in items] == [("b",), ("c",), ("b",)]


def test_conversations_are_numbered_as_the_harness_does(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "One?"), ("assistant", "Yes."), ("user", "Two?"), ("assistant", "No.")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns[start:]]} for start in (0, 3)]
    file = tmp_path / "held.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = conversation_items("held", file, None)
    assert group.items == [
        Item(number=0, question=("One?", "Two?"), answers=("Yes.", "No.")),
        Item(number=1, question=("Two?",), answers=("No.",)),
    ]
    assert len(conversation_items("held", file, 1).items) == 1


@pytest.mark.parametrize(
    ("row", "item"),
    [
        ({"text": "all of it"}, Item(number=5, question=("all of it",))),
        ({"prompt": "p", "completion": "c"}, Item(number=5, question=("p",), answers=("c",))),
        (
            {"messages": [{"role": "assistant", "content": "Hello."}, {"role": "tool", "content": None}]},
            Item(number=5, question=("Hello.",)),
        ),
    ],
)
def test_a_validation_document_is_asked_for_by_its_prompt(row: dict[str, Any], item: Item) -> None:
    assert document_item(5, row) == item
