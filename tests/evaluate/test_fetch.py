"""What is fetched and loaded before a training: tasks with their data, and the parts of a recipe."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.errors import RequestError
from tunebook.evaluate import fetch
from tunebook.evaluate.fetch import fetch_command, require_tasks

QUICKSTART = "book:recipes/quickstart/tasks/quickstart.yaml"
TASK = """
task: {name}
dataset_path: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["cat", "dog"]
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., str]:
    """`task("zoo/open")`: a task file of that data set; with `more` keys."""

    def make(data: str, more: str = "") -> str:
        name = data.replace("/", "-")
        file = tmp_path / f"{name}.yaml"
        file.write_text(TASK.format(name=name, data=data) + more)
        return str(file)

    return make


def test_tasks_that_cannot_be_loaded_are_refused_together(
    task: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "utils.py").write_text("import not_here\nprint('imported')\ndef score(*_): return {}\n")
    rows, cache = tmp_path / "rows.jsonl", tmp_path / "datasets"
    rows.write_text(json.dumps({"question": "it barks", "right": 1}) + "\n")
    local = f"dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {cache}}}\n"
    good, incomplete = task("json", local), task("zoo/incomplete", "process_results: !function utils.score\n")
    missing = task("zoo/missing")
    require_tasks([QUICKSTART])
    with pytest.raises(RequestError) as raised:
        require_tasks([good, incomplete, missing, "humaneval"])
    assert raised.value.problem_id == "task-data-missing"
    package, data, code = raised.value.message.splitlines()
    assert "not_here" in package
    assert f"tunebook fetch tasks={missing}" in data
    assert "tunebook fetch tasks=humaneval" in code


def test_a_recipe_is_its_model_its_data_and_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[str | None] = []
    data: list[str] = []
    tasks: list[str] = []
    monkeypatch.setattr("tunebook.model.hub.fetch_config", lambda model: models.append(model.name))
    monkeypatch.setattr("tunebook.model.hub.fetch_weights", lambda model: models.append(model.name))
    monkeypatch.setattr("tunebook.model.tokenizer_files.tokenizer_folder", lambda model: models.append(model.name))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: data.append(name))
    monkeypatch.setattr(fetch, "require_tasks", tasks.extend)
    console = Console(file=io.StringIO(), width=200)
    overrides = ["model=hub", "model.name=some/model", "dataset=hub", "dataset.name=some/data"]
    fetch_command("quickstart", [*overrides, "evaluation=leaderboard"], [], console, suite=None, tasks=None)
    assert (models, data) == (["some/model"] * 3, ["some/data"])
    assert "leaderboard_ifeval" in tasks
    assert "everything is here" in console.file.getvalue()  # type: ignore[attr-defined]
    tasks.clear()
    fetch_command(None, [], [], console, suite=None, tasks=["gsm8k"])
    assert (len(models), tasks) == (3, ["gsm8k"])


@pytest.mark.parametrize(
    ("asked", "problem_id"),
    [
        ({"suite": None, "tasks": None}, "nothing-to-fetch"),
        ({"suite": "leaderbord", "tasks": None}, "unknown-suite"),
    ],
)
def test_what_cannot_be_fetched_is_refused(asked: dict[str, Any], problem_id: str) -> None:
    with pytest.raises(RequestError) as raised:
        fetch_command(None, [], [], Console(file=io.StringIO()), **asked)
    assert raised.value.problem_id == problem_id
