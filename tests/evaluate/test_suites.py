"""Which tasks a suite is, for the run that is evaluated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.config import book
from tunebook.config.book import book_root
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evaluate import suites
from tunebook.evaluate.suites import suite_settings
from tunebook.evaluate.task_files import resolve_task


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose("quickstart", ["evaluation.batch_size=8"]).config


def test_a_group_is_taken_as_a_whole(config: RunConfig) -> None:
    settings = suite_settings("quickstart", config)
    assert settings == compose("quickstart", []).config.evaluation  # its own batch size, not the run's
    assert settings.batch_size == 64
    assert "leaderboard_ifeval" in suite_settings("leaderboard", config).tasks


def test_quick_is_what_the_recipe_ships(config: RunConfig) -> None:
    settings = suite_settings("quick", config)
    assert settings.tasks == [str(book_root() / "recipes" / "quickstart" / "tasks" / "quickstart.yaml")]
    assert settings.batch_size == 8
    assert not isinstance(resolve_task(settings.tasks[0]), str)


def test_quick_finds_tasks_beside_a_recipe_of_the_users(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tmp_path / "mine" / "tasks" / "words.yaml"
    task.parent.mkdir(parents=True)
    task.touch()
    monkeypatch.setenv(book.RECIPES_VARIABLE, str(tmp_path))
    assert suite_settings("quick", replace(config, recipe="mine")).tasks == [str(task)]


def test_without_shipped_tasks_quick_is_the_runs_own_files(config: RunConfig) -> None:
    without = replace(config, recipe=None, evaluation=replace(config.evaluation, tasks=["gsm8k", "tasks/mine.yaml"]))
    assert suite_settings("quick", without).tasks == ["tasks/mine.yaml"]
    nothing = replace(without, evaluation=replace(config.evaluation, tasks=["gsm8k"]))
    with pytest.raises(RequestError, match=r"has no recipe; name another suite \(code, .*, quickstart\)"):
        suite_settings("quick", nothing)
    with pytest.raises(RequestError, match="zero1_lora ships none"):
        suite_settings("quick", replace(nothing, recipe="zero1_lora"))


@pytest.mark.parametrize("name", ["leaderbord", "none", "tasks"])
def test_an_unknown_suite_lists_those_with_tasks(config: RunConfig, name: str) -> None:
    with pytest.raises(
        RequestError, match=r"Suites: code, code_completion, leaderboard, quick, quickstart\. Single"
    ) as raised:
        suite_settings(name, config)
    assert ("Did you mean 'leaderboard'?" in raised.value.message) is (name == "leaderbord")
    assert raised.value.problem_id == "unknown-suite"


@pytest.mark.parametrize("text", ["tasks: [a]\nbatch_sise: 3\n", "tasks: [a\n", "tasks: [a]\nbatch_size: many\n"])
def test_a_broken_group_is_named(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    file = tmp_path / "hydra_configs" / "evaluation" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.setattr(suites, "book_root", lambda: tmp_path)
    with pytest.raises(RequestError, match=f"{file} is no evaluation group: ") as raised:
        suite_settings("mine", config)
    assert raised.value.problem_id == "suite-file"
