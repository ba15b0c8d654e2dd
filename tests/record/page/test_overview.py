from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.record.page.numbers import format_value
from tunebook.record.page.overview import (
    NO_RECIPE,
    build_overview,
    describe_machine,
    format_time,
    speed_unit,
    state_of,
    summarize,
)
from tunebook.record.report import render_comparison
from tunebook.record.run_record import RunRecord, read_run


def banner(record: RunRecord) -> str:
    return " ".join(build_overview(record, summarize(record)).banner)


def test_a_finished_run_has_no_banner_and_its_numbers(make_run) -> None:
    record = read_run(make_run())
    overview = build_overview(record, summarize(record))
    assert (overview.title, overview.state_word, overview.banner) == (
        "Three small tasks, learnt on a CPU",
        "finished",
        [],
    )
    assert [figure.label for figure in overview.figures] == [
        "exact match", "training loss", "validation loss", "tokens per second", "memory",
    ]  # fmt: skip
    assert overview.figures[0].value == "97.3 %"
    assert overview.figures[0].note == "before training: 0.0 %"
    assert dict(overview.facts) == {
        "Recipe": "example", "Model": "book:recipes/example/model from random weights", "Hardware": "CPU, 2 cores",
        "Strategy": "ddp, full fine-tune", "Precision, attention, packing": "fp32, sdpa, isolated",
        "Optimizer steps": "240 of 240", "Tokens seen": "818,880", "Started": "21 November 2026, 07:18 UTC",
        "Took": "1 min 42 s", "Exit code": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ({}, "as in the cpu lock"),
        ({"torch": {"installed": "2.11.0", "locked": "2.13.0"}}, "torch 2.11.0 where the lock has 2.13.0"),
        (
            {name: {"installed": None, "locked": "1"} for name in ("a", "b", "c", "d", "e", "torch")},
            "no torch where the lock has 1, no a where the lock has 1, no b where the lock has 1, "
            "no c where the lock has 1, and 2 more",
        ),
        (None, "not compared with the lock: there is none"),
    ],
)
def test_packages_that_are_not_the_locks_are_in_the_head(make_run, differences: Any, expected: str) -> None:
    folder = make_run()
    manifest = json.loads((folder / "manifest.json").read_text())
    lock = {"name": "cpu", "sha256": None, "differences": differences, "reason": "there is none"}
    manifest["environment"]["lock"] = lock
    (folder / "manifest.json").write_text(json.dumps(manifest))
    record = read_run(folder)
    assert dict(build_overview(record, summarize(record)).facts)["Packages"] == expected


@pytest.mark.parametrize(
    ("graphs", "later", "expected"),
    [(9, 2, "9 graphs, 2 after the first step, in 12.3 s"), (1, 0, "1 graph, 0 after the first step, in 12.3 s")],
)
def test_compiled_graphs_are_in_the_head(make_run, graphs: int, later: int, expected: str) -> None:
    folder = make_run()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["compiled"] = {"graphs": graphs, "after_first_step": later, "seconds": 12.345}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    record = read_run(folder)
    assert dict(build_overview(record, summarize(record)).facts)["Compiled"] == expected


@pytest.mark.parametrize(
    ("state", "exit_code", "expected"),
    [
        ("failed", 1, "This run failed after step 40 with exit code 1. Rank 3 was killed."),
        ("stopped", 6, "stopped on request after step 40, so it is not finished"),
        ("invalid", 7, "This training is invalid. Rank 3 was killed. Do not use its numbers"),
        ("running", None, "it is still running, or it was killed after step 40"),
    ],
)
def test_banner_of_every_ending(make_run, state: str, exit_code: int | None, expected: str) -> None:
    record = read_run(make_run(state=state, exit_code=exit_code, reason="rank 3 was killed", num_steps=40))
    assert expected in banner(record)


