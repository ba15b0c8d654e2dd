"""What a person sees of prepared data, with color and without."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from tunebook.config import schema
from tunebook.config.choices import Overlong
from tunebook.data.chunks import NOTHING_TRAINED
from tunebook.data.encode import SPECIAL_AS_TEXT
from tunebook.data.prepare import prepare
from tunebook.data.prepared import Prepared
from tunebook.data.view import TRAINED_STYLE, pieces_of, render_document, show_prepared, summary_lines

Configs = Callable[..., schema.RunConfig]
LONG = [("user", "x" * 50), ("assistant", "Yo")]


def show(prepared: Prepared, tokenizer: Any, num_samples: int = 1, **console: Any) -> str:
    output = io.StringIO()
    show_prepared(prepared, tokenizer, Console(file=output, width=200, **console), num_samples)
    return output.getvalue()


def test_a_run_prints_the_amount_and_everything_that_was_lost(
    run_config: Configs, tiny_tokenizer: Callable[..., Any]
) -> None:
    conversations = [[("user", f"{n}"), ("assistant", "Yo")] for n in range(7)]
    typed = [("user", "</s>"), ("assistant", "Yo")]
    config = run_config([*conversations, typed, LONG], max_length=30, overlong=Overlong.cut)
    prepared = prepare(config)
    headline, train, cut, dropped, special, *notes = summary_lines(prepared)
    assert headline == "Data"
    # 24 tokens each: one fewer than in test_encode.py, whose question is a letter longer; `</s>` is four
    assert train == "  train: 8 documents of 195 tokens (mean 24.4), 24 (12.3%) trained on"
    assert cut == "    cut or split to training.max_length=30: 1 (11.1%); tokens lost: 73"  # 24 - 1 + 50
    assert dropped == f"    dropped: 1 {NOTHING_TRAINED}"
    assert special == f"    note: {SPECIAL_AS_TEXT}: 1 (the first: train.jsonl:8, </s>)"
    assert any("format messages" in note for note in notes)
    assert summary_lines(prepare(config))[0] == "Data (prepared earlier)"
    shown = show(prepared, tiny_tokenizer(), num_samples=2)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert any("train.jsonl: messages, 9 documents, sha256 " in line for line in lines)
    assert "24 7 " + "#" * 40 in lines
    assert sum(line.startswith("train ") and "tokens, 3 trained on" in line for line in lines) == 2


def test_trained_tokens_are_in_color_on_a_terminal_and_in_brackets_elsewhere(
    run_config: Configs, tiny_tokenizer: Callable[..., Any]
) -> None:
    prepared = prepare(run_config([[("user", "Hi"), ("assistant", "Yo")]]))
    shown = show(prepared, tiny_tokenizer())
    assert "[[Yo<|im_end|>]]" in shown and "\x1b" not in shown
    assert "[[Yo<|im_end|>]]" in show(prepared, tiny_tokenizer(), force_terminal=True, no_color=True)
    shown = show(prepared, tiny_tokenizer(), force_terminal=True, color_system="standard")
    assert "\x1b[30;42mYo<|im_end|>\x1b[0m" in shown  # black on green
    assert "[[" not in shown


@pytest.mark.parametrize("has_color", [True, False])
def test_trained_runs_are_marked_exactly_and_controls_replaced(
    tiny_tokenizer: Callable[..., Any], has_color: bool
) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("ab cd", add_special_tokens=False)["input_ids"]
    text = render_document(ids, [-100, ids[1], ids[2], -100, ids[4]], tokenizer, has_color=has_color)
    assert text.plain == ("ab cd" if has_color else "a[[b ]]c[[d]]")
    control = tokenizer("a\x1b[2Jb\r\n", add_special_tokens=False)["input_ids"]
    untrained = render_document(control, [-100] * len(control), tokenizer, has_color=has_color)
    assert untrained.plain == "a\\x1b[2Jb\\r\n"
    marked = [text.plain[span.start : span.end] for span in text.spans if span.style == TRAINED_STYLE]
    assert marked == (["b ", "d"] if has_color else [])


def test_a_character_cut_by_the_loss_shifts_nothing_after_it(tiny_tokenizer: Callable[..., Any]) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a\U0001f600bc", add_special_tokens=False)["input_ids"]
    pieces = pieces_of(ids, [-100] * 4 + ids[4:6] + [-100], tokenizer)
    assert pieces == [("a", False), ("\U0001f600b", True), ("c", False)]
