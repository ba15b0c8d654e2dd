"""Targets: how they are typed, when a run reaches one, and how evidence records and judges them."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.commands.verify import verify_command
from tunebook.errors import DataError, RequestError
from tunebook.evidence.files import content_hash, read_evidence
from tunebook.evidence.gather import read_finished
from tunebook.evidence.page import PAGE_FILE
from tunebook.evidence.schema import Target
from tunebook.evidence.target import (
    describe_target,
    parse_target,
    progress_of,
    reached_text,
    require_measured,
    training_seconds,
)
from tunebook.record.run_record import RunRecord

from .conftest import MakeRun, curve


def run_of(**sections: Any) -> RunRecord:
    return RunRecord(folder=Path("/runs/quickstart/now"), **sections)


def lines(*losses: float, seconds: float = 2.0, num_steps: int = 1) -> list[dict[str, Any]]:
    return [
        {"step": num_steps * number, "num_steps": num_steps, "loss": loss, "seconds": seconds}
        for number, loss in enumerate(losses, 1)
    ]


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
    ("text", "said"),
    [
        ("boolq:acc", "has no comparison, which a shell takes if not quoted"),
        ("", "has no comparison"),
        ("loss<2", "is not METRIC<=VALUE@STEPS"),
        ("loss=2", "is not METRIC<=VALUE@STEPS"),
        ("loss<=", "is not METRIC<=VALUE@STEPS"),
        ("loss<=1<=2", "is not METRIC<=VALUE@STEPS"),
        ("loss<=nan", "'nan' is not a finite number"),
        ("loss<=inf", "'inf' is not a finite number"),
        ("loss<=two", "'two' is not a finite number"),
        ("loss<=2@-5", "'-5' is not a number of optimizer steps, 1 or more"),
        ("loss<=2@0", "'0' is not a number of optimizer steps, 1 or more"),
        ("loss<=2@1.5", "'1.5' is not a number of optimizer steps"),
        ("loss<=2@", "'' is not a number of optimizer steps"),
        ("validation_los<=2", r"validation_los is no metric; .* Did you mean 'validation_loss'\?"),
        ("accuracy>=0.7", "accuracy is no metric; there are loss, validation_loss and TASK:METRIC"),
        (":acc>=0.7", "':acc' is not TASK:METRIC"),
        ("boolq:>=0.7", "'boolq:' is not TASK:METRIC"),
        ("loss>=2", "a loss is better when it is lower, so its target is 'loss<=2'"),
    ],
)
def test_other_text_is_refused_with_what_to_type(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as error:
        parse_target(text)
    assert (error.value.problem_id, error.value.exit_code) == ("evidence-target", 2)
    assert "type --target 'validation_loss<=2.1@200'" in error.value.message


def test_loss_is_reached_at_the_end_of_a_window() -> None:
    """40 steps are 20 windows of 2; a single low step reaches nothing."""
    losses = [4.0, 1.0, *[3.0, 2.6] * 3, *[2.2, 2.0] * 16]  # means: 2.5, 2.8 three times, 2.1
    record = run_of(training=lines(*losses), config={"training": {"log_every_steps": 1}})
    reached = progress_of(parse_target("loss<=2.1"), record)
    assert (reached.best, reached.steps, reached.seconds) == (pytest.approx(2.1), 10, 20.0)
    assert progress_of(parse_target("loss<=2.1@10"), record).steps == 10
    missed = progress_of(parse_target("loss<=2.1@9"), record)
    assert (missed.best, missed.steps, missed.seconds) == (2.5, None, None)
    assert progress_of(parse_target("loss<=1.5"), record).steps is None


def test_validation_loss_is_reached_at_the_first_validation_that_is_low_enough() -> None:
    validation = [{"step": step, "validation_loss": loss} for step, loss in ((0, 6.0), (2, None), (3, 2.0), (4, 1.0))]
    record = run_of(training=lines(5.0, 4.0, 3.0, 2.0), validation=validation)
    reached = progress_of(parse_target("validation_loss<=2"), record)
    assert (reached.best, reached.steps, reached.seconds) == (2.0, 3, 6.0)
    assert progress_of(parse_target("validation_loss<=6"), record).steps == 0  # before the first step
    assert progress_of(parse_target("validation_loss<=2@2"), record).best == 6.0


def test_a_score_is_reached_at_the_end_of_the_training() -> None:
    after = {"tasks": {"boolq": {"metric": "acc", "value": 0.7, "higher_is_better": True}}}
    record = run_of(training=lines(5.0, 4.0, 3.0), after=after)
    reached = progress_of(parse_target("boolq:acc>=0.7"), record)
    assert (reached.best, reached.steps, reached.seconds) == (0.7, 3, 6.0)
    assert progress_of(parse_target("boolq:acc>=0.7@2"), record).steps is None
    missed = progress_of(parse_target("boolq:acc>=0.71"), record)
    assert (missed.best, missed.steps) == (0.7, None)


def test_the_seconds_of_a_line_over_several_steps_are_shared_out() -> None:
    record = run_of(training=lines(5.0, 4.0, seconds=3.0, num_steps=10))
    assert training_seconds(record, 0) == 0.0
    assert training_seconds(record, 10) == 3.0
    assert training_seconds(record, 15) == 4.5
    assert training_seconds(record, 21) is None
    assert training_seconds(run_of(training=lines(5.0, 4.0)[1:]), 2) is None  # the first step's line was lost
    assert training_seconds(run_of(training=[{"step": 1, "loss": 1.0}]), 1) is None  # as older runs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("validation_loss<=2", r"has no validation; choose loss or a task, or .*dataset.validation_share=0.01"),
        ("bool:acc>=0.7", r"no score of bool: its tasks are boolq\. Did you mean 'boolq'\?"),
        ("boolq:acc_norm>=0.7", "boolq is scored by acc; type boolq:acc"),
        ("boolq:acc<=0.7", "acc is better when it is higher; type >="),
    ],
)
def test_a_metric_that_the_run_does_not_measure_is_refused(text: str, said: str) -> None:
    after = {"tasks": {"boolq": {"metric": "acc", "value": 0.7, "higher_is_better": True}}}
    with pytest.raises(RequestError, match=said) as error:
        require_measured(parse_target(text), run_of(training=lines(1.0), after=after))
    assert error.value.problem_id == "evidence-target"
    with pytest.raises(RequestError, match="none was evaluated"):
        require_measured(parse_target("boolq:acc>=0.7"), run_of(training=lines(1.0)))


def test_steps_and_seconds_of_repeats_are_a_range() -> None:
    assert reached_text([190, 200], [61.4, 64.6]) == "reached at step 190 to 200, after 61 to 65 s of training"
    assert reached_text([1250, 1250], [0.521, 0.524]) == "reached at step 1,250, after 0.52 s of training"
    assert reached_text([7], [None]) == "reached at step 7"


# --- recorded and judged


def record(*runs: Path, target: str) -> Path:
    return record_evidence([read_finished(run) for run in runs], "try", [], parse_target(target))


def test_the_target_and_when_each_run_reached_it_are_recorded(make_run: MakeRun, recipes_dir: Path) -> None:
    file = record(make_run(validation={30: 3.0, 60: 2.0}), make_run(validation={30: 2.4, 60: 2.0}),
                  target="validation_loss<=2.5@60")  # fmt: skip
    content = json.loads(file.read_text())
    assert content["target"] == {
        "metric": "validation_loss", "task": None, "value": 2.5, "direction": "at_most", "max_steps": 60,
    }  # fmt: skip
    assert [repeat["steps_to_target"] for repeat in content["repeats"]] == [60, 30]
    assert [repeat["time_to_target_s"] for repeat in content["repeats"]] == [6.0, pytest.approx(30 * 0.101)]

    found = verify(read_finished(make_run(validation={30: 2.6, 60: 2.45})), [])
    row = found.rows[-1]
    assert (row.name, row.expected, row.found) == ("target: validation_loss <= 2.5 within 60 steps", 2.5, 2.45)
    assert (row.verdict.value, found.exit_code) == ("reached", 0)
    assert row.why == (
        "reached at step 60, after 6.1 s of training; recorded: reached at step 30 to 60, after 3 to 6 s of training"
    )


def test_a_run_that_misses_the_target_differs(
    make_run: MakeRun, recipes_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(make_run(validation={60: 2.0}), make_run(validation={60: 2.0}), target="validation_loss<=2.5")
    late = make_run(validation={60: 2.51})
    out = StringIO()
    assert verify_command([str(late)], Path("outputs"), [], Console(file=out, width=300)) == 5
    assert "MISSED" in out.getvalue() and "the best value is shown; recorded: reached at step 60" in out.getvalue()
    assert "target: validation_loss &lt;= 2.5" in (late / PAGE_FILE).read_text()
    none = verify(read_finished(make_run()), []).rows[-1]
    assert (none.verdict.value, none.found) == ("MISSED", None)
    assert none.why.startswith("the run does not measure it")
    assert verify_command([str(late)], Path("outputs"), [], Console(file=out), as_json=True) == 5
    printed = json.loads(capsys.readouterr().out)
    assert (printed["agrees"], printed["rows"][-1]["verdict"]) == (False, "MISSED")
    assert printed["what"].startswith("from-scratch evidence, recorded on ")


def test_a_typed_target_replaces_the_recorded_one(make_run: MakeRun, recipes_dir: Path) -> None:
    record(make_run(), make_run(), target="words:exact_match>=0.9")

    def judged(target: str) -> tuple[int, str]:
        out = StringIO()
        run = str(make_run())
        code = verify_command([run], Path("outputs"), [], Console(file=out, width=300), target=target)
        return code, out.getvalue()

    code, said = judged("words:exact_match>=0.85@60")
    assert (code, "target: words:exact_match >= 0.85 within 60 steps" in said) == (0, True)
    assert "recorded: reached" not in said  # the recorded runs had another target
    code, said = judged("loss<=0.01")
    assert (code, "MISSED" in said) == (5, True)
    with pytest.raises(RequestError, match="no score of word: its tasks are words"):
        judged("word:exact_match>=0.85")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("loss<=0.001", r"missed the target loss <= 0.001: its best value is 0.11\d*\."),
        ("loss<=1@1", r"missed the target loss <= 1 within 1 steps: it has no value"),
        ("words:exact_match>=0.95", r"missed the target .*best value is 0.9\. .*state a target that they reach"),
        ("wordz:exact_match>=0.5", r"Did you mean 'words'\?"),
    ],
)
def test_recording_is_refused_if_a_run_missed_the_target(
    make_run: MakeRun, recipes_dir: Path, target: str, said: str
) -> None:
    with pytest.raises(RequestError, match=said) as error:
        record(make_run(), make_run(), target=target)
    assert error.value.problem_id == "evidence-target"
    assert not recipes_dir.exists()


def test_one_run_of_several_that_misses_is_enough(make_run: MakeRun, recipes_dir: Path) -> None:
    bad = make_run(score=0.8)
    with pytest.raises(RequestError, match=f"{bad} missed the target"):
        record(make_run(), bad, target="words:exact_match>=0.9")


def test_evidence_without_a_target_holds_as_before(make_run: MakeRun, recipes_dir: Path) -> None:
    file = record_evidence([read_finished(make_run()), read_finished(make_run())], "try", [])
    content = json.loads(file.read_text())
    del content["target"]
    for repeat in content["repeats"]:
        del repeat["steps_to_target"], repeat["time_to_target_s"], repeat["processor"]
    file.write_text(json.dumps(content | {"content_sha256": content_hash(content)}))
    assert read_evidence(file).target is None
    assert not any(row.name.startswith("target") for row in verify(read_finished(make_run()), []).rows)


@pytest.mark.parametrize("steps", [0, -1])
def test_a_recorded_target_has_at_least_one_step(steps: int) -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Target(metric="loss", task=None, value=1.0, direction="at_most", max_steps=steps)


def test_a_recorded_target_was_reached_by_every_run(make_run: MakeRun, recipes_dir: Path) -> None:
    file = record(make_run(losses=curve()), make_run(losses=curve()), target="loss<=3")
    content = json.loads(file.read_text())
    content["repeats"][1]["steps_to_target"] = None
    file.write_text(json.dumps(content | {"content_sha256": content_hash(content)}))
    with pytest.raises(DataError, match="target is set, and a repeat has no steps_to_target"):
        read_evidence(file)
