from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Contamination
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError
from tunebook.evaluate.contamination.refuse import refuse_contaminated
from tunebook.evaluate.contamination.result import write_result


def result(exact: int, overlapping: int, passages: int = 0) -> dict[str, Any]:
    example = {"item": 4, "kind": "exact", "share": 1.0, "text": "is it", "document": "train.jsonl:17"}
    group = {
        "num_items": 1000, "num_exact": exact, "num_overlapping": overlapping, "num_shared_passage": passages,
        "num_clean": 1000 - exact - overlapping - passages, "num_half": overlapping, "examples": [example],
    }  # fmt: skip
    return {"not_checked": None, "groups": {"boolq": group}}


def config(choice: Contamination, cpu_config: RunConfig) -> RunConfig:
    cpu_config.evaluation.contamination = choice
    return cpu_config


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
    found: dict[str, Any], is_refused: bool, tmp_path: Path, fresh_config: RunConfig
) -> None:
    write_result(tmp_path, found)
    refuse_contaminated(tmp_path, config(Contamination.report, fresh_config))
    asked = config(Contamination.refuse, fresh_config)
    if not is_refused:
        refuse_contaminated(tmp_path, asked)
        return
    with pytest.raises(DataError, match=r"boolq: \d+ of 1,000 items") as error:
        refuse_contaminated(tmp_path, asked)
    assert (error.value.exit_code, error.value.problem_id) == (4, "contaminated")
    assert "train.jsonl:17 has item 4" in error.value.message
    assert "evaluation.contamination=report" in error.value.message


def test_a_check_that_left_nothing_is_refused(tmp_path: Path, fresh_config: RunConfig) -> None:
    with pytest.raises(DataError, match="the check failed, and its message is above"):
        refuse_contaminated(tmp_path, config(Contamination.refuse, fresh_config))


@pytest.fixture
def fresh_config(cpu_config: RunConfig) -> RunConfig:
    from dataclasses import replace

    return replace(cpu_config, evaluation=replace(cpu_config.evaluation))
