"""Which tasks a suite is, for the run that is evaluated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.config import book
from tunebook.config.book import book_root, resolve_path
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evaluate import task_files
from tunebook.evaluate.task_files import (
    HarnessTasks,
    check_harness_name,
    check_tasks,
    read_task_file,
    resolve_task,
    suite_settings,
)

QUICKSTART = "book:recipes/quickstart/tasks/quickstart.yaml"


def write(folder: Path, text: str, name: str = "task.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_the_quickstarts_task_names_its_conversations_and_baseline() -> None:
    task = resolve_task(QUICKSTART)
    assert task.file is not None
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
    ("text", "problem_id"),
    [
        ("task: [", "task-file"),
        ("task: a\nmetric_list: [{metric: exact_mach}]", "task-file"),
        ("- a\n- b\n", "task-file"),
        ("output_type: generate_until\n", "task-file"),
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


def test_all_wrong_tasks_are_reported_together(tmp_path: Path) -> None:
    gone = tmp_path / "gone.yaml"
    with pytest.raises(RequestError) as raised:
        check_tasks([QUICKSTART, str(gone), "mbpp_plus", "mbpp", "hellaswagg"])
    lines = raised.value.message.splitlines()
    assert len(lines) == 3
    assert f"no task file {gone}" in lines[0]
    assert "'mbpp_plus' executes programs" in lines[1]  # mbpp is a task of this book's own
    assert "Did you mean 'hellaswag'?" in lines[2]


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
    assert resolve_task(settings.tasks[0]).file is not None


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
    for recipe in (None, "zero1_lora"):
        with pytest.raises(RequestError) as raised:
            suite_settings("quick", replace(nothing, recipe=recipe))
        assert raised.value.problem_id == "unknown-suite"


@pytest.mark.parametrize("name", ["leaderbord", "none", "tasks"])
def test_an_unknown_suite_lists_those_with_tasks(config: RunConfig, name: str) -> None:
    with pytest.raises(RequestError) as raised:
        suite_settings(name, config)
    assert ("Did you mean 'leaderboard'?" in raised.value.message) is (name == "leaderbord")
    assert raised.value.problem_id == "unknown-suite"


@pytest.mark.parametrize("text", ["tasks: [a]\nbatch_sise: 3\n", "tasks: [a\n", "tasks: [a]\nbatch_size: many\n"])
def test_a_broken_group_is_named(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    file = tmp_path / "hydra_configs" / "evaluation" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.setattr(task_files, "book_root", lambda: tmp_path)
    with pytest.raises(RequestError) as raised:
        suite_settings("mine", config)
    assert raised.value.problem_id == "suite-file"


@pytest.fixture
def scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HarnessTasks:
    """A harness with every way its files have of naming a task."""
    files = {
        "plain/plain.yaml": "task: plain_task\n",
        "quoted/quoted.yaml": '"task": "quoted_task"\n"tag":\n  - first_tag\n  - second_tag\n',
        "inline/_default_yaml": "tag: [third_tag, 'fourth_tag']\n",
        "inline/inline.yaml": "include: _default_yaml\ntask: including_task\n",
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
    monkeypatch.setattr(task_files, "task_folder", lambda: tmp_path)
    return task_files.harness_tasks.__wrapped__()


def test_names_are_found_however_they_are_written(scanned: HarnessTasks) -> None:
    tags = {"first_tag", "second_tag", "third_tag", "fourth_tag"}
    tasks = {"plain_task", "quoted_task", "including_task", "unsafe_task", "importing_task"}
    assert scanned.entries.keys() == tags | tasks | {"a_group"}


def test_code_is_seen_by_the_flag_or_by_what_the_folder_imports(scanned: HarnessTasks) -> None:
    assert scanned.runs_code == {"unsafe_task", "importing_task"}


def test_the_index_is_kept_in_the_cache_and_made_again_if_it_is_damaged(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    (tasks / "a.yaml").write_text("task: a\ntag: some\n")
    made = task_files.harness_tasks.__wrapped__()
    (kept,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as context:
        context.setattr(task_files, "_make_index", lambda _: pytest.fail("it was kept"))
        again = task_files.harness_tasks.__wrapped__()
    assert again.entries.keys() == made.entries.keys() == {"a", "some"}
    for damage in ("{", "[]", "{}"):
        kept.write_text(damage)
        assert task_files.harness_tasks.__wrapped__() == made


@pytest.mark.parametrize("name", ["gsm8k", "mmlu", "leaderboard_bbh", "ai2_arc", "hellaswag"])
def test_the_installed_harness_has(name: str) -> None:
    check_harness_name(name)


@pytest.mark.parametrize("name", ["humaneval", "humaneval_instruct", "mbpp", "mbpp_plus"])
def test_the_installed_harness_code_tasks_are_refused(name: str) -> None:
    with pytest.raises(RequestError) as raised:
        check_harness_name(name)
    assert raised.value.problem_id == "task-runs-code"


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"no task 'helaswag'.*Did you mean 'hellaswag'\?") as raised:
        check_harness_name("helaswag")
    assert raised.value.exit_code == 2
    with pytest.raises(RequestError, match=r"Did you mean 'small_python'\?"):  # of this book's own
        check_harness_name("smal_python")
