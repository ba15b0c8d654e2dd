"""Formats: detection, conversion, the keys that none reads, and every way in which one document can be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tunebook.config.choices import Format
from tunebook.config.schema import DatasetSource
from tunebook.data.corpus import CorpusKind
from tunebook.data.formats import FormatSettings, Normalizer, detect_format, document_keys, field_templates
from tunebook.data.problems import DocumentError, KeyAccount
from tunebook.errors import RequestError

from .conftest import turns_of

HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": HELLO}
PAIR: dict[str, Any] = {"prompt": "q", "completion": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
IDS = [1, 10, 11, 2, 20, 21, 2]


def normalize(record: dict[str, Any], ignored: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    made = FormatSettings(**settings)
    return Normalizer(Format.auto, made, KeyAccount(document_keys(made), ignored)).row(record)


def turns(record: dict[str, Any], **settings: Any) -> list[tuple[str, str, bool]]:
    return [(turn["role"], turn["content"], turn["train"]) for turn in turns_of(normalize(record, **settings))]


def sharegpt(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in pairs]}


def with_turn(**keys: Any) -> dict[str, Any]:
    return {"messages": [HELLO[0], {**HELLO[1], **keys}]}


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


def test_an_unknown_format_names_the_keys() -> None:
    with pytest.raises(DocumentError, match=r"its keys are: question, answer\."):
        detect_format({"question": "a", "answer": "b", "text": None}, "text")  # a null `text` is no text
    assert normalize({"content": "whole document"}, text_field="content") == {"text": "whole document"}


def test_roles_become_the_four_roles_and_only_the_assistant_is_trained_on() -> None:
    record = sharegpt(("system", "s"), ("human", "q"), ("chatgpt", "a"), ("observation", "o"), ("gpt", "b"))
    assert turns(record, system_prompt="not used") == [
        ("system", "s", False), ("user", "q", False), ("assistant", "a", True), ("tool", "o", False),
        ("assistant", "b", True),
    ]  # fmt: skip
    without = sharegpt(("human", "q"), ("gpt", "a"))
    assert turns(without, system_prompt="default")[0] == ("system", "default", False)
    assert len(turns(without)) == 2


def test_alpaca_puts_history_first_and_input_after_the_instruction() -> None:
    record = {"system": "s", "history": [["q", "a"]], "instruction": "Add.", "input": "1 2", "output": "3"}
    assert turns(record) == [
        ("system", "s", False), ("user", "q", False), ("assistant", "a", True), ("user", "Add.\n\n1 2", False),
        ("assistant", "3", True),
    ]  # fmt: skip
    blank = {"system": "", "history": None, "instruction": "Add.", "input": " ", "output": "3"}
    assert turns(blank) == [("user", "Add.", False), ("assistant", "3", True)]


def test_prompt_and_completion_are_two_texts_or_turns_of_which_the_completions_are_trained_on() -> None:
    normalizer = Normalizer(Format.auto, FormatSettings())
    assert normalizer.row(PAIR) == PAIR
    assert normalizer.kind is CorpusKind.prompt_completion
    with pytest.raises(DocumentError, match="of kind conversation, but those before it are of kind prompt_completion"):
        normalizer.row({"prompt": HELLO[:1], "completion": HELLO[1:]})
    written = turns({"prompt": [*HELLO, HELLO[0]], "completion": [HELLO[1]], "system": "Be brief."})
    assert [is_trained for _, _, is_trained in written] == [False, False, False, False, True]
    with pytest.raises(DocumentError, match="only turns of the completion can be"):
        normalize({"prompt": [HELLO[0], {**HELLO[1], "loss": True}, HELLO[0]], "completion": [HELLO[1]]})
    with pytest.raises(DocumentError, match="'system' goes with turns"):
        normalize({**PAIR, "system": "Be brief."})


@pytest.mark.parametrize(
    "off",
    [
        {"train": False}, {"trainable": False}, {"loss_mask": 0}, {"loss_weight": 0.0}, {"weight": 0, "loss": True},
    ],
)  # fmt: skip
def test_a_turn_opts_out_by_the_flags_of_other_tools(off: dict[str, Any]) -> None:
    written = turns({"messages": [HELLO[0], {**HELLO[1], **off}, HELLO[0], {**HELLO[1], "loss": True}]})
    assert [is_trained for _, _, is_trained in written] == [False, False, False, True]


@pytest.mark.parametrize(
    ("keys", "labels"),
    [
        ({}, IDS),
        ({"labels": [*[-100] * 6, 2]}, [*[-100] * 6, 2]),
        ({"completion_mask": [0, 0, 0, 0, 1, 1, 1]}, [-100, -100, -100, -100, 20, 21, 2]),
        ({"loss_mask": [False, False, True, True, False, False, False]}, [-100, -100, 11, 2, -100, -100, -100]),
        # Two masks count where both do.
        ({"completion_mask": [0, 0, 0, 1, 1, 1, 1], "assistant_masks": [0, 0, 1, 1, 1, 0, 0]},
         [-100, -100, -100, 2, 20, -100, -100]),
        ({"position_ids": [*range(7)], "token_type_ids": [0] * 7, "seq_lengths": [7], "attention_mask": [1] * 7}, IDS),
    ],
)  # fmt: skip
def test_labels_and_masks_decide_which_tokens_are_trained_on(keys: dict[str, Any], labels: list[int]) -> None:
    assert normalize({"input_ids": IDS, **keys}) == {"input_ids": IDS, "labels": labels}


def test_padding_is_left_out() -> None:
    padded = {"input_ids": [0, 0, *IDS, 0], "attention_mask": [0, 0, *[1] * 7, 0]}
    assert normalize(padded) == {"input_ids": IDS, "labels": IDS}
    assert normalize({**padded, "position_ids": [0, 0, *range(7), 0]})["labels"] == IDS  # as some collators number it
    row = normalize({"input_ids": [*IDS, 0], "attention_mask": [*[1] * 7, 0], "labels": [*[-100] * 6, 2, -100]})
    assert row == {"input_ids": IDS, "labels": [*[-100] * 6, 2]}


ASK, ANSWER = ("human", "q"), ("gpt", "a")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (sharegpt(), "the conversation is empty"),
        (sharegpt(ASK), "no assistant turn"),
        (sharegpt(ASK, ("gpt", " \n")), r"the value of turn 2 \(assistant\) is empty"),
        (sharegpt(ASK, ("asistant", "a")), r"unknown role 'asistant' in turn 2. Did you mean 'assistant'\?.*human"),
        (sharegpt(ASK, ("system", "s"), ANSWER), "turn 2 is a system turn"),
        ({"conversations": [{"who": "human", "value": "q"}]}, r"turn 1 has no 'role' .* its keys are: who, value"),
        ({"conversations": [{"from": "human", "content": "q"}]}, r"turn 1 \(user\) has no 'value'"),
        (with_turn(weight=0), "every assistant turn is marked as not to be trained on"),
        (with_turn(weight=0.5), "weight: 0.5"),
        ({"messages": [{**HELLO[0], "train": True}, HELLO[1]]}, r"turn 1 \(user\) asks to be trained on"),
        ({"instruction": "a", "output": "b", "history": ["q"]}, "'history' must be a list of"),
        ({"prompt": "a", "completion": HELLO}, "two texts or two lists of turns"),
        ({"input_ids": [1, True]}, "'input_ids' must be a list of whole numbers"),
        ({"input_ids": [1, 100]}, "'input_ids' holds 100"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' has 1 entries and 'input_ids' 2"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "no token after the first to train on"),
        ({"input_ids": IDS, "completion_mask": [0, 0, 0, 0, 0, 0, 0.5]}, "'completion_mask' must be a list of 0 and 1"),
        ({"input_ids": IDS, "position_ids": [0, 1, 2, 3, 0, 1, 2]}, "several documents are packed into this row"),
    ],
)
def test_a_document_that_cannot_be_used_names_the_place(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        normalize(record, vocab_size=100)


def without(record: dict[str, Any], key: str) -> dict[str, Any]:
    """A record without a key of its own and of its turns."""
    return {
        name: [without(turn, key) for turn in value] if name == "messages" else value
        for name, value in record.items()
        if name != key
    }


@pytest.mark.parametrize(
    ("record", "key"),
    [
        ({**PAIR, "tool_calls": [CALL]}, "tool_calls"),
        (with_turn(Thinking="because"), "Thinking"),
        ({**CHAT, "videos": ["cat.mp4"]}, "videos"),
        ({"text": "a", "system": "Be brief."}, "system"),
        (with_turn(train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}]), "train_detail"),
    ],
)
def test_a_key_that_means_something_is_refused_and_can_be_left_out(record: dict[str, Any], key: str) -> None:
    with pytest.raises(DocumentError, match=rf"'{key}' of .*dataset\.ignore_keys=\[{key}\]") as caught:
        normalize(record)
    assert caught.value.problem_id == "data-key-not-supported"
    assert normalize(record, ignored=(key,)) == normalize(without(record, key))


def test_keys_to_ignore_are_offered_with_those_that_are_ignored() -> None:
    with pytest.raises(DocumentError, match=r"dataset\.ignore_keys=\[name,videos\]"):
        normalize({**CHAT, "videos": ["cat.mp4"], "name": "a"}, ignored=("name",))


@pytest.mark.parametrize("key", ["videos", "audio_path"])
def test_marks_of_media_that_are_left_out_are_refused(key: str) -> None:
    mark = f"<{key.removesuffix('s').removesuffix('_path')}>"
    record = {key: ["a"], "messages": [{"role": "user", "content": f"{mark} What is this?"}, CHAT["messages"][1]]}
    with pytest.raises(DocumentError) as caught:
        normalize(record, ignored=(key,))
    assert caught.value.problem_id == "data-media"
    assert mark in normalize({**record, key: []})["messages"], "text like any other"


@pytest.mark.parametrize(
    "nothing",
    [None, " ", "[]", "null", {}, ["", []], {"name": None, "arguments": ""}, [{"id": None}]],
)
def test_a_key_without_a_value_means_nothing(nothing: Any) -> None:
    assert normalize({**with_turn(tool_calls=nothing), "tools": nothing, "image": nothing}) == normalize(CHAT)


def test_keys_that_no_format_reads_are_counted() -> None:
    normalizer = Normalizer(Format.auto, FormatSettings())
    for record in ({**with_turn(id=1), "meta": {"a": 1}, "id": 1}, {**CHAT, "meta": {}, "prompt": "q", "other": None}):
        normalizer.row(record)
    assert normalizer.account.notes() == ["keys not read: meta (2), id (2), prompt (1)"]


BOOLQ = DatasetSource(
    question_template="{{passage}}\n\nQuestion: {{question}}?", answer_template='{{ "yes" if answer else "no" }}'
)


def test_any_fields_become_a_question_and_an_answer() -> None:
    fields = field_templates(BOOLQ, "dataset")
    assert fields is not None
    assert fields.names == {"passage", "question", "answer"}
    for answer, text in ((True, "yes"), (False, "no")):
        record = {"passage": "It rains.", "question": "is it wet", "answer": answer, "title": None, "messages": []}
        expected = [("user", "It rains.\n\nQuestion: is it wet?", False), ("assistant", text, True)]
        assert turns(record, fields=fields) == expected
        assert turns(record, fields=fields, system_prompt="Answer.") == [("system", "Answer.", False), *expected]


@pytest.mark.parametrize(
    ("source", "record", "message"),
    [
        (BOOLQ, {"passage": "a", "question": "b"}, "dataset.answer_template .*'answer' is undefined"),
        (BOOLQ, {"passage": " ", "question": "b", "answer": True, "tools": "x"}, "'tools' of the document"),
        (DatasetSource(question_template="{{a.__class__.__mro__}}", answer_template="{{a}}"), {"a": "x"}, "__class__"),
        (DatasetSource(question_template="{{a}}", answer_template="{{a[0]}}"), {"a": ["x"]}, "a JSON array"),
    ],
)
def test_fields_that_cannot_be_rendered_are_refused(
    source: DatasetSource, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(DocumentError, match=message):
        normalize(record, fields=field_templates(source, "dataset"))


@pytest.mark.parametrize(
    "source",
    [
        DatasetSource(answer_template="{{a}}"),
        DatasetSource(format=Format.fields),
        DatasetSource(question_template="{{a", answer_template="{{a}}"),
        DatasetSource(format=Format.alpaca, question_template="{{a}}", answer_template="{{a}}"),
    ],
)
def test_templates_that_are_missing_invalid_or_not_read_are_refused(source: DatasetSource) -> None:
    with pytest.raises(RequestError) as caught:
        field_templates(source, "dataset")
    assert caught.value.problem_id == "field-templates"
