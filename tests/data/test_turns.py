"""Turns as data sets write them: calls of tools, reasoning, parts, names and flags, and every way to be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tunebook.config.choices import Format
from tunebook.data.formats import FormatSettings, Normalizer
from tunebook.data.problems import DocumentError
from tunebook.data.turns import texts_of_turn

from .conftest import turns_of

ASK = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
FUNCTION = {"name": "f", "description": "finds", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
WITH_ID = {"id": "c1", **CALL}


def row(record: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return Normalizer(Format.auto, FormatSettings(**settings)).row(record)


def turn(record: dict[str, Any], number: int = 1) -> dict[str, Any]:
    return turns_of(row(record))[number]


def chat(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [ASK, *turns], **more}


def called(**keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **keys}


def parts(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*content]}


@pytest.mark.parametrize(
    "written",
    [
        called(tool_calls=[CALL]),
        called(tool_calls=json.dumps(CALL)),
        called(tool_calls=[{"function": {"name": "f", "arguments": json.dumps('{"x": 1}')}}]),  # JSON text of JSON text
        called(tool_calls=[{"name": "f", "arguments": {"x": 1}}]),
        called(tool_calls=[{"name": "f", "parameters": {"x": 1}}]),
        called(function_call={"name": "f", "arguments": '{"x": 1}'}),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "function_call", "value": '[{"name": "f", "arguments": {"x": 1}}]'},
        parts({"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'}),
        parts({"type": "tool_use", "name": "f", "input": {"x": 1}}),
    ],
)
def test_every_way_to_write_a_call_is_one_form(written: dict[str, Any]) -> None:
    assert turn(chat(written)) == {"role": "assistant", "content": None, "train": True, "tool_calls": [CALL]}


def test_a_call_may_have_a_text_before_it_and_several_are_kept_in_order() -> None:
    second = {"type": "function", "function": {"name": "g", "arguments": {}}}
    parsed = turn(chat({"role": "assistant", "content": "I look.", "tool_calls": [WITH_ID, second]}))
    assert (parsed["content"], parsed["tool_calls"]) == ("I look.", [WITH_ID, second])
    sharegpt = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "I look."},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "function_call", "value": '{"name": "g"}'},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "a"},
    ]
    roles = [written["role"] for written in turns_of(row({"conversations": sharegpt}))]
    assert roles == ["user", "assistant", "tool", "assistant"]
    joined = turn({"conversations": sharegpt})
    assert (joined["content"], joined["tool_calls"]) == ("I look.", [CALL, second])


@pytest.mark.parametrize(
    "written",
    [
        {"tools": json.dumps([TOOL])}, {"tools": [json.dumps(FUNCTION)]}, {"functions": FUNCTION},
        {"tools": [{"name": "f", "description": "finds", "input_schema": FUNCTION["parameters"]}]},
        {"tools": [{**TOOL, "function": {**FUNCTION, "strict": None}}]},
    ],
)  # fmt: skip
def test_every_way_to_write_tools_is_one_form(written: dict[str, Any]) -> None:
    assert json.loads(row(chat(ANSWER, **written))["tools"]) == [TOOL]


@pytest.mark.parametrize("role", ["tool", "observation", "ipython"])
def test_a_result_may_be_empty_or_an_object_and_is_not_trained_on(role: str) -> None:
    for content, expected in (
        ("", ""), ({"sky": "grey"}, '{"sky": "grey"}'), ([{"type": "text", "text": "1"}], "1"), ([{"text": "1"}], "1"),
        ([{"sky": "grey"}, {"content": "c"}], '[{"sky": "grey"}, {"content": "c"}]'),
    ):  # fmt: skip
        parsed = turn(chat(called(tool_calls=[CALL]), {"role": role, "content": content}, ANSWER), 2)
        assert parsed == {"role": "tool", "content": expected, "train": False}
    result = {"role": role, "content": "1", "tool_call_id": "c1"}
    parsed = turn(chat(called(tool_calls=[WITH_ID]), result, ANSWER), 2)
    assert (parsed["name"], parsed["tool_call_id"]) == ("f", "c1")  # named by its call


@pytest.mark.parametrize(
    "written",
    [
        {**ANSWER, "reasoning_content": "r"}, {**ANSWER, "reasoning": "r"}, {**ANSWER, "thinking": "r"},
        {**ANSWER, "reasoning": "r", "thinking": "r"},
        parts({"type": "reasoning", "value": "r"}, {"type": "text", "value": "a"}),
        parts({"type": "thinking", "thinking": "r"}, "a"),
    ],
)  # fmt: skip
def test_every_way_to_write_reasoning_is_one_form(written: dict[str, Any]) -> None:
    assert turn(chat(written)) == {"role": "assistant", "content": "a", "train": True, "reasoning": "r"}


@pytest.mark.parametrize("part", [{"type": "video_url", "video_url": {"url": "x"}}, {"type": "input_audio"}])
def test_media_are_refused_with_their_kind(part: dict[str, Any]) -> None:
    with pytest.raises(DocumentError, match=rf"part 2 of .* turn 1 \(user\) is of type '{part['type']}'") as caught:
        row({"messages": [{"role": "user", "content": ["a", part]}, ANSWER]})
    assert caught.value.problem_id == "data-media"


@pytest.mark.parametrize(
    ("record", "place"),
    [
        (chat(called(tool_calls=[{"function": {"arguments": "x"}}])), r"'tool_calls' of turn 2 .* has no 'name'"),
        (chat(called(tool_calls=[{"name": "f", "arguments": "{x: 1}"}])), "the arguments of 'f' in 'tool_calls' of"),
        (chat({"from": "function_call", "value": "f(1)"}), "the value of turn 2"),
        ({"messages": [{**ASK, "tool_calls": [CALL]}, ANSWER]}, r"turn 1 \(user\) has 'tool_calls'"),
        (chat(called()), "turn 2 .* is null"),
        (chat({**ANSWER, "reasoning": "r", "thinking": "s"}), "turn 2 .* has reasoning in two places"),
        (chat(parts({"type": "text", "text": "a"}, {"type": "reasoning", "text": "r"})), "is reasoning too late"),
        (chat(parts({"type": "tool_call", "value": CALL}, "a")), "part 2 of .* is text too late"),
        (chat(parts({"type": "reasoning", "text": "r"})), r"the content of turn 2 \(assistant\) has no text"),
        (chat(ANSWER, tools="[{"), "'tools' is text that is not JSON"),
        (chat(ANSWER, tools=[{"type": "web_search", "name": "s"}]), "is of type 'web_search'"),
        (chat(ANSWER, tools=[TOOL], functions=[FUNCTION]), "the tools are in two places"),
        (chat({**ANSWER, "tools": [TOOL]}), r"'tools' of turn 2 \(assistant\) is not supported"),
        ({"prompt": "q", "completion": "a", "tools": [TOOL]}, "'tools' goes with turns"),
    ],
)
def test_a_wrong_turn_names_its_number_and_the_key(record: dict[str, Any], place: str) -> None:
    with pytest.raises(DocumentError, match=place):
        row(record)


def test_settings_of_the_template_are_those_of_the_data_set_and_of_the_document() -> None:
    assert row(chat(ANSWER))["template_kwargs"] is None
    kwargs = {"enable_thinking": True, "date_string": "1 May 2026"}
    own = chat(ANSWER, chat_template_kwargs={"enable_thinking": False})
    assert json.loads(row(own, template_kwargs=kwargs)["template_kwargs"]) == {**kwargs, "enable_thinking": False}
    assert json.loads(row(chat(ANSWER), template_kwargs=kwargs)["template_kwargs"]) == kwargs


def test_the_texts_of_a_turn_are_those_that_a_model_reads() -> None:
    call = {"name": "f", "arguments": {"a": ["x", {"b": "y"}], "n": 3}}
    turns = turns_of(row(chat(called(tool_calls=[call], reasoning="why"), {"role": "tool", "content": ""}, ANSWER)))
    assert [texts_of_turn(written) for written in turns] == [["q"], ["why", "x", "y"], [], ["a"]]
