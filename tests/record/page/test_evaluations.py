from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunebook.record.page.evaluations import compare_scores, failed_tasks, later_evaluations
from tunebook.record.run_record import RunRecord

MINUS = "\N{MINUS SIGN}"


def evaluation(when: str, values: dict[str, list[float]], folder: Path | None = None, **more: Any) -> dict[str, Any]:
    """The record of an evaluation with each item's value, and its answers in the folder."""
    tasks = {
        name: {
            "metric": "exact_match", "value": sum(items) / len(items), "stderr": 0.1, "num_items": len(items),
            "groups": {}, "items_sha256": f"{len(items)} items",
        }
        for name, items in values.items()
    }  # fmt: skip
    if folder is not None:
        (folder / "evaluation").mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"task": name, "group": None, "item": number, "value": value})
            for name, items in values.items()
            for number, value in enumerate(items)
        ]
        (folder / "evaluation" / f"{when}-answers.jsonl").write_text("\n".join(lines))
    return {"when": when, "model": "model", "limit": None, "tasks": tasks, "failed": {}} | more


def test_runs_stand_side_by_side_with_paired_differences_to_the_first(tmp_path: Path) -> None:
    runs = [
        RunRecord(folder=tmp_path / name, after=evaluation("after", {"words": values}, tmp_path / name))
        for name, values in (("a", [0, 0, 1, 1]), ("b", [0, 1, 1, 1]), ("c", [0, 0, 1]))
    ]
    (line,) = compare_scores(runs)
    assert (line.task, line.metric, line.num_items) == ("words", "exact match", "4 / 4 / 3")
    assert [cell.text for cell in line.cells] == ["50.0 % ± 10.0", "75.0 % ± 10.0", "33.3 % ± 10.0"]
    # b: one of four items differs; c answered other items: both errors of 10 together
    assert [cell.change for cell in line.cells] == ["", "+25.0 ± 25.0 points", f"{MINUS}16.7 ± 14.1 points"]


def test_a_task_that_a_run_was_not_evaluated_on_is_a_dash(tmp_path: Path) -> None:
    runs = [
        RunRecord(folder=tmp_path / "a", after=evaluation("after", {"words": [0, 1]})),
        RunRecord(folder=tmp_path / "b", after=evaluation("after", {"numbers": [1, 1]})),
        RunRecord(folder=tmp_path / "c"),
    ]
    words, numbers = compare_scores(runs)
    assert [cell.text for cell in words.cells] == ["50.0 % ± 10.0", "\N{EN DASH}", "\N{EN DASH}"]
    assert [cell.change for cell in numbers.cells] == ["", "", ""]
    assert words.num_items == "2"
    assert compare_scores([RunRecord(folder=tmp_path / "c")]) == []


def test_what_was_evaluated_later_counts_where_the_training_did_not_evaluate_it(tmp_path: Path) -> None:
    later = [
        evaluation("eval-1", {"words": [0, 0], "numbers": [0, 0]}),
        evaluation("eval-2", {"numbers": [1, 1]}),
        evaluation("eval-3", {"numbers": [0, 1]}, model="checkpoints/checkpoint-20"),  # another model
    ]
    run = RunRecord(folder=tmp_path, after=evaluation("after", {"words": [1, 1]}), evaluations=later)
    assert {line.task: line.cells[0].text for line in compare_scores([run])} == {
        "words": "100.0 % ± 10.0",
        "numbers": "100.0 % ± 10.0",
    }


def test_later_evaluations_are_listed_the_newest_first(tmp_path: Path) -> None:
    records = [evaluation("eval-1", {"words": [0, 1]}), evaluation("eval-2", {"words": [1, 1]}, limit=2)]
    newest, oldest = later_evaluations(RunRecord(folder=tmp_path, evaluations=records))
    assert (newest.name, newest.model, newest.limit) == ("eval-2", "model", "the first 2 items")
    assert newest.lines == [("words", "exact match", "100.0 % ± 10.0", "2")]
    assert (oldest.name, oldest.limit) == ("eval-1", "")


def test_failed_tasks_are_named_with_why(tmp_path: Path) -> None:
    after = evaluation("after", {"words": [1, 1]}, failed={"numbers": "ValueError: no score"})
    assert failed_tasks(RunRecord(folder=tmp_path, after=after)) == ["numbers, after training: ValueError: no score"]
    assert failed_tasks(RunRecord(folder=tmp_path)) == []
