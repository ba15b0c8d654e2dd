from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Contamination, Source
from tunebook.config.schema import DatasetConfig, EvaluationConfig, RunConfig
from tunebook.record.contamination import is_warning, needs_check
from tunebook.record.report import render_run
from tunebook.record.run_record import read_run

from .conftest import MakeRun


def group(exact: int = 0, overlapping: int = 0, passages: int = 0, total: int = 1000) -> dict[str, Any]:
    return {
        "num_items": total, "num_exact": exact, "num_overlapping": overlapping, "num_shared_passage": passages,
        "num_clean": total - exact - overlapping - passages,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "expected"),
    [(group(10), True), (group(4, 6), True), (group(9), False), (group(0, 0, 900), False), (group(1, total=50), True)],
)
def test_the_warning_begins_at_one_in_a_hundred(counts: dict[str, Any], expected: bool) -> None:
    assert is_warning(counts) is expected


def test_what_needs_no_check(run_config: RunConfig) -> None:
    evaluated = replace(run_config, evaluation=EvaluationConfig(tasks=["boolq"]))
    assert needs_check(evaluated)
    assert not needs_check(replace(evaluated, evaluation=EvaluationConfig(tasks=[])))
    assert not needs_check(replace(evaluated, evaluation=EvaluationConfig(tasks=["boolq"], after=False)))
    off = EvaluationConfig(tasks=["boolq"], contamination=Contamination.disabled)
    assert not needs_check(replace(evaluated, evaluation=off))
    assert not needs_check(replace(evaluated, dataset=DatasetConfig(source=Source.synthetic)))
    held = DatasetConfig(path="x.jsonl", validation_share=0.1)
    assert needs_check(replace(evaluated, dataset=held, evaluation=EvaluationConfig(tasks=[])))


# --- on the page


EXAMPLE = {"item": 4, "kind": "overlapping", "text": "is it <b>a mill</b>", "document": "train.jsonl:17"}
GROUP = {
    "num_items": 50, "num_exact": 0, "num_overlapping": 5, "num_shared_passage": 0, "num_clean": 45,
    "examples": [EXAMPLE],
}  # fmt: skip
SCORES = {
    "clean": {"value": 0.5, "stderr": 0.07, "num_items": 45},
    "overlapping": {"value": 0.8, "stderr": None, "num_items": 5},
}


def checked(run: Path, **changes: Any) -> Path:
    groups = {"example": GROUP, "validation": {**GROUP, "examples": []}}
    content = {"not_checked": None, "num_documents": 5120, "groups": groups}
    (run / "contamination.json").write_text(json.dumps(content | changes))
    file = run / "evaluation" / "after.json"
    record = json.loads(file.read_text())
    record["contamination"] = {"not_checked": None, "tasks": {"example": {**GROUP, "scores": SCORES}}}
    file.write_text(json.dumps(record))
    (run / "evaluation" / "eval-1.json").write_text(json.dumps(record | {"when": "eval-1"}))
    return run


def test_counts_scores_and_examples(make_run: MakeRun) -> None:
    run = make_run()
    assert '<section id="contamination">' not in render_run(read_run(run))
    page = render_run(read_run(checked(run)))
    for label, count in (("whole question", "0"), ("a part", "5 (10.0%)"), ("clean", "45 (90.0%)")):
        assert page.count(f'data-label="{label}">{count}</td>') == 2
    assert "example, item 4: part found in train.jsonl:17</p>" in page
    assert page.count("example: 50.0 % ± 7.0 on 45 items (clean), 80.0 % ± 20.0 on 5 items (part found)") == 2
    assert "is it &lt;b&gt;a mill&lt;/b&gt;" in page
    assert page.count(">contaminated</span>") == 2
    assert "train.jsonl is gone" in render_run(read_run(checked(run, not_checked="train.jsonl is gone", groups={})))
