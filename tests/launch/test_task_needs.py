"""A training whose evaluation lacks data is refused before it starts."""

from __future__ import annotations

import pytest

from tunebook.errors import RequestError
from tunebook.evaluate import preflight
from tunebook.evaluate.preflight import Missing
from tunebook.launch.job import plan_job, require_runnable


def test_missing_task_data_is_named_before_anything_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        preflight, "find_missing", lambda tasks: [Missing(task=task, lacks="its data is not here") for task in tasks]
    )
    job = plan_job("quickstart", ["hardware=cpu", "evaluation=tasks", "evaluation.tasks=[gsm8k,arc_easy]"], [])
    with pytest.raises(RequestError, match="2 tasks cannot be evaluated") as raised:
        require_runnable(job)
    assert raised.value.problem_id == "task-data-missing"
    assert "with a network, type: tunebook fetch tasks=gsm8k,arc_easy" in raised.value.message


def test_a_training_with_tasks_of_its_own_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(preflight, "_missing_of", lambda task, leaves, hub: [asked.append(leaf) for leaf in leaves])
    require_runnable(plan_job("quickstart", ["hardware=cpu"], []))
    assert asked == []
