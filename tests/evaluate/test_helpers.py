"""Requests shared among processes; the processes here are real, only their answers are made up."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tunebook.errors import DoesNotFitError, RequestError, TunebookError
from tunebook.evaluate.helpers import Helpers, deal
from tunebook.evaluate.progress import AnswerProgress


def load(progress: AnswerProgress) -> Callable[[str, Sequence[Any]], list[str]]:
    """Answers with its number and the text in capitals, but dies, fails or runs out of memory if the text says so."""
    print("helper at work", file=sys.stderr, flush=True)
    if os.environ["NUMBER"] == "none":
        raise RequestError("no such model")

    def answer(kind: str, requests: Sequence[Any]) -> list[str]:
        texts = [request.args[0] for request in requests]
        if "die" in texts:
            os.kill(os.getpid(), 9)
        if "fail" in texts:
            raise ValueError("no")
        if "large" in texts:
            raise DoesNotFitError("a batch of 8 does not fit")
        progress.say("batch size auto: 8 ran out of memory, 4 fits")
        progress.advance(len(texts))
        return [f"{kind} {os.environ['NUMBER']} {text.upper()}" for text in texts]

    return answer


def requests(*texts: str) -> list[Any]:
    return [SimpleNamespace(args=(text, " answer")) for text in texts]


def answer(kind: str, shared: Sequence[Any]) -> list[str]:
    return [f"{kind} 0 {request.args[0].upper()}" for request in shared]


@pytest.fixture(scope="module")
def started() -> Iterator[Helpers]:
    with Helpers(AnswerProgress("test")) as started:
        started.start(load, [{"NUMBER": "1"}, {"NUMBER": "2"}])
        yield started


@pytest.fixture
def helpers(started: Helpers) -> Helpers:
    """Two helpers that all tests share but those that end one."""
    started.progress = AnswerProgress("test")
    return started


def test_answers_come_back_in_the_order_of_the_requests_and_are_counted(helpers: Helpers) -> None:
    texts = [f"text {'x' * (number % 5)} {number}" for number in range(11)]
    for kind in ("generate_until", "loglikelihood"):
        answers = helpers.share(kind, requests(*texts), answer)
        assert [text.split(" ", 2)[2] for text in answers] == [text.upper() for text in texts]
        assert {text.split(" ", 2)[1] for text in answers} == {"0", "1", "2"}
        assert {text.split(" ", 2)[0] for text in answers} == {kind}
    assert (
        helpers.progress.num_done == sum(len(share) for share in deal(requests(*texts), 3)[1:]) * 2
    )  # the first process counts its own by itself


def test_what_a_helper_says_is_shown_with_its_number(helpers: Helpers, capsys: pytest.CaptureFixture[str]) -> None:
    helpers.progress = AnswerProgress("evaluation before")
    helpers.share("k", requests("a", "b", "c"), answer)
    said = [line for line in capsys.readouterr().err.splitlines() if "batch size" in line]
    assert sorted(said) == [
        f"evaluation before: process {number}: batch size auto: 8 ran out of memory, 4 fits" for number in (1, 2)
    ]


def test_fewer_requests_than_processes_are_answered(helpers: Helpers) -> None:
    assert helpers.share("k", requests("a"), answer) == ["k 0 A"]
    assert helpers.share("k", [], answer) == []


def test_one_that_dies_costs_what_it_was_asked_and_is_not_asked_again() -> None:
    with Helpers(AnswerProgress("test")) as helpers:
        helpers.start(load, [{"NUMBER": "1"}, {"NUMBER": "2"}])
        with pytest.raises(TunebookError, match=r"was killed by signal 9\nIts last output:\n  helper at work"):
            helpers.share("k", requests("a long text of ours", "another of theirs", "die"), answer)
        assert len([helper for helper in helpers._helpers if helper.is_lost]) == 1
        answers = helpers.share("k", requests("a", "b", "c", "d"), answer)
    assert sorted(text.rpartition(" ")[2] for text in answers) == ["A", "B", "C", "D"]
    assert len({text.split(" ")[1] for text in answers}) == 2


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("fail", TunebookError, r"process 2 of the evaluation failed: ValueError: no"),
        ("large", DoesNotFitError, "a batch of 8 does not fit"),
    ],
)
def test_one_that_fails_is_told_and_answers_the_next(
    helpers: Helpers, text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        helpers.share("k", requests("the longest of all", "a longer one", text), answer)
    assert helpers.share("k", requests("ccc", "bb", "a"), answer) == ["k 0 CCC", "k 1 BB", "k 2 A"]


def test_an_error_of_our_own_does_not_mix_up_the_answers(helpers: Helpers) -> None:
    def fail(kind: str, shared: Sequence[Any]) -> list[str]:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        helpers.share("k", requests("ccc", "bb", "a"), fail)
    assert helpers.share("k", requests("fff", "ee", "d"), answer) == ["k 0 FFF", "k 1 EE", "k 2 D"]


@pytest.mark.parametrize("is_failing", [False, True], ids=["well", "failing"])
def test_nothing_is_left_at_work_afterwards(is_failing: bool) -> None:
    helpers = Helpers(AnswerProgress("test"))
    try:
        with helpers:
            helpers.start(load, [{"NUMBER": "1"}])
            helpers.share("k", requests("a", "b"), answer)
            if is_failing:
                raise KeyError
    except KeyError:
        pass
    (helper,) = helpers._helpers
    assert helper.process.exitcode in ((-15, 0) if is_failing else (0,))


def test_the_cards_are_dealt_evenly_and_contexts_stay_together() -> None:
    contexts = ["x" * length for length in (9, 1, 9, 5, 7, 3, 9, 1)]
    shares = deal(requests(*contexts), 3)
    assert sorted(index for share in shares for index in share) == list(range(8))
    assert [sorted(len(contexts[index]) for index in share) for share in shares] == [[9, 9, 9], [1, 1, 7], [3, 5]]
    distinct = deal(requests(*("x" * length for length in range(1, 13))), 3)
    lengths = [sum(index + 1 for index in share) for share in distinct]
    assert lengths == [26, 26, 26]  # 12 7 6 1, 11 8 5 2, 10 9 4 3


def test_one_that_cannot_load_the_model_says_why() -> None:
    with Helpers(AnswerProgress("test")) as helpers:
        helpers.start(load, [{"NUMBER": "none"}])
        with pytest.raises(TunebookError, match=r"ended with exit code 2\nIts last output:\n.*\n  evaluation: no such"):
            helpers.share("k", requests("a", "b"), answer)
