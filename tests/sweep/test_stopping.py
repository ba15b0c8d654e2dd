from __future__ import annotations

import os
import signal

import pytest

from tunebook.sweep.stopping import Stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_request_reaches_every_trial_that_runs(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGINT)
    stopping = Stopping()
    asked: list[tuple[str, int]] = []
    with (
        stopping.listening(),
        stopping.asking(lambda count: asked.append(("one", count))),
    ):
        os.kill(os.getpid(), number)
        with stopping.asking(lambda count: asked.append(("other", count))):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert asked == [("one", 1), ("other", 1), ("one", 2), ("other", 2), ("one", 3)]
    assert stopping.num_requests == 3
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_comes_several_times_for_one_reason_is_one_request(number: signal.Signals) -> None:
    stopping = Stopping()
    asked: list[int] = []
    with stopping.listening(), stopping.asking(asked.append):
        for _ in range(3):
            os.kill(os.getpid(), number)
    assert asked == [1]


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stopping = Stopping()
        with stopping.listening():
            os.kill(os.getpid(), signal.SIGHUP)
        assert stopping.num_requests == 0
    finally:
        signal.signal(signal.SIGHUP, before)
