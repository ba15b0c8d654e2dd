"""Formats: detection, conversion and every way in which one document can be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tunebook.config.choices import Format
from tunebook.config.schema import DatasetSource
from tunebook.data.corpus import CorpusKind
from tunebook.data.formats import FormatSettings, Normalizer, detect_format, field_templates
from tunebook.data.problems import DocumentError
from tunebook.errors import RequestError

from .conftest import turns_of


def normalise(record: dict[str, Any], format: Format = Format.auto, **settings: Any) -> dict[str, Any]:
    return Normalizer(format, FormatSettings(**settings)).row(record)


def turns(record: dict[str, Any], **settings: Any) -> list[tuple[str, str, bool]]:
    messages = turns_of(normalise(record, **settings))
    return [(turn["role"], turn["content"], turn["train"]) for turn in messages]


def sharegpt(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in pairs]}


HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize(
    ("record", "format"),
    [
        (sharegpt(("human", "a"), ("gpt", "b")), Format.sharegpt),
        ({"messages": HELLO, "prompt": "as in some chat data sets", "prompt_id": 1}, Format.messages),
        ({"instruction": "a", "input": "", "output": "b"}, Format.alpaca),
        ({"prompt": "a", "completion": "b"}, Format.prompt_completion),
        ({"text": "a"}, Format.text),
        ({"input_ids": [1, 2]}, Format.pretokenized),
    ],
)
def test_the_format_is_detected_by_the_keys(record: dict[str, Any], format: Format) -> None:
    assert detect_format(record, "text") is format


def test_an_unknown_format_names_the_keys_found_and_the_keys_each_format_needs() -> None:
    with pytest.raises(DocumentError) as caught:
        detect_format({"question": "a", "answer": "b", "text": None}, "text")
    message = caught.value.message
    assert "its keys are: question, answer." in message  # a null `text` is no text
    assert "alpaca: instruction, output" in message
    assert "pretokenized: input_ids" in message
    assert "dataset.text_field=KEY" in message


def test_the_text_field_can_be_named() -> None:
    assert normalise({"content": "whole document"}, text_field="content") == {"text": "whole document"}


def test_sharegpt_roles_become_the_four_roles_and_only_the_assistant_is_trained_on() -> None:
    record = sharegpt(("system", "s"), ("human", "q"), ("chatgpt", "a"), ("observation", "o"), ("gpt", "b"))
    assert turns(record) == [
        ("system", "s", False),
        ("user", "q", False),
        ("assistant", "a", True),
        ("tool", "o", False),
        ("assistant", "b", True),
    ]


def test_alpaca_puts_history_first_and_input_after_the_instruction() -> None:
    record = {"system": "s", "history": [["q", "a"]], "instruction": "Add.", "input": "1 2", "output": "3"}
    assert turns(record) == [
        ("system", "s", False),
        ("user", "q", False),
        ("assistant", "a", True),
        ("user", "Add.\n\n1 2", False),
        ("assistant", "3", True),
    ]
    blank = {"system": "", "history": None, "instruction": "Add.", "input": " ", "output": "3"}
    assert turns(blank) == [("user", "Add.", False), ("assistant", "3", True)]


def test_prompt_and_completion_as_texts_stay_two_texts() -> None:
    normalizer = Normalizer(Format.auto, FormatSettings())
    assert normalizer.row({"prompt": "a", "completion": "b"}) == {"prompt": "a", "completion": "b"}
    assert normalizer.kind is CorpusKind.prompt_completion
    with pytest.raises(DocumentError, match="of kind conversation, but those before it are of kind prompt_completion"):
        normalizer.row({"prompt": HELLO[:1], "completion": HELLO[1:]})


def test_prompt_and_completion_as_turns_train_on_the_completion_alone() -> None:
    assert turns({"prompt": [*HELLO, HELLO[0]], "completion": [HELLO[1]]}) == [
        ("user", "hello", False),
        ("assistant", "hi", False),
        ("user", "hello", False),
        ("assistant", "hi", True),
    ]


def test_token_labels_default_to_every_token() -> None:
    assert normalise({"input_ids": [5, 6]}) == {"input_ids": [5, 6], "labels": [5, 6]}
    assert normalise({"input_ids": [5, 6], "labels": [-100, 6]})["labels"] == [-100, 6]


def test_the_system_prompt_is_put_before_conversations_without_one() -> None:
    own = sharegpt(("system", "own"), ("human", "q"), ("gpt", "a"))
    assert turns(own, system_prompt="default")[0] == ("system", "own", False)
    without = sharegpt(("human", "q"), ("gpt", "a"))
    assert turns(without, system_prompt="default")[0] == ("system", "default", False)
    assert len(turns(without)) == 2


ASK, ANSWER = ("human", "q"), ("gpt", "a")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (sharegpt(), "the conversation is empty"),
        (sharegpt(ASK), r"no assistant turn, so nothing to train on \(the turns are: user\)"),
        (sharegpt(ASK, ("gpt", " \n")), r"the value of turn 2 \(assistant\) is empty"),
        (sharegpt(ASK, ("gpt", None)), r"the value of turn 2 \(assistant\) is null where text belongs"),
        (sharegpt(ASK, ("gpt", 7)), "is a JSON number where text belongs"),
        (sharegpt(ASK, ("gpt", [7])), "part 1 of the value of turn 2 .* is a JSON number where text or an object"),
        (sharegpt(ASK, ("asistant", "a")), r"unknown role 'asistant' in turn 2. Did you mean 'assistant'\?.*human"),
        (sharegpt(ASK, ("narrator", "a")), "unknown role 'narrator' in turn 2. Known roles: system: system, developer"),
        (sharegpt(("system", "s"), ("system", "t"), ASK, ANSWER), "turn 2 is a system turn; only the first"),
        (sharegpt(ASK, ("system", "s"), ANSWER), "turn 2 is a system turn; only the first"),
        ({"conversations": {"from": "human"}}, "'conversations' is a JSON object where a list of turns belongs"),
        ({"conversations": ["q", "a"]}, "turn 1 is a JSON string where an object"),
        ({"conversations": [{"who": "human", "value": "q"}]}, r"turn 1 has no 'role' .* its keys are: who, value"),
        ({"conversations": [{"from": "human", "content": "q"}]}, r"turn 1 \(user\) has no 'value'"),
        ({"messages": [HELLO[0], {**HELLO[1], "weight": 0}]}, "every assistant turn is marked as not to be trained on"),
        ({"messages": [HELLO[0], {**HELLO[1], "weight": 0.5}]}, "weight: 0.5; it can be 0 or 1"),
        ({"messages": [{**HELLO[0], "train": True}, HELLO[1]]}, r"turn 1 \(user\) asks to be trained on"),
        ({"instruction": "", "output": "b"}, "'instruction' is empty"),
        ({"instruction": "a", "output": ""}, "'output' is empty"),
        ({"instruction": "a", "output": "b", "history": ["q"]}, "'history' must be a list of"),
        ({"prompt": "a", "completion": HELLO}, "two texts or two lists of turns, not one of each"),
        ({"prompt": HELLO[:1], "completion": HELLO[:1]}, "no assistant turn, so nothing to train on"),
        ({"text": "  "}, "'text' is empty"),
        ({"text": 3}, "'text' is a JSON number where text belongs"),
        ({"text": b"a"}, "'text' is of type bytes where text belongs"),
        ({"input_ids": []}, "'input_ids' must be a list of whole numbers that is not empty"),
        ({"input_ids": [1, True]}, "'input_ids' must be a list of whole numbers"),
        ({"input_ids": [1, 2.0]}, "'input_ids' must be a list of whole numbers"),
        ({"input_ids": [1, 100]}, "'input_ids' holds 100, but the vocabulary goes from 0 to 99"),
        ({"input_ids": [1, -1]}, "'input_ids' holds -1"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' has 1 entries and 'input_ids' 2"),
        ({"input_ids": [1, 2], "labels": [1, 100]}, "'labels' holds 100"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "labels or masks leave no token after the first to train on"),
    ],
)
def test_a_document_that_cannot_be_used_says_why(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        normalise(record, vocab_size=100)


BOOLQ = DatasetSource(
    question_template="{{passage}}\n\nQuestion: {{question}}?", answer_template='{{ "yes" if answer else "no" }}'
)


def test_any_fields_become_a_question_and_an_answer() -> None:
    fields = field_templates(BOOLQ, "dataset")
    assert fields is not None
    assert fields.names == {"passage", "question", "answer"}
    for answer, text in ((True, "yes"), (False, "no")):
        record = {"passage": "It rains.", "question": "is it wet", "answer": answer, "title": None, "messages": []}
        wanted = [("user", "It rains.\n\nQuestion: is it wet?", False), ("assistant", text, True)]
        assert turns(record, fields=fields) == wanted
        with_system = turns(record, fields=fields, system_prompt="Answer.")
        assert with_system == [("system", "Answer.", False), *wanted]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"passage": "a", "question": "b"}, "dataset.answer_template .*'answer' is undefined.*passage, question"),
        ({"passage": None, "question": "b", "answer": True}, "dataset.question_template .*'passage' is undefined"),
        (
            {"passage": " ", "question": "b", "answer": True, "image": "x.png"},
            "'image' of the document is not supported",
        ),
    ],
)
def test_a_document_without_a_field_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        normalise(record, fields=field_templates(BOOLQ, "dataset"))


def test_an_empty_answer_and_an_unsafe_template_are_refused() -> None:
    empty = DatasetSource(question_template="{{a}}", answer_template="{{ '' if a else a }}")
    with pytest.raises(DocumentError, match=r"'dataset\.answer_template' is empty"):
        normalise({"a": "x"}, fields=field_templates(empty, "dataset"))
    unsafe = DatasetSource(question_template="{{a.__class__.__mro__}}", answer_template="{{a}}")
    with pytest.raises(DocumentError, match="question_template cannot be rendered: access to attribute '__class__'"):
        normalise({"a": "x"}, fields=field_templates(unsafe, "dataset"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (DatasetSource(answer_template="{{a}}"), "dataset.question_template: .*a question and an answer"),
        (DatasetSource(format=Format.fields), "dataset.question_template and dataset.answer_template: "),
        (DatasetSource(question_template="{{a", answer_template="{{a}}"), "it is not valid Jinja"),
        (
            DatasetSource(format=Format.alpaca, question_template="{{a}}", answer_template="{{a}}"),
            "dataset.format=alpaca does not read it",
        ),
    ],
)
def test_templates_that_are_missing_invalid_or_not_read_are_refused(source: DatasetSource, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        field_templates(source, "dataset")
