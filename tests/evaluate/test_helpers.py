"""Requests shared among processes; the processes here are real, only their answers are made up."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tunebook.errors import DoesNotFitError, RequestError, TunebookError
from tunebook.evaluate.helpers import Helpers, deal
from tunebook.evaluate.progress import AnswerProgress


def load(progress: AnswerProgress) -> Callable[[str, Sequence[Any]], list[str]]:
    """Answers with its number and the text in capitals, but dies or runs out of memory if the text says so."""
    if os.environ["NUMBER"] == "none":
        raise RequestError("no such model")

    def answer(kind: str, requests: Sequence[Any]) -> list[str]:
        texts = [request.args[0] for request in requests]
        if "die" in texts:
            os.kill(os.getpid(), 9)
        if "large" in texts:
            raise DoesNotFitError("a batch of 8 does not fit")
        progress.advance(len(texts))
        return [f"{kind} {os.environ['NUMBER']} {text.upper()}" for text in texts]

    return answer


def requests(*texts: str) -> list[Any]:
    return [SimpleNamespace(args=(text, " answer")) for text in texts]


def answer(kind: str, shared: Sequence[Any]) -> list[str]:
    return [f"{kind} 0 {request.args[0].upper()}" for request in shared]


PROGRESS = AnswerProgress("test")


@pytest.fixture(scope="module")
def helpers() -> Iterator[Helpers]:
    """Two helpers that all tests share."""
    with Helpers(PROGRESS) as started:
        started.start(load, [{"NUMBER": "1"}, {"NUMBER": "2"}])
        yield started
    assert multiprocessing.active_children() == []


def test_answers_come_back_in_the_order_of_the_requests_and_are_counted(helpers: Helpers) -> None:
    texts = [f"text {'x' * (number % 5)} {number}" for number in range(11)]
    PROGRESS.begin_task("task", 1, 1)
    for kind in ("generate_until", "loglikelihood"):
        answers = helpers.share(kind, requests(*texts), answer)
        assert [text.split(" ", 2)[2] for text in answers] == [text.upper() for text in texts]
        assert {text.split(" ", 2)[0] for text in answers} == {kind}
    # The first process counts its own by itself.
    assert PROGRESS.others.value == 2 * sum(len(share) for share in deal(requests(*texts), 3)[1:])


def test_fewer_requests_than_processes_are_answered(helpers: Helpers) -> None:
    assert helpers.share("k", requests("a"), answer) == ["k 0 A"]
    assert helpers.share("k", [], answer) == []


@pytest.mark.parametrize("text", ["large", "die"])
def test_one_that_fails_or_dies_costs_one_task(helpers: Helpers, text: str) -> None:
    with pytest.raises(DoesNotFitError if text == "large" else TunebookError):
        helpers.share("k", requests("the longest of all", "a longer one", text), answer)
    answers = helpers.share("k", requests("ccc", "bb", "a"), answer)
    assert [one.rpartition(" ")[2] for one in answers] == ["CCC", "BB", "A"]


def test_an_error_of_our_own_does_not_mix_up_the_answers(helpers: Helpers) -> None:
    def fail(kind: str, shared: Sequence[Any]) -> list[str]:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        helpers.share("k", requests("ccc", "bb", "a"), fail)
    answers = helpers.share("k", requests("fff", "ee", "d"), answer)
    assert [one.rpartition(" ")[2] for one in answers] == ["FFF", "EE", "D"]


def test_one_that_cannot_load_the_model_fails_the_task() -> None:
    with Helpers(AnswerProgress("test")) as helpers:
        helpers.start(load, [{"NUMBER": "none"}])
        with pytest.raises(TunebookError) as error:
            helpers.share("k", requests("a", "b"), answer)
        assert error.value.problem_id == "evaluation-helper"


def test_requests_are_dealt_evenly_and_contexts_stay_together() -> None:
    contexts = ["x" * length for length in (9, 1, 9, 5, 7, 3, 9, 1)]
    shares = deal(requests(*contexts), 3)
    assert sorted(index for share in shares for index in share) == list(range(8))
    assert [sorted(len(contexts[index]) for index in share) for share in shares] == [[9, 9, 9], [1, 1, 7], [3, 5]]
    distinct = deal(requests(*("x" * length for length in range(1, 13))), 3)
    lengths = [sum(index + 1 for index in share) for share in distinct]
    assert lengths == [26, 26, 26]  # 12 7 6 1, 11 8 5 2, 10 9 4 3
