from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tunebook.record.page.details import (
    batch_facts,
    choices,
    data_counts,
    data_sources,
    draw_histogram,
    flatten,
    memory_bars,
    start_bars,
)
from tunebook.record.page.overview import summarize
from tunebook.record.report import write_report
from tunebook.record.run_record import RunRecord, read_run

TIMES = "\N{MULTIPLICATION SIGN}"
START_UP = {
    "launched": "2026-11-21T07:18:07.000+00:00",
    "launcher": {"start_python": 1.0, "plan": 3.0},
    "rank": {"launch": 4.0, "model": 8.0, "a_later_phase": 0.0, "first_step": 4.0},
    "first_step_s": 20.0,
}


def planned(plan: dict[str, Any] | None) -> RunRecord:
    return RunRecord(folder=Path("a/b"), plan=plan)


def test_batch_facts_explain_the_number_of_rows() -> None:
    batch = {
        "global_samples": 528, "micro": 1, "accumulation": 3, "world_size": 8, "rows_per_step": 24, "is_packed": True,
        "row_length": 4096, "documents_per_step": 528.0, "tokens_per_step": 98_000.0, "total_steps": 1200,
    }  # fmt: skip
    hopper = {"hardware": {"generation": "hopper"}}
    facts = batch_facts(planned(hopper | {"batch": batch}))
    assert facts == [
        ("528", "documents per step", "528 asked for, several to a row"),
        ("24", "rows per step", f"8 GPUs {TIMES} 3 passes {TIMES} 1 row in a pass"),
        ("98,000", "tokens per step", "rows hold up to 4,096"),
        ("1,200", "steps in all", ""),
    ]
    shared = batch | {"sequence_group_size": 8, "accumulation": 24}
    assert batch_facts(planned(hopper | {"batch": shared}))[1][2] == (
        f"1 group {TIMES} 24 passes {TIMES} 1 row in a pass; a group of 8 GPUs shares each row"
    )
    assert batch_facts(planned(None)) == batch_facts(planned({"recipe": "x"})) == []


def test_an_estimate_is_called_one() -> None:
    assert batch_facts(planned({"batch": {"tokens_per_step": 100.0, "is_estimate": True}})) == [
        ("100", "tokens per step", "estimated before the data was prepared")
    ]


def test_data_counts_name_what_was_dropped_and_why() -> None:
    counts = {"train": {"num_documents": 10, "num_cut": 3, "num_dropped": 2, "dropped": {"empty": 2, "too long": 0}}}
    (part,) = data_counts({"dataset": {"counts": counts}})
    assert part.counts == [
        ("documents", "10"), ("documents cut to the maximum length", "3"),
        ("documents dropped", "2"), ("dropped: empty", "2"),
    ]  # fmt: skip
    assert data_counts(None) == data_counts({"dataset": None}) == []
    assert data_sources({"dataset": {"records": [{"location": "a/b", "revision": "v1", "num_documents": 7}]}}) == [
        "a/b, revision v1, 7 documents"
    ]


def test_memory_is_drawn_against_the_gpus_size_and_the_plan() -> None:
    record = RunRecord(
        folder=Path("a/b"),
        plan={"hardware": {"generation": "hopper", "memory_gib": 80.0}, "memory_gib": {"total": 60.0}},
        training=[{"step": 1, "memory_gib": [20.0, 40.0]}],
    )
    bars, note = memory_bars(record, summarize(record))
    assert [(bar.name, bar.share) for bar in bars] == [("rank 0", 0.25), ("rank 1", 0.5), ("planned", 0.75)]
    assert note == "The full width is one GPU's 80 GiB."


def test_many_ranks_are_summed_up(make_run) -> None:
    record = read_run(make_run(ranks=64))
    bars, _ = memory_bars(record, summarize(record))
    assert [bar.name for bar in bars] == ["lowest rank", "middle", "highest rank"]


