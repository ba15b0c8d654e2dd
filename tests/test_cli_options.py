from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.cli_options import named_run, settings, split, task_names
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


def test_a_run_is_named_alone_or_as_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("latest", "run=latest", "run=/a/b=c", "model=x/y", "other=x")
    assert [named_run(word) for word in words] == ["latest", "latest", "/a/b=c", "x/y", "other=x"]
    (tmp_path / "run=1").mkdir()
    assert named_run("run=1") == "run=1"  # a folder of that name
    with pytest.raises(RequestError, match=r"'run=' names no run; type run=FOLDER"):
        named_run("run=")


def test_tasks_in_either_spelling_and_both() -> None:
    assert task_names({}) is None
    assert task_names({"tasks": "[a, b]"}) == ["a", "b"]
    assert task_names({"task": "c", "tasks": "a,b"}) == ["a", "b", "c"]
    assert task_names({"tasks": ""}) == []
