"""Training stands still while a checkpoint is written, and while it is waited for."""

from __future__ import annotations

import time

import pytest

from tunebook.checkpoint.save import Stall


def test_the_time_in_which_training_goes_on_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    stall = Stall()
    now += 2
    assert (stall.seconds, stall.age_s) == (2, 2)
    stall.stop()
    now += 5
    assert (stall.seconds, stall.age_s) == (2, 7)
    stall.go_on()
    now += 3
    assert (stall.seconds, stall.age_s) == (5, 10)
