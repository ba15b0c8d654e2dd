"""Ray's notice that a machine goes: when it is handed on, and how much time it leaves."""

from types import SimpleNamespace

import pytest

from tunebook.launch.node import Notice
from tunebook.launch.ray import notices
from tunebook.launch.ray.notices import NoticeWatch, notice_of


def info(deadline_ms=None, ranks=(1,)):
    """What Ray Train's get_preemption_info returns."""
    return SimpleNamespace(deadline_ms=deadline_ms, preempted_ranks=list(ranks))


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(notices, "_ASK_EVERY_S", 0.0)


@pytest.mark.parametrize(
    ("deadline_ms", "gone_in_s"),
    [(1_000_030_500, 30.5), (999_999_000, 0.0), (None, None)],
    ids=["ahead", "past", "unknown"],
)
def test_the_time_left_counts_from_now(deadline_ms, gone_in_s):
    assert notice_of(info(deadline_ms, [2, 3]), now=1_000_000.0) == Notice(ranks=(2, 3), gone_in_s=gone_in_s)


def test_asks_until_told_and_hands_that_on_once():
    answers = [None, None, info()]
    told = []
    watch = NoticeWatch(lambda: answers.pop(0), told.append)
    watch.start()
    watch.join(20)
    assert told == [Notice(ranks=(1,), gone_in_s=None)]
    assert (answers, watch.has_come) == ([], True)


def test_an_end_of_ray_is_no_notice():
    def ask():
        raise RuntimeError("the actor died")

    told = []
    watch = NoticeWatch(ask, told.append)
    watch.start()
    watch.join(20)
    assert (told, watch.has_come, watch.is_alive()) == ([], False, False)
