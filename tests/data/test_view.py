"""What a person sees of prepared data, with color and without."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from tunebook.config import schema
from tunebook.config.choices import Overlong
from tunebook.data.encode import SPECIAL_AS_TEXT
from tunebook.data.prepare import prepare
from tunebook.data.view import TRAINED_STYLE, pieces_of, render_document, show_prepared, summary_lines
from tunebook.model.tokenizer import load_tokenizer

Configs = Callable[..., schema.RunConfig]
LONG = [("user", "x" * 50), ("assistant", "Yo")]


def show(config: schema.RunConfig, num_samples: int, **console: Any) -> str:
    output = io.StringIO()
    prepared = prepare(config)
    show_prepared(prepared, load_tokenizer(config.model), Console(file=output, width=200, **console), num_samples)
    return output.getvalue()


def test_everything_of_interest_is_shown(run_config: Configs) -> None:
    conversations = [[("user", f"{n}"), ("assistant", "Yo")] for n in range(8)] + [LONG]
    shown = show(run_config(conversations, max_length=30, overlong=Overlong.drop), 2)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert any("messages 9 sha256" in line and "train.jsonl" in line for line in lines)
    # 24 tokens each: one fewer than in test_encode.py, whose question is a letter longer
    assert "train: 8 documents of 192 tokens (mean 24.0), 24 (12.5%) trained on" in lines
    assert "dropped: 1 longer than training.max_length (dataset.overlong=drop)" in lines
    assert "24 8 " + "#" * 40 in lines
    assert sum(line.startswith("train ") and "24 tokens, 3 trained on" in line for line in lines) == 2


def test_a_run_is_told_in_few_lines_and_of_everything_lost(run_config: Configs) -> None:
    conversations = [[("user", f"{n}"), ("assistant", "Yo")] for n in range(8)] + [LONG]
    config = run_config(conversations, max_length=30, overlong=Overlong.cut)
    headline, train, cut, dropped, *notes = summary_lines(prepare(config))
    assert headline == "Data"
    assert train == "  train: 8 documents of 192 tokens (mean 24.0), 24 (12.5%) trained on"
    assert cut == "    cut or split to training.max_length=30: 1 (11.1%); tokens lost: 73"  # 24 - 1 + 50
    assert dropped == "    dropped: 1 without a token to train on within training.max_length"
    assert all(note.startswith("  note: ") for note in notes)
    assert any("format messages, by the keys of its first document" in note for note in notes)
    assert summary_lines(prepare(config))[0] == "Data (prepared earlier)"


def test_what_a_person_should_know_of_documents_is_counted_with_the_first(run_config: Configs) -> None:
    config = run_config([[("user", "Hi"), ("assistant", "Yo")], [("user", "</s>"), ("assistant", "Yo")]])
    note = f"{SPECIAL_AS_TEXT}: 1 (the first: train.jsonl:2, </s>)"
    assert f"    note: {note}" in summary_lines(prepare(config))
    assert f"    note: {note}" in [line.rstrip() for line in show(config, 0).splitlines()]


def test_trained_tokens_are_in_brackets_where_there_is_no_colour(run_config: Configs) -> None:
    shown = show(run_config([[("user", "Hi"), ("assistant", "Yo")]]), 1)
    assert "trained on: [[in double brackets]]" in shown
    assert "[[Yo<|im_end|>]]" in shown
    assert "\x1b" not in shown
    without = show(run_config([[("user", "Hi"), ("assistant", "Yo")]]), 1, force_terminal=True, no_color=True)
    assert "[[Yo<|im_end|>]]" in without


def test_trained_tokens_are_in_colour_on_a_terminal(run_config: Configs) -> None:
    config = run_config([[("user", "Hi"), ("assistant", "Yo")]])
    shown = show(config, 1, force_terminal=True, color_system="standard")
    assert "\x1b[30;42mYo<|im_end|>\x1b[0m" in shown  # black on green
    assert "[[" not in shown


@pytest.mark.parametrize("has_color", [True, False])
def test_runs_of_trained_tokens_are_marked_exactly(tiny_tokenizer: Callable[..., Any], has_color: bool) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("ab cd", add_special_tokens=False)["input_ids"]
    text = render_document(ids, [-100, ids[1], ids[2], -100, ids[4]], tokenizer, has_color=has_color)
    assert text.plain == ("ab cd" if has_color else "a[[b ]]c[[d]]")
    marked = [text.plain[span.start : span.end] for span in text.spans if span.style == TRAINED_STYLE]
    assert marked == (["b ", "d"] if has_color else [])


def test_control_characters_cannot_reach_the_terminal(tiny_tokenizer: Callable[..., Any]) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a\x1b[2Jb\r\n", add_special_tokens=False)["input_ids"]
    text = render_document(ids, [-100] * len(ids), tokenizer, has_color=False)
    assert text.plain == "a\u241b[2Jb\u240d\n"


class BytesAlone:
    """Decodes each byte of an unfinished character to one replacement character, as byte fallback does."""

    def decode(self, ids: list[int], **_: Any) -> str:
        whole = bytes(ids)
        for end in range(len(whole), -1, -1):
            try:
                return whole[:end].decode() + "\ufffd" * (len(whole) - end)
            except UnicodeDecodeError:
                continue
        raise AssertionError("nothing is always text")


def test_a_character_cut_by_the_loss_shifts_nothing_after_it() -> None:
    ids = list("a\U0001f600bc".encode())
    pieces = pieces_of(ids, [-100] * 4 + ids[4:6] + [-100], BytesAlone())  # type: ignore[arg-type]
    assert pieces == [("a", False), ("\U0001f600b", True), ("c", False)]