def test_banner_of_a_stopped_run_explains_resuming(make_run) -> None:
    folder = make_run(state="stopped", exit_code=6, reason="asked by SIGTERM", num_steps=0)
    said = banner(read_run(folder))
    assert "before the first step was logged" in said
    assert said.endswith("No checkpoint of it is recorded. Starting it again begins at the first step.")
    (folder / "model").mkdir()
    assert banner(read_run(folder)).endswith(
        "Starting it again with training.resume=auto completes the remaining work."
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["status"]["last_checkpoint"] = "/runs/checkpoint-4"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert banner(read_run(folder)).endswith(
        "checkpoint: /runs/checkpoint-4. Starting it again with training.resume=auto resumes from there."
    )


@pytest.mark.parametrize(
    ("earlier", "took"),
    [
        ([], "1 min 42 s"),
        ([48.6], "2 min 31 s, 2 attempts"),
        ([48.6, None], "2 min 31 s, 3 attempts; without the time of 1 that recorded no end"),
    ],
)
def test_duration_is_the_sum_of_all_attempts(make_run, earlier: list[float | None], took: str) -> None:
    record = read_run(make_run())
    assert record.manifest is not None
    record.manifest["earlier_attempts"] = [
        {"state": "stopped", "seconds": seconds, "started": "2026-11-20T07:00:00+00:00"} for seconds in earlier
    ]
    facts = dict(build_overview(record, summarize(record)).facts)
    assert facts["Took"] == took
    assert facts["Started"] == ("20 November 2026, 07:00 UTC" if earlier else "21 November 2026, 07:18 UTC")


def test_an_early_stop_and_the_best_model_are_among_the_facts(make_run) -> None:
    record = read_run(make_run(num_steps=6))
    assert record.manifest is not None
    told = "stopped early after step 6: no better validation loss in 1 evaluation; model/ is checkpoint-3 (10.1723)"
    record.manifest["status"] |= {"reason": told, "step": 6, "best_step": 3}
    facts = dict(build_overview(record, summarize(record)).facts)
    assert facts["Optimizer steps"] == f"6 of 240; {told}"
    record.manifest["status"]["reason"] = None
    facts = dict(build_overview(record, summarize(record)).facts)
    assert facts["Optimizer steps"] == "6 of 240; model/ is checkpoint-3, the best by validation loss"


def test_the_validation_loss_of_a_best_model_is_its_own(make_run) -> None:
    record = read_run(make_run())
    assert record.manifest is not None
    losses = {line["step"]: line["validation_loss"] for line in record.validation}
    figures = build_overview(record, summarize(record)).figures
    (before,) = (figure for figure in figures if figure.label == "validation loss")
    assert before.note == f"best of {len(losses)}"
    worst = max(losses, key=lambda step: losses[step])
    record.manifest["status"]["best_step"] = worst
    figures = build_overview(record, summarize(record)).figures
    (figure,) = (figure for figure in figures if figure.label == "validation loss")
    assert figure.value == format_value(losses[worst])
    assert figure.note == f"of model/, which is checkpoint-{worst}"


def test_run_without_recipe_is_not_named_by_its_folder(make_run) -> None:
    record = read_run(make_run())
    assert record.manifest is not None and record.config is not None
    record.manifest["recipe"], record.config["title"] = None, ""
    overview = build_overview(record, summarize(record))
    assert dict(overview.facts)["Recipe"] == NO_RECIPE == "none (own model and data)"
    assert overview.title == "book:recipes/example/model on train.jsonl"
    record.manifest["model"]["name"] = "~/models/mine"
    assert build_overview(record, summarize(record)).title == "mine on train.jsonl"
    page = render_comparison([record, read_run(make_run("2026-11-21T07-18-06Z"))])
    assert "<h1>2 runs of example, none (own model and data)</h1>" in page


def test_edited_run_has_a_banner(make_run) -> None:
    record = read_run(make_run())
    assert record.manifest is not None
    record.manifest["files_sha256"] = {"metrics.jsonl": "0" * 64}
    assert banner(record).startswith("metrics.jsonl was changed after the run: its hash differs from the manifest's")


def test_cpu_run_has_ranks_even_if_the_machine_has_gpus(make_run) -> None:
    on_cpu, on_gpus = read_run(make_run("2026-11-21T07-18-05Z")), read_run(make_run("2026-11-21T07-18-06Z", ranks=8))
    assert [speed_unit([record]) for record in (on_cpu, on_gpus)] == ["rank", "GPU"]
    assert on_gpus.config is not None
    on_gpus.config["hardware"] = {"generation": "cpu"}
    assert speed_unit([on_gpus]) == "rank"
    assert speed_unit([RunRecord(folder=Path("a/b"))]) == "rank"


def test_run_with_a_non_finite_loss_is_never_reported_as_finished(make_run) -> None:
    line = {"step": 58, "loss": None, "not_finite": ["loss"], "tokens_seen": 1}
    record = read_run(make_run(num_steps=57, extra_lines=(line,)))
    assert record.status["state"] == "finished"
    assert state_of(record) == "invalid"
    assert "The loss was not finite at step 58." in banner(record)


def test_folder_without_manifest_has_a_banner(make_run) -> None:
    record = read_run(make_run(without=("manifest.json",)))
    assert "no manifest.json" in banner(record)
    assert describe_machine(record) == "not recorded"


def test_hardware_counts_gpus_and_those_in_use(make_run) -> None:
    times = "\N{MULTIPLICATION SIGN}"
    record = read_run(make_run(ranks=8))
    assert describe_machine(record) == f"8 {times} NVIDIA H200"
    assert record.manifest is not None
    record.manifest["world_size"] = 4
    assert describe_machine(record) == f"8 {times} NVIDIA H200; 4 used"
    assert describe_machine(RunRecord(folder=Path("a/b"))) == "not recorded"
    del record.manifest["hardware"]
    assert describe_machine(record) == "not recorded"
    assert banner(record) == ""


def test_times_are_for_people() -> None:
    assert format_time("2026-11-02T07:08:05+00:00") == "2 November 2026, 07:08 UTC"
    assert format_time(None) == "not recorded"


def test_a_run_in_numbers_by_hand() -> None:
    training = [
        {"step": step, "loss": 10.0 - 0.1 * step, "tokens_seen": 50 * step, "mfu": None,
         "tokens_per_second_per_gpu": 10.0 if step <= 4 else 100.0, "padding_share": 0.25,
         "memory_gib": [float(step), 1.0]}
        for step in range(1, 41)
    ]  # fmt: skip
    validation = [
        {"step": 20, "validation_loss": 4.0},
        {"step": 30, "validation_loss": 3.5},
        {"step": 40, "validation_loss": None},
    ]
    plan = {"batch": {"total_steps": 80}}
    summary = summarize(RunRecord(folder=Path("a/b"), plan=plan, training=training, validation=validation))
    assert (summary.num_steps, summary.num_planned_steps, summary.num_tokens) == (40, 80, 2000)
    assert summary.first_loss == pytest.approx(9.9)
    assert (summary.num_final_steps, summary.final_loss) == (2, pytest.approx(6.05))  # of 6.1 and 6.0
    assert summary.best_validation_loss == 3.5
    assert summary.tokens_per_second_per_gpu == 100  # the first tenth is warming up
    assert summary.mfu is None
    assert summary.padding_share == 0.25
    assert summary.peak_memory_gib == [40, 1]


def test_the_padding_share_is_of_all_computed_tokens() -> None:
    counted = ((100, 900), (300, 100), (0, 10))  # tokens and padding of three logged steps
    training, seen = [], 0
    for step, (tokens, padding) in enumerate(counted, 1):
        seen += tokens
        share = padding / (tokens + padding)
        training.append({"step": step, "loss": 1.0, "tokens_seen": seen, "padding_share": share})
    summary = summarize(RunRecord(folder=Path("a/b"), training=training))
    assert summary.padding_share == pytest.approx(1000 / 1400)  # not (0.9 + 0.25 + 1) / 3


def test_time_of_a_killed_attempt_is_unknown() -> None:
    manifest = {"status": {"seconds": 27.9}, "earlier_attempts": [{"seconds": 48.6}, {"seconds": None}]}
    summary = summarize(RunRecord(folder=Path("a/b"), manifest=manifest))
    assert (summary.seconds, summary.num_attempts, summary.num_attempts_without_end) == (76.5, 3, 1)
    manifest["status"] = {"seconds": None}
    assert summarize(RunRecord(folder=Path("a/b"), manifest=manifest)).seconds is None


def test_an_empty_run_has_no_numbers() -> None:
    summary = summarize(RunRecord(folder=Path("a/b")))
    assert (summary.num_steps, summary.final_loss, summary.peak_memory_gib) == (None, None, [])


def test_the_main_score_is_the_first_tasks_with_its_own_before_training() -> None:
    after = {"tasks": {"a": {"metric": "exact_match", "value": 0.9}, "b": {"metric": "acc", "value": 0.1}}}
    earlier = {"tasks": {"b": {"metric": "acc", "value": 0.2}, "a": {"metric": "exact_match", "value": 0.5}}}

    def figures(**evaluations: Any) -> list[tuple[str, str, str]]:
        record = RunRecord(folder=Path("a/b"), **evaluations)
        return [(one.label, one.value, one.note) for one in build_overview(record, summarize(record)).figures]

    assert figures(after=after) == [("exact match", "90.0 %", "a")]
    assert figures(after=after, before=earlier) == [("exact match", "90.0 %", "before training: 50.0 %")]
    assert figures(after={"tasks": {}}) == figures() == []
