"""Every key of a document is read, refused, left out on request or counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Format
from tunebook.config.schema import DatasetConfig
from tunebook.data.corpus import Corpus
from tunebook.data.formats import FormatSettings, Normalizer, known_columns
from tunebook.data.problems import DocumentError, KeyAccount, is_empty
from tunebook.data.sources import load_corpus
from tunebook.errors import DataError

from .conftest import turns_of

ASK = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CHAT: dict[str, Any] = {"messages": [ASK, ANSWER]}
PAIR: dict[str, Any] = {"prompt": "q", "completion": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


def load(tmp_path: Path, records: list[dict[str, Any]], **options: Any) -> Corpus:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_corpus(DatasetConfig(path=str(path), **options), cache_dir=tmp_path / "cache")


def normalise(record: dict[str, Any], ignored: tuple[str, ...] = ()) -> dict[str, Any]:
    account = KeyAccount(known_columns(FormatSettings()), ignored)
    return Normalizer(Format.auto, FormatSettings(), account).row(record)


def without(record: dict[str, Any], key: str) -> dict[str, Any]:
    """A record without a key of its own and of its turns."""
    return {
        name: [without(turn, key) for turn in value] if name in ("messages", "conversations") else value
        for name, value in record.items()
        if name != key
    }


def with_turn(**keys: Any) -> dict[str, Any]:
    return {"messages": [ASK, {**ANSWER, **keys}]}


@pytest.mark.parametrize(
    ("record", "key"),
    [
        ({**PAIR, "tool_calls": [CALL]}, "tool_calls"),
        ({"text": "a", "tools": '[{"name": "f"}]'}, "tools"),
        (with_turn(Thinking="because"), "Thinking"),
        ({**CHAT, "image": "cat.jpg"}, "image"),
        ({**PAIR, "label": False}, "label"),
        ({**CHAT, "rejected": [ANSWER]}, "rejected"),
        ({"text": "a", "system": "Be brief."}, "system"),
        ({**CHAT, "history": [["q", "a"]]}, "history"),
        ({**PAIR, "completion_mask": [0, 1]}, "completion_mask"),
        (with_turn(train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}]), "train_detail"),
        ({"input_ids": [1, 2, 3], "response_mask": [0, 0, 1]}, "response_mask"),
    ],
)
def test_a_key_that_means_something_is_refused_and_can_be_left_out(record: dict[str, Any], key: str) -> None:
    with pytest.raises(DocumentError, match=rf"'{key}' of .*dataset\.ignore_keys=\[{key}\]") as caught:
        normalise(record)
    assert caught.value.problem_id == "data-key-not-supported"
    assert normalise(record, ignored=(key,)) == normalise(without(record, key))


@pytest.mark.parametrize(
    "nothing",
    [None, "", " ", "[]", "{}", "null", [], {}, [None], ["", []], {"name": None, "arguments": ""}, [{"id": None}]],
)
def test_a_key_without_a_value_means_nothing(nothing: Any) -> None:
    assert is_empty(nothing)
    assert normalise({**with_turn(tool_calls=nothing), "tools": nothing, "image": nothing}) == normalise(CHAT)


def test_keys_that_nobody_reads_are_counted(tmp_path: Path) -> None:
    records = [
        {**with_turn(id=1, timestamp="t"), "meta": {"a": 1}, "id": 1},
        {"messages": [{**ASK, "id": 1}, {**ANSWER, "id": 2}], "meta": None, "id": 2},
        {**CHAT, "meta": {}, "prompt": "q"},
    ]
    notes = load(tmp_path, records).notes
    assert f"{tmp_path}/in.jsonl: keys not read: id (5), meta (2), timestamp (1), prompt (1)" in notes


def test_the_line_and_the_key_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"in\.jsonl, line 2: 'documents' of the document") as caught:
        load(tmp_path, [CHAT, {**CHAT, "documents": [CALL]}])
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "off",
    [
        {"loss": False}, {"trainable": False}, {"loss_mask": 0}, {"loss_weight": 0.0}, {"training": False},
        {"loss_scale": 0}, {"weight": 0, "loss": True},
    ],
)  # fmt: skip
def test_the_flags_of_other_tools_are_honoured(off: dict[str, Any]) -> None:
    turns = normalise({"messages": [ASK, {**ANSWER, **off}, ASK, {**ANSWER, "loss": True}]})
    assert [turn["train"] for turn in turns_of(turns)] == [False, False, False, True]


def test_a_prompt_is_not_trained_on_and_cannot_ask_to_be() -> None:
    turns = turns_of(normalise({"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER], "system": "Be brief."}))
    assert [turn["train"] for turn in turns] == [False, False, False, False, True]
    assert turns[0] == {"role": "system", "content": "Be brief.", "train": False}
    with pytest.raises(DocumentError, match="only turns of the completion can be"):
        normalise({"prompt": [ASK, {**ANSWER, "loss": True}, ASK], "completion": [ANSWER]})
    with pytest.raises(DocumentError, match="'system' goes with turns"):
        normalise({**PAIR, "system": "Be brief."})
