from __future__ import annotations

import io

from rich.console import Console

from tunebook.evaluate.progress import AnswerProgress


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def started(is_terminal: bool = False) -> tuple[AnswerProgress, Clock, io.StringIO]:
    clock, text = Clock(), io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=100)
    return AnswerProgress("evaluation after", console, clock), clock, text


def test_a_log_gets_the_task_and_how_many_of_its_requests() -> None:
    progress, clock, text = started()
    with progress:
        progress.begin_task("words", 2, 3)
        progress.expect(1000)
        progress.expect(200)
        clock.now += 4.9
        progress.advance(300)
        clock.now += 0.2
        progress.advance(400)
        progress.advance(500)
        progress.end_task("1,200 items, acc 0.5")
    assert text.getvalue().splitlines() == [
        "evaluation after: words (task 2 of 3): 700 of 1,200 requests",
        "evaluation after: words (task 2 of 3): 1,200 items, acc 0.5",
    ]


def test_each_task_is_counted_by_itself_and_a_single_one_has_no_number() -> None:
    progress, clock, text = started()
    for name in ("a", "b"):
        progress.begin_task(name, 1, 1)
        progress.expect(10)
        progress.advance(4)
    assert progress.num_done == 4
    clock.now += 6
    progress.advance(-1)
    assert text.getvalue() == "evaluation after: b: 3 of 10 requests\n"


def test_a_night_does_not_fill_the_log() -> None:
    progress, clock, text = started()
    progress.begin_task("long", 1, 1)
    progress.expect(100_000)
    for _ in range(36_000):  # ten hours
        clock.now += 1
        progress.advance()
    num_lines = len(text.getvalue().splitlines())
    assert 20 + 60 < num_lines < 20 + 140  # every 5 s for 100 s, then 14 each time that the time doubles


def test_a_terminal_gets_a_bar() -> None:
    progress, _, text = started(is_terminal=True)
    with progress:
        progress.begin_task("words", 1, 2)
        progress.expect(8)
        progress.advance(8)
        progress.say("a line of its own")
    shown = text.getvalue()
    assert "evaluation after: words (task 1 of 2)" in shown
    assert "8/8" in shown
    assert "evaluation after: a line of its own" in shown
    assert "requests" not in shown
