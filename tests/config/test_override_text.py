"""Suggested overrides: shell and Hydra together read back the text."""

import subprocess

import pytest

from tunebook.config.compose import parse_overrides
from tunebook.config.override_text import as_typed, shell_command, typed


@pytest.mark.parametrize(
    "text",
    [
        "größe",
        "a, b",
        "<|im_end|>",
        "it's",
        'a "b"',
        'it\'s a "b"',
        "d/[ap]*.jsonl",
        "a\\",
        "a\\'",
        "my (data)",
        "",
        "x",
        "\n",
        "\t",
        'it\'s\n"a" \\ größe\u2028',
        "\\n",
        "{a}",
        "[PAD]",
        "$HOME `ls`",
        "<pad>",
        "</s>",
    ],
)
def test_what_is_typed_is_read_back(text):
    typed_word = typed("title", text)
    word = in_bash(typed_word)
    (override,) = parse_overrides([word])
    assert (override.key_or_group, override.value()) == ("title", text)
    assert in_bash(shell_command([word])) == word


def in_bash(word: str) -> str:
    return subprocess.run(["bash", "-c", f"printf %s {word}"], check=True, capture_output=True).stdout.decode()


def test_plain_texts_need_no_quotes():
    assert typed("dataset.path", "data/a-b.jsonl") == "dataset.path=data/a-b.jsonl"
    assert typed("model.eos_token", "<|im_end|>") == "'model.eos_token=\"<|im_end|>\"'"


@pytest.mark.parametrize(("value", "text"), [(None, "null"), (True, "true"), (False, "false"), (1.5, "1.5")])
def test_values_are_shown_as_they_are_typed(value: object, text: str) -> None:
    assert as_typed(value) == text
