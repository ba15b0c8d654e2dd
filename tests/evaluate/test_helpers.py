"""Requests shared among processes; the processes here are real, only what they answer is made up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from tunebook.errors import DoesNotFitError
from tunebook.evaluate.helpers import HelperError, Helpers, deal
from tunebook.evaluate.helping import ToldProgress, serve
from tunebook.evaluate.progress import AnswerProgress

# Answers with its number and the text in capitals, but dies, fails or runs out of memory where the text says so.
PROGRAM = """
import os, sys
from multiprocessing.connection import Connection
line = Connection(int(sys.argv[-1]))
print("helper at work", file=sys.stderr, flush=True)
while True:
    try:
        kind, arguments = line.recv()
    except EOFError:
        break
    texts = [text for text, *_ in arguments]
    if "die" in texts:
        os.kill(os.getpid(), 9)
    elif "fail" in texts:
        line.send(("failed", "ValueError: no"))
    elif "large" in texts:
        line.send(("no-memory", "a batch of 8 does not fit"))
    else:
        line.send(("said", "batch size auto: 8 ran out of memory, 4 fits"))
        line.send(("count", len(texts)))
        line.send(("answers", [f"{kind} {os.environ['NUMBER']} {text.upper()}" for text in texts]))
"""


def requests(*texts: str) -> list[Any]:
    return [SimpleNamespace(args=(text, " answer")) for text in texts]


def answer(kind: str, shared: Sequence[Any]) -> list[str]:
    return [f"{kind} 0 {request.args[0].upper()}" for request in shared]


@pytest.fixture
def helpers() -> Iterator[Helpers]:
    with Helpers(progress=AnswerProgress("test")) as started:
        started.start([sys.executable, "-c", PROGRAM], [{"NUMBER": "1"}, {"NUMBER": "2"}])
        yield started


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


def test_one_that_dies_costs_what_it_was_asked_and_is_not_asked_again(helpers: Helpers) -> None:
    with pytest.raises(HelperError, match=r"was killed by signal 9\nThe last it said:\n  helper at work"):
        helpers.share("k", requests("a long text of ours", "another of theirs", "die"), answer)
    assert len([helper for helper in helpers._helpers if helper.is_lost]) == 1
    answers = helpers.share("k", requests("a", "b", "c", "d"), answer)
    assert sorted(text.rpartition(" ")[2] for text in answers) == ["A", "B", "C", "D"]
    assert len({text.split(" ")[1] for text in answers}) == 2


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("fail", HelperError, r"process 2 of the evaluation failed: ValueError: no"),
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
    helpers = Helpers(progress=AnswerProgress("test"))
    try:
        with helpers:
            helpers.start([sys.executable, "-c", PROGRAM], [{"NUMBER": "1"}])
            helpers.share("k", requests("a", "b"), answer)
            if is_failing:
                raise KeyError
    except KeyError:
        pass
    (helper,) = helpers._helpers
    assert helper.process.returncode in ((-15, 0) if is_failing else (0,))


def test_the_cards_are_dealt_evenly_and_contexts_stay_together() -> None:
    contexts = ["x" * length for length in (9, 1, 9, 5, 7, 3, 9, 1)]
    shares = deal(requests(*contexts), 3)
    assert sorted(index for share in shares for index in share) == list(range(8))
    assert [sorted(len(contexts[index]) for index in share) for share in shares] == [[9, 9, 9], [1, 1, 7], [3, 5]]
    distinct = deal(requests(*("x" * length for length in range(1, 13))), 3)
    lengths = [sum(index + 1 for index in share) for share in distinct]
    assert lengths == [26, 26, 26]  # 12 7 6 1, 11 8 5 2, 10 9 4 3


def test_a_helper_answers_until_its_pipe_is_closed() -> None:
    ours, theirs = Pipe()
    seen: list[tuple[str, list[Any]]] = []

    def answer_some(kind: str, shared: Sequence[Any]) -> list[Any]:
        seen.append((kind, [request.args for request in shared]))
        if kind == "broken":
            raise ValueError("no such kind")
        if kind == "large":
            raise DoesNotFitError("too large")
        progress.say("4 fits")
        progress.advance(len(shared))
        return [request.args[0] + "!" for request in shared]

    progress = ToldProgress(theirs)
    helper = threading.Thread(target=serve, args=(theirs, answer_some, progress))
    helper.start()
    said = []
    for kind in ("loglikelihood", "broken", "large", "loglikelihood"):
        ours.send((kind, [("a", " b"), ("c", " d")]))
        said += receive_to_result(ours)
    ours.close()
    helper.join(timeout=20)
    assert not helper.is_alive()
    answered = [("said", "4 fits"), ("answers", ["a!", "c!"])]
    assert said == [*answered, ("failed", "ValueError: no such kind"), ("no-memory", "too large"), *answered]
    assert seen[0] == ("loglikelihood", [("a", " b"), ("c", " d")])
    assert progress.num_done == 4


def receive_to_result(line: Connection) -> list[Any]:
    """What comes over a pipe up to a result, without the counts."""
    found: list[Any] = []
    while not found or found[-1][0] in ("count", "said"):
        found.append(line.recv())
    return [message for message in found if message[0] != "count"]
