"""One piece of work at a time beside the training; whoever waits for it is told how it ended."""

from __future__ import annotations

import threading

import pytest

from tunebook.checkpoint.save import Background

PATIENCE_S = 60


def test_work_is_done_in_a_thread_that_no_end_of_the_process_waits_for() -> None:
    background, may_end, done = Background(), threading.Event(), []

    def work() -> None:
        may_end.wait(PATIENCE_S)
        done.append(threading.current_thread())

    background.start(work)
    assert background.is_busy
    assert done == []
    may_end.set()
    assert background.wait() is None
    assert not background.is_busy
    (thread,) = done
    assert thread is not threading.current_thread()
    assert thread.daemon


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_the_error_that_it_ended_with_is_told_once(error: BaseException) -> None:
    def work() -> None:
        raise error

    background = Background()
    background.start(work)
    assert background.wait() is error
    assert background.wait() is None
    background.start(lambda: None)
    assert background.wait() is None
