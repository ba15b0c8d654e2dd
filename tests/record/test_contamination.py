from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Contamination, Source
from tunebook.config.schema import DatasetConfig, EvaluationConfig, RunConfig
from tunebook.errors import DataError
from tunebook.evaluate.contamination.result import write_result
from tunebook.record.contamination import (
    describe_group,
    is_warning,
    needs_check,
    read_contamination,
    refuse_contaminated,
    result_lines,
    score_lines,
)


def group(exact: int = 0, overlapping: int = 0, passages: int = 0, total: int = 1000) -> dict[str, Any]:
    return {
        "num_items": total, "num_exact": exact, "num_overlapping": overlapping, "num_shared_passage": passages,
        "num_clean": total - exact - overlapping - passages, "num_half": overlapping // 2,
    }  # fmt: skip


def test_a_line_has_the_counts_that_are_not_zero() -> None:
    assert describe_group("boolq", group(6, 0, 380)) == (
        "boolq: 6 of 1,000 items (0.6%) have their whole question in the training documents, 380 (38.0%) only a passage"
    )
    assert describe_group("boolq", group(0, 12)) == (
        "boolq: 0 of 1,000 items have their whole question in the training documents, 12 (1.2%) a part of it (6 at "
        "least half)"
    )


@pytest.mark.parametrize(
    ("counts", "expected"),
    [(group(10), True), (group(4, 6), True), (group(9), False), (group(0, 0, 900), False), (group(1, total=50), True)],
)
def test_the_warning_begins_at_one_in_a_hundred(counts: dict[str, Any], expected: bool) -> None:
    assert is_warning(counts) is expected


def test_clean_groups_share_a_line() -> None:
    found = {"a": group(), "b": group(20), "validation": group(total=50)}
    assert result_lines(found, None) == [
        ("b: 20 of 1,000 items (2.0%) have their whole question in the training documents", True),
        ("2 tasks or parts: none of 1,050 items is in the training documents", False),
    ]
    assert result_lines({"a": group()}, None) == [
        ("a: none of 1,000 items is in the training documents", False),
    ]
    assert result_lines({}, "x.jsonl is gone") == [("not checked: x.jsonl is gone", True)]


def test_scores_of_an_evaluation_in_words() -> None:
    scores = {
        "clean": {"value": 0.712, "stderr": 0.009, "num_items": 2023},
        "exact": {"value": 1.0, "stderr": None, "num_items": 1},
    }
    tasks = {"boolq": {"scores": scores}, "other": {"scores": {}}}
    assert score_lines({"contamination": {"tasks": tasks}}) == [
        "boolq: 71.2% ± 0.9 on 2,023 items (clean), 100.0% on 1 item (whole question found)"
    ]
    assert score_lines({"contamination": None}) == score_lines({}) == score_lines(None) == []


def test_a_file_that_was_changed_is_named(tmp_path: Path) -> None:
    assert read_contamination(tmp_path) is None
    file = tmp_path / "contamination.json"
    file.write_text(json.dumps({"groups": {"a": group(3)}}))
    found = read_contamination(tmp_path)
    assert found is not None
    for broken in ("[]", '{"groups": []}', '{"groups": {"a": {"num_items": 3}}}'):
        file.write_text(broken)
        with pytest.raises(DataError, match=r"contamination\.json: it is not as Tunebook writes it"):
            read_contamination(tmp_path)


def test_what_needs_no_check(run_config: RunConfig) -> None:
    asked = replace(run_config, evaluation=EvaluationConfig(tasks=["boolq"]))
    assert needs_check(asked)
    assert not needs_check(replace(asked, evaluation=EvaluationConfig(tasks=[])))
    assert not needs_check(replace(asked, evaluation=EvaluationConfig(tasks=["boolq"], after=False)))
    off = EvaluationConfig(tasks=["boolq"], contamination=Contamination.disabled)
    assert not needs_check(replace(asked, evaluation=off))
    assert not needs_check(replace(asked, dataset=DatasetConfig(source=Source.synthetic)))
    held = DatasetConfig(path="x.jsonl", validation_share=0.1)
    assert needs_check(replace(asked, dataset=held, evaluation=EvaluationConfig(tasks=[])))


def result(exact: int, overlapping: int, passages: int = 0) -> dict[str, Any]:
    example = {"item": 4, "kind": "exact", "share": 1.0, "text": "is it", "document": "train.jsonl:17"}
    group = {
        "num_items": 1000, "num_exact": exact, "num_overlapping": overlapping, "num_shared_passage": passages,
        "num_clean": 1000 - exact - overlapping - passages, "num_half": overlapping, "examples": [example],
    }  # fmt: skip
    return {"not_checked": None, "groups": {"boolq": group}}


def config(choice: Contamination, run_config: RunConfig) -> RunConfig:
    return replace(run_config, evaluation=replace(run_config.evaluation, contamination=choice))


@pytest.mark.parametrize(
    ("found", "is_refused"),
    [
        (result(1, 0), True),
        (result(0, 10), True),
        (result(0, 9), False),
        (result(0, 0, 400), False),
        (result(0, 0), False),
    ],
)
def test_a_whole_item_or_one_of_a_hundred_in_part_is_refused(
    found: dict[str, Any], is_refused: bool, tmp_path: Path, run_config: RunConfig
) -> None:
    write_result(tmp_path, found)
    refuse_contaminated(tmp_path, config(Contamination.report, run_config))
    asked = config(Contamination.refuse, run_config)
    if not is_refused:
        refuse_contaminated(tmp_path, asked)
        return
    with pytest.raises(DataError, match=r"boolq: \d+ of 1,000 items") as error:
        refuse_contaminated(tmp_path, asked)
    assert (error.value.exit_code, error.value.problem_id) == (4, "contaminated")
    assert "train.jsonl:17 has item 4" in error.value.message
    assert "evaluation.contamination=report" in error.value.message


def test_a_check_that_left_nothing_is_refused(tmp_path: Path, run_config: RunConfig) -> None:
    with pytest.raises(DataError, match="the check failed, and its message is above"):
        refuse_contaminated(tmp_path, config(Contamination.refuse, run_config))
