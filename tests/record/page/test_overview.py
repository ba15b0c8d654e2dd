from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.facts.methods import METHODS
from tunebook.record.page.numbers import format_value
from tunebook.record.page.overview import state_of, summarize
from tunebook.record.report import render_run
from tunebook.record.run_record import RunRecord, read_run


def head(record: RunRecord) -> str:
    """The text of the page's head."""
    page = render_run(record)
    text = re.sub(r"<[^>]+>", " ", page[page.index("<header>") : page.index("</header>")])
    return " ".join(text.split()).replace("&#39;", "'")


def test_every_ending_but_finished_has_a_banner(make_run) -> None:
    record = read_run(make_run(state="failed", exit_code=1, reason="rank 3 was killed", num_steps=40))
    assert record.manifest is not None
    for state in ("failed", "stopped", "invalid", "running"):
        record.manifest["status"]["state"] = state
        page = render_run(record)
        assert f'class="banner {state}"' in page
        assert ("Rank 3 was killed." in page) == (state != "running")
    line = {"step": 41, "loss": None, "not_finite": ["loss"], "tokens_seen": 1}
    record.manifest["status"]["state"] = "finished"
    assert state_of(replace(record, training=[*record.training, line])) == "invalid"


def test_the_validation_loss_of_a_best_model_is_its_own(make_run) -> None:
    record = read_run(make_run())
    losses = {line["step"]: line["validation_loss"] for line in record.validation}
    assert f"best of {len(losses)}" in head(record)
    worst = max(losses, key=lambda step: losses[step])
    record.manifest["status"]["best_step"] = worst
    value = format_value(losses[worst])
    assert f"validation loss {value} of model/, which is checkpoint-{worst}" in head(record)
    assert f"model/ is checkpoint-{worst}, the best by validation loss" in head(record)


def test_a_run_over_pairs_counts_pairs_and_names_its_metric_and_data(make_run) -> None:
    record = read_run(make_run())
    for line in record.training:
        line |= dict.fromkeys(METHODS["dpo"].metrics, 0.5)
    record.config["method"] = {"name": "dpo"}
    record.config["training"] = {"best_metric": "validation_reward_accuracy"}
    record.manifest["status"]["best_step"] = 20
    record.manifest["recipe"] = None
    record.manifest["dataset"]["records"] = [{"location": "/data/pairs.jsonl"}]
    assert "the best by validation reward accuracy" in head(record)
    assert "Data pairs.jsonl" in head(record)
    batch = render_run(record).partition('<section id="plan">')[2].partition("</section>")[0]
    assert "pairs per step" in batch and "documents" not in batch


def test_a_run_in_numbers_by_hand() -> None:
    training = [
        {"step": step, "loss": 10.0 - 0.1 * step, "tokens_seen": 50 * step, "mfu": None,
         "tokens_per_second_per_gpu": 10.0 if step <= 4 else 100.0,
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
    assert summary.peak_memory_gib == [40, 1]


def test_time_of_a_killed_attempt_is_unknown() -> None:
    manifest = {"status": {"seconds": 27.9}, "earlier_attempts": [{"seconds": 48.6}, {"seconds": None}]}
    summary = summarize(RunRecord(folder=Path("a/b"), manifest=manifest))
    assert (summary.seconds, summary.num_attempts, summary.num_attempts_without_end) == (76.5, 3, 1)
    manifest["status"] = {"seconds": None}
    assert summarize(RunRecord(folder=Path("a/b"), manifest=manifest)).seconds is None
