from __future__ import annotations

from pathlib import Path

from tunebook.record.page.overview import summarize
from tunebook.record.report import config_differences, number_rows, render_comparison, short_names
from tunebook.record.run_record import RunRecord, read_run
from tunebook.record.scores import compare_scores


def rows_of(records: list[RunRecord]) -> dict[str, list[str]]:
    return dict(number_rows(records, [summarize(record) for record in records]))


def test_runs_stand_side_by_side(make_run) -> None:
    records = [
        read_run(make_run("2026-11-21T07-18-05Z")),
        read_run(make_run("2026-11-21T07-18-06Z", rate=3e-5, ranks=8)),
        read_run(make_run("2026-11-21T07-18-07Z", state="failed", exit_code=1, reason="killed", num_steps=10)),
    ]
    assert short_names(records) == [record.folder.name for record in records]
    elsewhere = [RunRecord(folder=Path(folder)) for folder in ("o/a/t1", "o/b/t1")]
    assert short_names(elsewhere) == ["a/t1", "b/t1"]
    page = render_comparison(records)
    assert page.count('role="alert"') == 1
    assert f"<p>{records[2].folder.name}</p>" in page
    assert "<p>This run failed after step 10" in page
    numbers = rows_of(records)
    assert numbers["Steps"] == ["240", "240", "10"]
    assert numbers["Duration"] == ["1 min 42 s", "1 min 42 s", "1 min 42 s"]
    assert "Tokens per second and GPU or rank" in numbers
    assert numbers["MFU"] == ["\N{EN DASH}", "42.0 %", "\N{EN DASH}"]
    (line,) = compare_scores(records)
    assert (line.name, line.scores[0] and line.scores[0].text) == ("example", "97.3 % ± 1.3")
    assert config_differences(records) == [("optimizer.learning_rate", ["0.002", "3e-05", "0.002"])]


def test_missing_key_is_a_difference() -> None:
    records = [
        RunRecord(folder=Path("a"), config={"x": 1, "zero": {"stage": 2}}),
        RunRecord(folder=Path("b"), config={"x": 1}),
        RunRecord(folder=Path("c"), config={}),
    ]
    assert config_differences(records) == [("zero.stage", ["2", "not set", "\N{EN DASH}"])]
    assert "Without a run.yaml, so not compared: c." in render_comparison(records)
