from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tunebook.config.choices import Format
from tunebook.data.formats import FormatSettings, Normalizer
from tunebook.data.problems import DocumentProblems
from tunebook.data.readers import read_records
from tunebook.errors import DataError, RequestError
from tunebook.evaluate.chat.session import Session

Sessions = Callable[..., Session]


class Answer(NamedTuple):
    text: str  # as it was shown
    notes: list[str]


def ask(session: Session, question: str, **more: Any) -> Answer:
    pieces: list[str] = []
    notes = session.ask(question, pieces.append, **more)
    return Answer(text="".join(pieces), notes=notes)


def prompts(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """What the model is shown, from now on."""
    seen: list[list[tuple[str, str]]] = []
    generate = session.model.generate

    def note(tokens: list[int], *args: Any) -> Any:
        text = session.model._tokenizer.decode(tokens)
        turns = [turn.partition("\n") for turn in text.replace("<|im_end|>", "").split("<|im_start|>")[1:-1]]
        seen.append([(role, content.strip()) for role, _, content in turns])
        return generate(tokens, *args)

    monkeypatch.setattr(session.model, "generate", note)
    return seen


def test_the_history_is_shown_with_every_question_and_reset_forgets_it(
    session: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = session("apple bird")
    seen = prompts(chat, monkeypatch)
    assert ask(chat, "rain") == Answer(text="apple bird", notes=[])
    ask(chat, "key")
    chat.reset()
    ask(chat, "moon")
    assert seen == [
        [("user", "rain")],
        [("user", "rain"), ("assistant", "apple bird"), ("user", "key")],
        [("user", "moon")],
    ]


def test_the_system_prompt_comes_first_and_another_one_begins_again(
    session: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = session("apple", system="lemon")
    seen = prompts(chat, monkeypatch)
    ask(chat, "rain")
    chat.set_system_prompt("cloud")
    ask(chat, "rain")
    chat.set_system_prompt(None)
    ask(chat, "rain")
    assert [[turn for turn in prompt if turn[0] == "system"] for prompt in seen] == [
        [("system", "lemon")],
        [("system", "cloud")],
        [],
    ]
    assert all(len(prompt) <= 2 for prompt in seen)


def test_a_system_prompt_that_the_template_refuses_leaves_the_old_one(
    session: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = session("apple")
    ask(chat, "rain")
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}\n"
    monkeypatch.setattr(chat.model._renderer, "_template", template)
    with pytest.raises(DataError, match="no system turns"):
        chat.set_system_prompt("lemon")
    assert chat.system_prompt is None
    assert len(chat.turns) == 2


def test_oldest_turns_are_left_out_with_a_statement_and_the_system_prompt_stays(
    session: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = session("apple bird", system="lemon", context=64, max_new_tokens=16)
    seen = prompts(chat, monkeypatch)
    notes = [ask(chat, f"rain key moon {number}").notes for number in ("one", "two", "three", "four", "five")]
    assert notes[0] == []
    stated = [note for answer in notes for note in answer]
    assert stated[0] == (
        "your first question and its answer no longer fit into the model's context and are left out from here on"
    )
    assert stated[-1].startswith("your first ")
    assert "questions and answers no longer fit" in stated[-1]
    assert seen[-1][0] == ("system", "lemon")
    assert seen[-1][-1] == ("user", "rain key moon five")
    assert ("user", "rain key moon one") not in seen[-1]
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"] * 5  # nothing is lost for /save
    assert all(
        len(chat.model.encode([{"role": role, "content": text} for role, text in prompt])) <= 48 for prompt in seen
    )


def test_what_is_left_out_is_stated_once(session: Sessions) -> None:
    chat = session("apple", context=40, max_new_tokens=4)
    for question in ("rain key moon", "rain key moon", "rain key moon rain key moon"):
        ask(chat, question)
    before = chat._num_left_out
    assert before > 0
    assert ask(chat, "rain").notes == [] or chat._num_left_out > before


def test_a_question_longer_than_the_context_is_refused_and_not_kept(session: Sessions) -> None:
    chat = session("apple", context=64)
    ask(chat, "rain")
    with pytest.raises(RequestError, match=r"the question has \d+ tokens .* context holds 64; make it shorter"):
        ask(chat, "rain " * 80)
    assert [turn["content"] for turn in chat.turns] == ["rain", "apple"]
    assert ask(chat, "key").text == "apple"


def test_a_question_that_leaves_little_room_is_answered_in_it(session: Sessions) -> None:
    chat = session("apple bird cat fish", context=40, max_new_tokens=20)
    empty = len(chat.model.encode([{"role": "user", "content": ""}]))
    question = "rain " * (38 - empty - 1) + "rain"
    assert len(chat.model.encode([{"role": "user", "content": question}])) == 38
    answer = ask(chat, question)
    assert answer == Answer(text="apple bird", notes=["cut off: the context of 40 tokens is full; /reset empties it"])


def test_an_answer_that_is_cut_off_says_so(session: Sessions) -> None:
    assert ask(session("apple bird cat", max_new_tokens=2), "rain") == Answer(
        text="apple bird", notes=["cut off after --max-new-tokens 2"]
    )


def test_an_empty_answer_says_so(session: Sessions) -> None:
    assert ask(session(""), "rain") == Answer(text="", notes=["the model gave an empty answer"])


def test_an_interrupted_answer_is_kept_as_far_as_it_came(session: Sessions) -> None:
    chat = session("apple bird cat")
    pieces: list[str] = []
    notes = chat.ask("rain", pieces.append, lambda: bool(pieces))
    assert ("".join(pieces), notes) == ("apple bird", ["stopped"])
    assert chat.turns[-1] == {"role": "assistant", "content": "apple bird"}


def test_a_question_stopped_before_the_first_word_is_not_kept(session: Sessions) -> None:
    end_of_text = 0  # a special token, which is no text, and not one that this model's answers end with
    chat = session([end_of_text, 300, 301])
    answer = ask(chat, "rain", is_interrupted=lambda: True)
    assert answer == Answer(text="", notes=["stopped", "there was no answer yet, so the question is not kept"])
    assert chat.turns == []


@pytest.mark.parametrize(
    ("text", "message"), [("  \n", "nothing to answer"), ("a\udcffb", r"not UTF-8 \(at character 2\)")]
)
def test_what_is_no_text_is_refused(session: Sessions, text: str, message: str) -> None:
    chat = session("apple")
    with pytest.raises(RequestError, match=message):
        ask(chat, text)
    assert chat.turns == []


def test_a_saved_conversation_can_be_trained_on(session: Sessions, tmp_path: Path) -> None:
    chat = session("apple bird", system="lemon")
    ask(chat, "réverse [this]\nplease")
    file = chat.save(str(tmp_path / "chat.jsonl"))
    problems = DocumentProblems(str(file))
    ((_, record),) = read_records(file, problems)
    row = Normalizer(Format.auto, FormatSettings()).row(record)
    assert [(turn["role"], turn["content"], turn["train"]) for turn in row["messages"]] == [
        ("system", "lemon", False),
        ("user", "réverse [this]\nplease", False),
        ("assistant", "apple bird", True),
    ]
    ask(chat, "more")
    assert chat.save(str(file)) == file  # its own file may grow
    assert len(json.loads(file.read_text())["messages"]) == 5


def test_saving_never_replaces_what_is_there_and_says_what_to_type(session: Sessions, tmp_path: Path) -> None:
    chat = session("apple")
    with pytest.raises(RequestError, match="nothing to save"):
        chat.save(str(tmp_path / "chat.jsonl"))
    ask(chat, "rain")
    there = tmp_path / "there.jsonl"
    there.write_text("mine")
    with pytest.raises(RequestError, match=r"there\.jsonl already exists"):
        chat.save(str(there))
    assert there.read_text() == "mine"
    with pytest.raises(RequestError, match=rf"type /save {tmp_path}/talk\.jsonl"):
        chat.save(str(tmp_path / "talk.txt"))
    with pytest.raises(RequestError, match="cannot be written: No such file or directory"):
        chat.save(str(tmp_path / "nowhere" / "chat.jsonl"))
