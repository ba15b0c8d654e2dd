from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.errors import RequestError
from tunebook.evaluate import harness_tasks
from tunebook.evaluate.harness_tasks import HarnessTasks, check_harness_name


@pytest.fixture
def scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HarnessTasks:
    """A harness with every way its files have of naming a task."""
    files = {
        "plain/plain.yaml": "task: plain_task\n",
        "quoted/quoted.yaml": '"task": "quoted_task"\n"tag":\n  - first_tag\n  - second_tag\n',
        "inline/_default_yaml": "tag: [third_tag, 'fourth_tag']\n",
        "group/group.yaml": "group: a_group\ntask:\n  - plain_task\n  - not_a_name_here\n",
        "unsafe/unsafe.yaml": "task: unsafe_task\nunsafe_code: true\n",
        "imports/imports.yaml": "task: importing_task\nprocess_results: !function utils.run\n",
        "imports/utils.py": "import evaluate\ncompute = evaluate.load('code_eval')\ntask: str\n",
        "notes/README.md": "task: only_in_prose\n",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(harness_tasks, "task_folder", lambda: tmp_path)
    return harness_tasks.harness_tasks.__wrapped__()


def test_names_are_found_however_they_are_written(scanned: HarnessTasks) -> None:
    tags = {"first_tag", "second_tag", "third_tag", "fourth_tag"}
    tasks = {"plain_task", "quoted_task", "unsafe_task", "importing_task"}
    assert scanned.names == tags | tasks | {"a_group"}


def test_code_is_seen_by_the_flag_or_by_what_the_folder_imports(scanned: HarnessTasks) -> None:
    assert scanned.runs_code == {"unsafe_task", "importing_task"}


@pytest.mark.parametrize("name", ["gsm8k", "mmlu", "leaderboard_bbh", "ai2_arc", "hellaswag"])
def test_the_installed_harness_has(name: str) -> None:
    check_harness_name(name)


@pytest.mark.parametrize("name", ["humaneval", "humaneval_instruct", "mbpp", "mbpp_plus"])
def test_the_installed_harness_code_tasks_are_refused(name: str) -> None:
    with pytest.raises(
        RequestError, match=f"'{name}' executes programs .*only the sandbox does that here.*small_python"
    ):
        check_harness_name(name)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"no task 'helaswag'.*Did you mean 'hellaswag'\?") as raised:
        check_harness_name("helaswag")
    assert raised.value.exit_code == 2
    with pytest.raises(RequestError, match=r"Did you mean 'small_python'\?"):  # of this book's own
        check_harness_name("smal_python")