def test_host_memory_is_not_labelled_as_gpu_memory() -> None:
    plan = {"hardware": {"generation": "cpu", "memory_gib": 24.0}}
    record = RunRecord(folder=Path("a/b"), plan=plan, training=[{"step": 1, "memory_gib": [6.0]}])
    bars, note = memory_bars(record, summarize(record))
    assert [bar.share for bar in bars] == [0.25]
    assert note == "The full width is one rank's share of this machine's 24 GiB."


def test_choices_keep_their_reasons() -> None:
    assert choices({"choices": [{"key": "a", "value": 2, "why": "because"}]}) == [("a", "2", "because")]
    assert choices({"choices": [{"key": "a", "value": True, "why": "b"}]}) == [("a", "true", "b")]
    assert choices(None) == []


def test_flattening_shows_every_value() -> None:
    nested = {"a": {"b": 1, "c": [1, 2]}, "gpus": [{"name": "x"}, {"name": "y"}], "none": None, "empty": {}, "no": []}
    assert flatten(nested) == [
        ("a.b", "1"), ("a.c", "1 2"), ("gpus[0].name", "x"), ("gpus[1].name", "y"), ("none", "\N{EN DASH}"),
        ("empty", "\N{EN DASH}"), ("no", "\N{EN DASH}"),
    ]  # fmt: skip


def test_bars_are_as_tall_as_their_counts() -> None:
    svg = ElementTree.fromstring(draw_histogram([0, 10, 20, 30], [50, 100, 0]))
    heights = [float(bar.get("height")) for bar in svg.iter("rect")]
    assert heights == [47, 94, 0]
    assert [title.text for title in svg.iter("title")][1] == "10 to 20 tokens: 100 documents"
    assert [text.text for text in svg.iter("text")] == ["100", "0", "10", "20", "30", "tokens of a document"]


def test_nothing_but_empty_bars_is_drawn_flat() -> None:
    svg = ElementTree.fromstring(draw_histogram([0, 10, 20], [0, 0]))
    assert {float(bar.get("height")) for bar in svg.iter("rect")} == {0}


def test_many_bars_have_few_labels() -> None:
    svg = ElementTree.fromstring(draw_histogram(list(range(0, 4100, 100)), [1] * 40))
    assert len(list(svg.iter("text"))) <= 9


def test_phases_stand_one_after_the_other() -> None:
    bars, note = start_bars({"start_up": START_UP, "model": {"weights": "random"}})
    assert [(bar.kind, bar.begins, bar.share) for bar in bars] == [
        ("launcher", 0.0, 0.05), ("launcher", 0.05, 0.15), ("rank", 0.2, 0.2), ("rank", 0.4, 0.4),
        ("rank", 0.8, 0.0), ("rank", 0.8, 0.2),
    ]  # fmt: skip
    assert [bar.text for bar in bars] == ["1.0 s", "3.0 s", "4.0 s", "8.0 s", "0.0 s", "4.0 s"]
    assert bars[3].name == "model built, random weights drawn"
    assert bars[4].name == "a later phase"
    assert start_bars({"start_up": START_UP, "model": {"weights": "pretrained"}})[0][3].name == "model built"
    assert start_bars({"start_up": START_UP})[0][3].name == "model built"
    assert note == "20 s from the command to the end of the first optimizer step."


@pytest.mark.parametrize(
    "manifest", [None, {}, {"start_up": None}, {"start_up": START_UP | {"rank": {}, "first_step_s": None}}]
)
def test_nothing_is_drawn_before_the_first_step(manifest) -> None:
    assert start_bars(manifest) == ([], "")


def test_the_page_has_them(make_run, tmp_path: Path) -> None:
    folder = make_run()
    file = folder / "manifest.json"
    write_report([folder], tmp_path / "before.html")
    assert "The start" not in (tmp_path / "before.html").read_text()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"start_up": START_UP}))
    write_report([folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "The start" in page
    assert 'x="40.00%" width="40.00%"' in page
    assert "20 s from the command" in page
