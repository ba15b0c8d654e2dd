"""Which tasks a suite is, for the run that is evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluate.conftest import QUICKSTART
from tunebook.config.book import resolve_path
from tunebook.config.schema import EvaluationConfig
from tunebook.errors import RequestError
from tunebook.evaluate.task_files import read_task_file, resolve_task, resolve_tasks, suite_settings


def write(folder: Path, text: str, name: str = "task.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_the_quickstarts_task_names_its_conversations() -> None:
    task = resolve_task(QUICKSTART)
    assert task.name == "quickstart"
    assert task.conversations == resolve_path("book:recipes/quickstart/data/heldout.jsonl")


def test_functions_are_not_imported_and_included_keys_are_under_the_files_own(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("raise SystemExit('imported')")
    (tmp_path / "held.jsonl").write_text("{}")
    write(tmp_path, "task: base\nmetadata:\n  conversations: held.jsonl\n", "base.yaml")
    task = read_task_file(write(tmp_path, "include: base.yaml\ntask: mine\ndoc_to_text: !function helper.text\n"))
    assert (task.name, task.conversations) == ("mine", tmp_path / "held.jsonl")


@pytest.mark.parametrize(
    ("text", "problem_id"),
    [
        ("task: [", "task-file"),
        ("- a\n- b\n", "task-file"),
        ("group: both\ntask: [gsm8k]\n", "task-file"),
        ("task: mine\nunsafe_code: true\n", "task-runs-code"),
        ("task: mine\nmetric_list:\n  - metric: code_eval\n", "task-runs-code"),
        ("task: mine\nmetadata:\n  conversations: gone.jsonl\n", "task-file"),
        ("task: mine\ninclude: task.yaml\n", "task-file"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, problem_id: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_task_file(write(tmp_path, text))
    assert raised.value.problem_id == problem_id


def test_a_suite_is_a_group_as_a_whole() -> None:
    expected = EvaluationConfig(tasks=[QUICKSTART], before=True, batch_size=64)
    assert suite_settings("quickstart") == expected
    assert "leaderboard_ifeval" in suite_settings("leaderboard").tasks
    code = suite_settings("code").tasks
    assert code == ["humaneval_instruct", "mbpp_fenced", "small_python_instruct"]
    assert all(resolve_task(task).code is not None for task in code)


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(RequestError) as raised:
        suite_settings("leaderbord")
    assert raised.value.problem_id == "unknown-choice"


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    """Results are kept by name: the second task's would replace the first's."""
    one, other = (str(write(tmp_path, "task: mine\n", name)) for name in ("one.yaml", "other.yaml"))
    with pytest.raises(RequestError) as raised:
        resolve_tasks([one, other])
    assert raised.value.problem_id == "task-name-taken"
    assert [task.name for task in resolve_tasks([one, one, "arc_easy"])] == ["mine", "mine", "arc_easy"]
