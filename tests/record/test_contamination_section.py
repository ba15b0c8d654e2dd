from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunebook.record.report import render_run
from tunebook.record.run_record import read_run

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


def test_counts_scores_and_examples(make_run: Callable[..., Path]) -> None:
    page = render_run(read_run(checked(make_run())))
    for label, count in (("whole question", "0"), ("a part", "5 (10.0%)"), ("clean", "45 (90.0%)")):
        assert page.count(f'data-label="{label}">{count}</td>') == 2
    assert "example, item 4: part found in train.jsonl:17</p>" in page
    assert page.count("example: 50.0 % ± 7.0 on 45 items (clean), 80.0 % ± 20.0 on 5 items (part found)") == 2
    assert "is it &lt;b&gt;a mill&lt;/b&gt;" in page
    assert page.count(">contaminated</span>") == 2


def test_a_run_that_was_not_checked_has_no_section_or_says_why(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert '<section id="contamination">' not in render_run(read_run(run))
    page = render_run(read_run(checked(run, not_checked="train.jsonl is gone", groups={})))
    assert "Not checked: train.jsonl is gone" in page


def test_faults_are_on_the_page(make_run: Callable[..., Path]) -> None:
    run = make_run()
    for when, endless in (("before", 1), ("after", 40)):
        file = run / "evaluation" / f"{when}.json"
        record = json.loads(file.read_text())
        counts = {"num_answers": 50, "empty": 0, "looping": 0, "endless": endless}
        record["answer_faults"] = {"example": {**counts, "examples": {"endless": {"item": 1, "end": "<i>so on"}}}}
        file.write_text(json.dumps(record))
    page = render_run(read_run(run))
    assert "80.0% (40 of 50)" in page
    assert "more than before" in page
    assert "&lt;i&gt;so on" in page
