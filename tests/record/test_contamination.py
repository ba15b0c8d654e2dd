from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Contamination, Source
from tunebook.config.schema import DatasetConfig, EvaluationConfig, RunConfig
from tunebook.errors import DataError
from tunebook.record.contamination import (
    is_warning,
    needs_check,
    refuse_contaminated,
    result_lines,
    score_lines,
)


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


def test_only_groups_with_items_that_were_found_have_a_line() -> None:
    assert result_lines({"a": group(), "b": group(20), "validation": group(total=50)}, None) == [
        "warning: contamination: b: of 1,000 items, 20 whole question found, 0 part found, 0 passage found, 980 clean"
    ]
    assert len(result_lines({"a": group()}, None)) == len(result_lines({}, "x.jsonl is gone")) == 1


def test_scores_of_an_evaluation_in_words() -> None:
    scores = {
        "clean": {"value": 0.712, "stderr": 0.009, "num_items": 2023},
        "exact": {"value": 1.0, "stderr": None, "num_items": 1},
    }
    tasks = {"boolq": {"scores": scores}, "other": {"scores": {}}}
    assert score_lines({"contamination": {"tasks": tasks}}) == [
        "boolq: 71.2 % ± 0.9 on 2,023 items (clean), 100.0 % on 1 item (whole question found)"
    ]
    assert score_lines({"contamination": None}) == score_lines({}) == score_lines(None) == []


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


def refusing(config: RunConfig) -> RunConfig:
    return replace(config, evaluation=replace(config.evaluation, contamination=Contamination.refuse))


@pytest.mark.parametrize(
    ("counts", "is_refused"),
    [(group(1), True), (group(0, 10), True), (group(0, 9), False), (group(0, 0, 400), False)],
)
def test_a_whole_item_or_one_of_a_hundred_in_part_is_refused(
    counts: dict[str, Any], is_refused: bool, tmp_path: Path, run_config: RunConfig
) -> None:
    (tmp_path / "contamination.json").write_text(json.dumps({"not_checked": None, "groups": {"boolq": counts}}))
    refuse_contaminated(tmp_path, run_config)
    if not is_refused:
        refuse_contaminated(tmp_path, refusing(run_config))
        return
    with pytest.raises(DataError) as error:
        refuse_contaminated(tmp_path, refusing(run_config))
    assert (error.value.exit_code, error.value.problem_id) == (4, "contaminated")


def test_a_check_that_left_nothing_is_refused(tmp_path: Path, run_config: RunConfig) -> None:
    with pytest.raises(DataError) as error:
        refuse_contaminated(tmp_path, refusing(run_config))
    assert error.value.problem_id == "contamination-not-checked"
