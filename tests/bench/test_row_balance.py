"""The recorded spread of attention over ranks can be measured again, and dealing the rows evens it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
from row_balance import excesses, measure, parse

RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "results" / "row_balance.jsonl").read_text().splitlines()
]


def test_excess_of_two_ranks_worked_out_by_hand() -> None:
    rows, lengths = [[0], [1], [2], []], np.array([3, 1, 2])  # work 9 and 1, then 4 and 0: 13 and 1 of 14
    assert excesses(rows, lengths, 2) == pytest.approx((13 / 7 - 1, 13 / 7 - 1))


@pytest.mark.parametrize("line", RECORDED, ids=lambda line: f"{line['ranks']}x{line['rows_per_step']}")
def test_dealing_evens_the_steps(line: dict) -> None:
    assert line["dealt"]["step_excess"] < line["in_order"]["step_excess"]
    assert line["dealt"]["round_excess"] == pytest.approx(line["in_order"]["round_excess"], abs=2e-3)


def test_a_recorded_line_is_measured_again() -> None:
    line = RECORDED[0]
    again = measure(line["ranks"], 2, line["steps"], line["seed"])
    changing = ("date", "deal_ms_per_step")
    assert {key: again[key] for key in again if key not in changing} == {
        key: line[key] for key in line if key not in changing
    }
    assert parse(["--output", "x"]).ranks == [2, 8]
