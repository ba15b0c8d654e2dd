"""What is fetched and loaded before a training: tasks with their data, and the parts of a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.evaluate.conftest import QUICKSTART
from tunebook.errors import RequestError
from tunebook.evaluate import fetch
from tunebook.evaluate.fetch import fetch_command, require_tasks

TASK = {
    "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
    "doc_to_choice": ["cat", "dog"], "doc_to_target": "{{right}}", "metric_list": [{"metric": "acc"}],
}  # fmt: skip


def test_tasks_that_cannot_be_loaded_are_refused_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def task(name: str, data: str, **more: object) -> str:
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps({"task": name, "dataset_path": data, **TASK, **more}))
        return str(file)

    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "it barks", "right": 1}) + "\n")
    data = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "datasets")}
    (tmp_path / "incomplete.yaml").write_text("task: incomplete\nprocess_results: !function utils.score\n")
    (tmp_path / "utils.py").write_text("import not_here\nprint('imported')\n")
    missing = task("missing", "zoo/missing")
    require_tasks([QUICKSTART])
    with pytest.raises(RequestError) as raised:
        require_tasks(
            [task("good", "json", dataset_kwargs=data), str(tmp_path / "incomplete.yaml"), missing, "humaneval"]
        )
    assert raised.value.problem_id == "task-data-missing"
    package, data_set, code = raised.value.message.splitlines()
    assert "not_here" in package
    assert f"tunebook fetch tasks={missing}" in data_set
    assert "tunebook fetch tasks=humaneval" in code


def test_a_recipe_is_its_model_its_data_and_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str | None] = []
    for function in ("hub.fetch_config", "hub.fetch_weights", "tokenizer_files.tokenizer_folder"):
        monkeypatch.setattr(f"tunebook.model.{function}", lambda model: fetched.append(model.name))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: fetched.append(name))
    monkeypatch.setattr(fetch, "require_tasks", lambda tasks, **_: fetched.extend(tasks))
    overrides = ["model=some/model", "dataset=hub", "dataset.name=some/data"]
    fetch_command("quickstart", [*overrides, "evaluation=leaderboard"], [], Console(quiet=True), suite=None, tasks=None)
    assert fetched[:4] == ["some/model"] * 3 + ["some/data"]
    assert "leaderboard_ifeval" in fetched
    fetched.clear()
    fetch_command(None, [], [], Console(quiet=True), suite=None, tasks=["gsm8k"])
    assert fetched == ["gsm8k"]


@pytest.mark.parametrize(
    ("requested", "problem_id"),
    [
        ({"suite": None, "tasks": None}, "nothing-to-fetch"),
        ({"suite": "leaderbord", "tasks": None}, "unknown-choice"),
    ],
)
def test_what_cannot_be_fetched_is_refused(requested: dict[str, Any], problem_id: str) -> None:
    with pytest.raises(RequestError) as raised:
        fetch_command(None, [], [], Console(quiet=True), **requested)
    assert raised.value.problem_id == problem_id
