from __future__ import annotations

from pathlib import Path

from tunebook.record.page.details import batch_facts, choices, data_counts, data_sources, flatten, memory_bars
from tunebook.record.page.summary import summarise
from tunebook.record.run_record import RunRecord, read_run

TIMES = "\N{MULTIPLICATION SIGN}"


def test_the_batch_says_how_its_rows_come_about() -> None:
    batch = {
        "global_samples": 528, "micro": 1, "accumulation": 3, "world_size": 8, "rows_per_step": 24, "is_packed": True,
        "row_length": 4096, "documents_per_step": 528.0, "tokens_per_step": 98_000.0, "total_steps": 1200,
    }  # fmt: skip
    facts = batch_facts({"hardware": {"generation": "hopper"}, "batch": batch})
    assert facts == [
        ("528", "documents per step", "528 asked for, several to a row"),
        ("24", "rows per step", f"8 GPUs {TIMES} 3 passes {TIMES} 1 row in a pass"),
        ("98,000", "tokens per step", "rows hold up to 4,096"),
        ("1,200", "steps in all", ""),
    ]
    assert batch_facts(None) == batch_facts({"recipe": "x"}) == []


def test_an_estimate_is_called_one() -> None:
    assert batch_facts({"batch": {"tokens_per_step": 100.0, "is_estimate": True}}) == [
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
        plan={"hardware": {"memory_gib": 80.0}, "memory_gib": {"total": 60.0}},
        training=[{"step": 1, "memory_gib": [20.0, 40.0]}],
    )
    bars, note = memory_bars(record, summarise(record))
    assert [(bar.name, bar.share) for bar in bars] == [("rank 0", 0.25), ("rank 1", 0.5), ("planned", 0.75)]
    assert note == "The full width is one GPU's 80 GiB."


def test_many_ranks_are_summed_up(make_run) -> None:
    record = read_run(make_run(ranks=64))
    bars, _ = memory_bars(record, summarise(record))
    assert [bar.name for bar in bars] == ["lowest rank", "middle", "highest rank"]


def test_host_memory_is_not_called_a_gpus() -> None:
    plan = {"hardware": {"generation": "cpu", "memory_gib": 24.0}}
    record = RunRecord(folder=Path("a/b"), plan=plan, training=[{"step": 1, "memory_gib": [6.0]}])
    bars, note = memory_bars(record, summarise(record))
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
