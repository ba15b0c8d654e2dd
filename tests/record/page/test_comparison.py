from __future__ import annotations

from pathlib import Path

from tunebook.record.page.comparison import compare, config_differences, short_names
from tunebook.record.page.scores import compare_scores
from tunebook.record.run_record import RunRecord, read_run


def test_runs_stand_side_by_side(make_run) -> None:
    records = [
        read_run(make_run("2026-11-21T07-18-05Z")),
        read_run(make_run("2026-11-21T07-18-06Z", rate=3e-5, ranks=8)),
        read_run(make_run("2026-11-21T07-18-07Z", state="failed", exit_code=1, reason="killed", num_steps=10)),
    ]
    comparison = compare(records, short_names(records))
    assert [run.name for run in comparison.runs] == [record.folder.name for record in records]
    assert [bool(run.warning) for run in comparison.runs] == [False, False, True]
    numbers = dict(comparison.numbers)
    assert numbers["Steps"] == ["240", "240", "10"]
    assert numbers["Duration"] == ["1 min 42 s", "1 min 42 s", "1 min 42 s"]
    assert "Tokens per second and GPU or rank" in numbers
    assert numbers["MFU"] == ["\N{EN DASH}", "42.0 %", "\N{EN DASH}"]
    (line,) = compare_scores(records)
    assert (line.task, line.cells[0].text) == ("example", "97.3 % ± 1.3")
    assert comparison.differences == [("optimizer.learning_rate", ["0.002", "3e-05", "0.002"])]


def test_rows_that_no_run_recorded_are_left_out(make_run) -> None:
    records = [read_run(make_run(f"2026-11-21T07-18-0{second}Z")) for second in (1, 2)]
    numbers = dict(compare(records, ["a", "b"]).numbers)
    assert "MFU" not in numbers
    assert "Tokens per second and rank" in numbers


def test_the_duration_is_that_of_all_attempts(make_run) -> None:
    records = [read_run(make_run(f"2026-11-21T07-18-0{second}Z")) for second in (1, 2)]
    assert records[1].manifest is not None
    records[1].manifest["earlier_attempts"] = [{"state": "stopped", "seconds": 8.0}]
    assert dict(compare(records, ["a", "b"]).numbers)["Duration"] == ["1 min 42 s", "1 min 50 s, 2 attempts"]


def test_missing_key_is_a_difference() -> None:
    records = [
        RunRecord(folder=Path("a"), config={"x": 1, "zero": {"stage": 2}}),
        RunRecord(folder=Path("b"), config={"x": 1}),
        RunRecord(folder=Path("c"), config=None),
    ]
    assert config_differences(records) == [("zero.stage", ["2", "not set", "\N{EN DASH}"])]
    assert compare(records, ["a", "b", "c"]).not_compared == ["c"]


def test_short_names_are_unique() -> None:
    def name_all(*folders: str) -> list[str]:
        return short_names([RunRecord(folder=Path(folder)) for folder in folders])

    assert name_all("o/a/t1", "o/a/t2") == ["t1", "t2"]
    assert name_all("o/a/t1", "o/b/t1") == ["a/t1", "b/t1"]
    assert name_all("o/a/t1", "p/a/t1") == ["o/a/t1", "p/a/t1"]
