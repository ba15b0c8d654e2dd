"""Overrides that messages say to type: a shell and Hydra together give back the text."""

import shlex

import pytest

from tunebook.config.compose import parse_overrides
from tunebook.config.override_text import as_typed, typed


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
    ],
)
def test_what_is_typed_is_read_back(text):
    (word,) = shlex.split(typed("title", text))
    (override,) = parse_overrides([word])
    assert (override.key_or_group, override.value()) == ("title", text)


def test_plain_texts_need_no_quotes():
    assert typed("dataset.path", "data/a-b.jsonl") == "dataset.path=data/a-b.jsonl"
    assert typed("model.eos_token", "<|im_end|>") == "'model.eos_token=\"<|im_end|>\"'"


@pytest.mark.parametrize(("value", "text"), [(None, "null"), (True, "true"), (False, "false"), (1.5, "1.5")])
def test_values_are_shown_as_they_are_typed(value: object, text: str) -> None:
    assert as_typed(value) == text
