"""Targets: how they are typed, and when a run reaches one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import RequestError
from tunebook.evidence.target import describe_target, parse_target, progress_of, reached_text
from tunebook.record.run_record import RunRecord

AFTER = {"tasks": {"boolq": {"metric": "acc", "value": 0.7, "higher_is_better": True}}}


def run_of(**sections: Any) -> RunRecord:
    return RunRecord(folder=Path("/runs/quickstart/now"), **sections)


def lines(*losses: float) -> list[dict[str, Any]]:
    return [{"step": step, "num_steps": 1, "loss": loss, "seconds": 2.0} for step, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("text", "expected", "described"),
    [
        ("loss<=2.1", ("loss", None, 2.1, "at_most", None), "loss <= 2.1"),
        ("validation_loss<=2.1@200", ("validation_loss", None, 2.1, "at_most", 200),
         "validation_loss <= 2.1 within 200 steps"),
        (" boolq:acc >= 0.70 ", ("acc", "boolq", 0.7, "at_least", None), "boolq:acc >= 0.7"),
        ("humaneval:pass@1>=0.3@1250", ("pass@1", "humaneval", 0.3, "at_least", 1250),
         "humaneval:pass@1 >= 0.3 within 1,250 steps"),
        ("wikitext:word_perplexity<=20", ("word_perplexity", "wikitext", 20.0, "at_most", None),
         "wikitext:word_perplexity <= 20"),
    ],
)  # fmt: skip
def test_targets_are_typed_as_a_comparison(text: str, expected: tuple[Any, ...], described: str) -> None:
    found = parse_target(text)
    assert (found.metric, found.task, found.value, found.direction, found.max_steps) == expected
    assert describe_target(found) == described


@pytest.mark.parametrize(
    "text",
    ["boolq:acc", "", "loss<2", "loss<=", "loss<=1<=2", "loss<=nan", "loss<=two", "loss<=2@-5", "loss<=2@0",
     "loss<=2@1.5", "loss<=2@", "accuracy>=0.7", ":acc>=0.7", "boolq:>=0.7", "loss>=2"],
)  # fmt: skip
def test_other_text_is_refused_with_what_to_type(text: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_target(text)
    assert (error.value.problem_id, error.value.exit_code) == ("evidence-target", 2)
    assert "validation_reward_margin" in error.value.message


def test_loss_is_reached_at_the_end_of_a_window() -> None:
    """40 steps are 20 windows of 2; a single low step reaches nothing."""
    losses = [4.0, 1.0, *[3.0, 2.6] * 3, *[2.2, 2.0] * 16]  # means: 2.5, 2.8 three times, 2.1
    record = run_of(training=lines(*losses), config={"training": {"log_every_steps": 1}})
    reached = progress_of(parse_target("loss<=2.1"), record)
    assert (reached.best, reached.steps, reached.seconds) == (pytest.approx(2.1), 10, 20.0)
    assert progress_of(parse_target("loss<=2.1@10"), record).steps == 10
    missed = progress_of(parse_target("loss<=2.1@9"), record)
    assert (missed.best, missed.steps, missed.seconds) == (2.5, None, None)


def test_validation_loss_is_reached_at_the_first_validation_that_is_low_enough() -> None:
    validation = [{"step": step, "validation_loss": loss} for step, loss in ((0, 6.0), (2, None), (3, 2.0), (4, 1.0))]
    record = run_of(training=lines(5.0, 4.0, 3.0, 2.0), validation=validation)
    reached = progress_of(parse_target("validation_loss<=2"), record)
    assert (reached.best, reached.steps, reached.seconds) == (2.0, 3, 6.0)
    assert progress_of(parse_target("validation_loss<=6"), record).steps == 0  # before the first step
    assert progress_of(parse_target("validation_loss<=2@2"), record).best == 6.0


def test_a_score_is_reached_at_the_end_of_the_training() -> None:
    record = run_of(training=lines(5.0, 4.0, 3.0), after=AFTER)
    reached = progress_of(parse_target("boolq:acc>=0.7"), record)
    assert (reached.best, reached.steps, reached.seconds) == (0.7, 3, 6.0)
    assert progress_of(parse_target("boolq:acc>=0.7@2"), record).steps is None
    assert progress_of(parse_target("boolq:acc>=0.71"), record).best == 0.7


def test_steps_and_seconds_of_repeats_are_a_range() -> None:
    assert reached_text([190, 200], [61.4, 64.6]) == "reached at step 190 to 200, after 61 to 65 s of training"
    assert reached_text([1250, 1250], [0.521, 0.524]) == "reached at step 1,250, after 0.52 s of training"
    assert reached_text([7], [None]) == "reached at step 7"
