from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.config.book import resolve_path
from tunebook.errors import RequestError
from tunebook.evaluate.task_files import TaskFile, check_tasks, is_task_file, read_task_file, resolve_task

QUICKSTART = "book:recipes/quickstart/tasks/quickstart.yaml"


def write(folder: Path, text: str, name: str = "task.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("task", "expected"), [(QUICKSTART, True), ("a/b.yaml", True), ("b.yml", True), ("gsm8k", False)]
)
def test_a_file_is_told_from_a_name(task: str, expected: bool) -> None:
    assert is_task_file(task) is expected


def test_the_quickstarts_task_names_its_conversations_and_baseline() -> None:
    task = resolve_task(QUICKSTART)
    assert isinstance(task, TaskFile)
    assert task.name == "quickstart"
    assert task.conversations == resolve_path("book:recipes/quickstart/data/heldout.jsonl")
    assert task.baseline == resolve_path("book:recipes/quickstart/baseline.py")
    assert not task.is_group


def test_functions_are_not_imported(tmp_path: Path) -> None:
    write(tmp_path, "raise SystemExit('imported')", "helper.py")
    task = read_task_file(write(tmp_path, "task: mine\ndoc_to_text: !function helper.text\n"))
    assert task.name == "mine"
    assert task.conversations is None


@pytest.mark.parametrize(
    "metrics",
    ["[{metric: acc}, {metric: chrf++}]", "[{metric: accc, hf_evaluate: true}]", "[{metric: rouge}]", "[acc]", "{}"],
)
def test_metrics_that_the_harness_takes_are_let_through(tmp_path: Path, metrics: str) -> None:
    assert read_task_file(write(tmp_path, f"task: mine\nmetric_list: {metrics}\n")).name == "mine"


def test_metrics_of_a_tasks_own_are_let_through(tmp_path: Path) -> None:
    text = "task: mine\nprocess_results: !function f.score\nmetric_list: [{metric: exact_mach}]\n"
    assert read_task_file(write(tmp_path, text)).name == "mine"


def test_included_keys_are_under_the_files_own(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text("{}")
    write(tmp_path, "task: base\nmetadata:\n  conversations: held.jsonl\n", "base.yaml")
    task = read_task_file(write(tmp_path, "include: base.yaml\ntask: mine\n"))
    assert (task.name, task.conversations) == ("mine", tmp_path / "held.jsonl")


def test_a_group_is_known_by_its_key(tmp_path: Path) -> None:
    task = read_task_file(write(tmp_path, "group: both\ntask:\n  - gsm8k\n  - hellaswag\n"))
    assert (task.name, task.is_group) == ("both", True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [", "task.yaml, line 1: this is not YAML: expected the node content"),
        ("task: a\nmetric_list: [{metric: exact_mach}]", "no metric 'exact_mach'.*Did you mean 'exact_match'"),
        ("- a\n- b\n", "holds no keys"),
        ("output_type: generate_until\n", "has no key 'task'"),
        ("task: mine\nunsafe_code: true\n", "'mine' executes programs"),
        ("task: mine\nmetric_list:\n  - metric: code_eval\n", "'mine' executes programs"),
        (
            "task: mine\nmetadata:\n  conversations: gone.jsonl\n",
            r"metadata.conversations is 'gone.jsonl', but .* no file",
        ),
        ("task: mine\ninclude: task.yaml\n", "includes itself"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_task_file(write(tmp_path, text))


def test_all_wrong_tasks_are_reported_together(tmp_path: Path) -> None:
    gone = tmp_path / "gone.yaml"
    with pytest.raises(RequestError) as raised:
        check_tasks([QUICKSTART, str(gone), "mbpp_plus", "mbpp", "hellaswagg"])
    lines = raised.value.message.splitlines()
    assert len(lines) == 3
    assert f"no task file {gone}" in lines[0]
    assert "'mbpp_plus' executes programs" in lines[1]  # mbpp is a task of this book's own
    assert "Did you mean 'hellaswag'?" in lines[2]
