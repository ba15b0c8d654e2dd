from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.cli.options import settings, split
from tunebook.errors import RequestError


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder of data, one named like a recipe, and a model."""
    for folder in ("chats", "quickstart", "my_model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "my_model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, (None, [])),
        (["quickstart", "a=1"], ("quickstart", ["a=1"])),
        (["a=1", "b=2"], (None, ["a=1", "b=2"])),
        (["+a=1"], (None, ["+a=1"])),
        (["~a"], (None, ["~a"])),
        (["", "a=1"], (None, ["a=1"])),
        (["not_here.jsonl"], (None, ["dataset=file", "dataset.path=not_here.jsonl"])),
        (["a=1", "chats"], (None, ["dataset=file", "dataset.path=chats", "a=1"])),
        (["chats/*.csv", "quickstart"], ("quickstart", ["dataset=file", 'dataset.path="chats/*.csv"'])),
        (["./quickstart"], (None, ["dataset=file", "dataset.path=./quickstart"])),
        (["a, b.jsonl"], (None, ["dataset=file", 'dataset.path="a, b.jsonl"'])),
        (["elsewhere/mine.yaml", "a=1"], ("elsewhere/mine.yaml", ["a=1"])),
    ],
)
@pytest.mark.usefixtures("work")
def test_a_word_without_a_value_is_the_recipe_or_the_data(words: list[str] | None, expected: object) -> None:
    assert split(words) == expected


@pytest.mark.parametrize(
    ("words", "id"),
    [
        (["a.jsonl", "b.jsonl"], "two-words"),
        (["quickstart", "mine.yaml"], "two-words"),
        (["my_model"], "word-is-a-model"),
    ],
)
@pytest.mark.usefixtures("work")
def test_two_of_a_kind_and_a_model_are_refused(words: list[str], id: str) -> None:
    with pytest.raises(RequestError) as raised:
        split(words)
    assert raised.value.problem_id == id


def test_a_bare_word_is_the_first_setting_and_an_unknown_one_is_refused() -> None:
    assert settings(["a/b", "suite=quick"], ("run", "suite")) == {"run": "a/b", "suite": "quick"}
    assert settings(None, ("run",)) == {}
    with pytest.raises(RequestError, match=r"no setting 'siute' here\. Did you mean 'suite'") as raised:
        settings(["siute=quick"], ("run", "suite"))
    assert raised.value.problem_id == "unknown-key"
    for words in (["a", "b"], ["run=a", "run=b"]):
        with pytest.raises(RequestError, match=r"sets run once more, after run=a; type one of them"):
            settings(words, ("run", "suite"))
