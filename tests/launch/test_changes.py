"""What is offered where a run does not fit: it fits, it is in order, and nothing is offered that a rule refuses."""

from __future__ import annotations

import pytest

from tunebook.hardware.detect import Machine
from tunebook.launch import changes, draft
from tunebook.launch.changes import Change, Fitting, changes_that_fit
from tunebook.launch.draft import draft_run


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    machine = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
    monkeypatch.setattr(draft, "detect_machine", lambda: machine)


def offered(recipe, *words):
    return changes_that_fit(recipe, [*words], [], draft_run(recipe, [*words], []))


def words_of(fitting):
    return [" ".join(one.change.words) for one in fitting]


def test_three_changes_are_offered_and_each_is_a_plan_that_fits():
    words = ["parallelism=ddp", "hardware=volta"]
    assert draft_run("qwen3b_zero2", words, []).memory.fits is False
    fitting = offered("qwen3b_zero2", *words)
    assert words_of(fitting) == ["parallelism=fsdp", "parallelism=zero2", "parallelism=zero3"]
    for one in fitting:
        tried = draft_run("qwen3b_zero2", [*words, *one.change.words], [])
        assert (tried.exit_code, tried.memory.fits) == (0, True)
        assert tried.memory.memory.total == pytest.approx(one.total_gib)
        assert one.line().startswith(" ".join(one.change.words))


def test_the_fastest_comes_first_and_what_changes_learning_last():
    candidates = changes._candidates(draft_run("llama3_8b_ddp", ["activation=stored"], []))
    keeps = [change for change in candidates if not change.changes_learning]
    assert candidates[: len(keeps)] == keeps
    speeds = [change.speed or 0 for change in keeps]
    assert speeds == sorted(speeds, reverse=True)
    assert "parallelism=fsdp activation=checkpointing" in [" ".join(change.words) for change in keeps]


def test_what_fits_with_less_is_not_offered_with_more():
    fitting = offered(
        "qwen3b_zero2", "parallelism=ddp", "hardware=volta", "activation=stored", "training.max_length=512"
    )
    for one in fitting:
        others = [set(other.change.words) for other in fitting if other is not one]
        assert not any(other < set(one.change.words) for other in others)


def test_nothing_is_offered_where_nothing_fits():
    assert offered("llama2_70b_fsdp", "hardware=turing", "hardware.gpus_per_node=1", "hardware.num_nodes=1") == []


def test_speeds_of_a_pair_multiply_and_an_unknown_one_stays_unknown():
    fast, slow = Change(words=("a=1",), speed=0.8, cost="x"), Change(words=("b=2",), speed=0.5, cost="y")
    both = changes._both(fast, slow)
    assert (both.words, both.speed, both.cost) == (("a=1", "b=2"), 0.4, "x; and y")
    unknown = changes._both(fast, Change(words=("c=3",), speed=None, cost="z", changes_learning=True))
    assert (unknown.speed, unknown.changes_learning) == (None, True)


def test_as_json():
    change = Change(words=("parallelism=zero3",), speed=0.45, cost="slower")
    assert Fitting(change=change, total_gib=12.34567).to_json() == {
        "overrides": ["parallelism=zero3"], "total_gib": 12.346, "speed": 0.45, "cost": "slower",
    }  # fmt: skip
