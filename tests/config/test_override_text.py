"""Suggested overrides: shell and Hydra together read back the text."""

import subprocess

import pytest

from tunebook.config.compose import parse_overrides
from tunebook.config.override_text import as_typed, shell_command, typed

TEXTS = ["größe", "a, b", "<|im_end|>", "it's", 'a "b"', 'it\'s a "b"', "d/[ap]*.jsonl", "a\\", "a\\'", "my (data)",
         "", "x", "\n", "\t", 'it\'s\n"a" \\ größe\u2028', "\\n", "{a}", "[PAD]", "$HOME `ls`",
         "<pad>", "</s>"]  # fmt: skip


def in_bash(words: list[str]) -> list[str]:
    """The arguments that a command gets for these words."""
    output = subprocess.run(["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], check=True, capture_output=True).stdout
    return output.decode().split("\0")[:-1]


def test_what_is_typed_is_read_back():
    words = in_bash([typed("title", text) for text in TEXTS])
    assert [(override.key_or_group, override.value()) for override in parse_overrides(words)] == [
        ("title", text) for text in TEXTS
    ]
    assert in_bash([shell_command(words)]) == words


def test_plain_texts_need_no_quotes():
    assert typed("dataset.path", "data/a-b.jsonl") == "dataset.path=data/a-b.jsonl"
    assert typed("model.eos_token", "<|im_end|>") == "'model.eos_token=\"<|im_end|>\"'"


@pytest.mark.parametrize(("value", "text"), [(None, "null"), (True, "true"), (1.5, "1.5")])
def test_values_are_shown_as_they_are_typed(value: object, text: str) -> None:
    assert as_typed(value) == text
