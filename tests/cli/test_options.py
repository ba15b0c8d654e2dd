from __future__ import annotations

import pytest

from tunebook.cli.app import settings, split
from tunebook.errors import RequestError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, (None, [])),
        (["quickstart", "a=1"], ("quickstart", ["a=1"])),
        (["a=1", "b=2"], (None, ["a=1", "b=2"])),
        (["+a=1"], (None, ["+a=1"])),
        (["~a"], (None, ["~a"])),
        (["", "a=1"], (None, ["a=1"])),
    ],
)
def test_a_first_word_without_a_value_is_the_recipe(words: list[str] | None, expected: object) -> None:
    assert split(words) == expected


def test_a_bare_word_is_the_first_setting_and_an_unknown_one_is_refused() -> None:
    assert settings(["a/b", "suite=quick"], ("run", "suite")) == {"run": "a/b", "suite": "quick"}
    assert settings(None, ("run",)) == {}
    with pytest.raises(RequestError, match=r"no setting 'siute' here\. Did you mean 'suite'") as raised:
        settings(["siute=quick"], ("run", "suite"))
    assert raised.value.problem_id == "unknown-key"
    for words in (["a", "b"], ["run=a", "run=b"]):
        with pytest.raises(RequestError, match=r"sets run once more, after run=a; type one of them"):
            settings(words, ("run", "suite"))
