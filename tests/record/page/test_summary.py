from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.record.page.summary import main_score, summarise
from tunebook.record.run_record import RunRecord


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
    summary = summarise(RunRecord(folder=Path("a/b"), plan=plan, training=training, validation=validation))
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
    summary = summarise(RunRecord(folder=Path("a/b"), training=training))
    assert summary.padding_share == pytest.approx(1000 / 1400)  # not (0.9 + 0.25 + 1) / 3


def test_the_seconds_of_all_attempts_count_and_those_of_a_killed_one_are_not_known() -> None:
    manifest = {"status": {"seconds": 27.9}, "earlier_attempts": [{"seconds": 48.6}, {"seconds": None}]}
    summary = summarise(RunRecord(folder=Path("a/b"), manifest=manifest))
    assert (summary.seconds, summary.num_attempts, summary.num_attempts_without_end) == (76.5, 3, 1)
    manifest["status"] = {"seconds": None}
    assert summarise(RunRecord(folder=Path("a/b"), manifest=manifest)).seconds is None


def test_an_empty_run_has_no_numbers() -> None:
    summary = summarise(RunRecord(folder=Path("a/b")))
    assert (summary.num_steps, summary.final_loss, summary.peak_memory_gib) == (None, None, [])


def test_the_main_score_is_the_first_tasks() -> None:
    evaluation = {"tasks": {"a": {"metric": "exact_match", "value": 0.9}, "b": {"metric": "acc", "value": 0.1}}}
    assert main_score(evaluation) == ("a", "exact_match", 0.9)
    assert main_score({"tasks": {}}) is None
    assert main_score(None) is None
