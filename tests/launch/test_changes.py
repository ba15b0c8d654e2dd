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
    # zero3 before zero2: only zero3 fits without checkpointing, which costs more on a V100 than zero3 loses
    assert words_of(fitting) == ["parallelism=fsdp", "parallelism=zero3", "parallelism=zero2"]
    for one in fitting:
        tried = draft_run("qwen3b_zero2", [*words, *one.change.words], [])
        assert (tried.exit_code, tried.memory.fits) == (0, True)
        assert tried.memory.memory.total == pytest.approx(one.total_gib)
        assert one.line().startswith(" ".join(one.change.words))


def test_where_auto_finds_nothing_that_fits_changes_do_and_none_is_what_it_took():
    words = ["parallelism=auto", "hardware.num_nodes=1"]
    asked = draft_run("llama2_70b_fsdp", words, [])
    assert (asked.exit_code, asked.resolution.config.parallelism.strategy.name) == (3, "fsdp")
    fitting = offered("llama2_70b_fsdp", *words)
    assert words_of(fitting) == ["parallelism=fsdp_offload", "parallelism=zero3_offload", "peft=lora"]
    for one in fitting:
        assert draft_run("llama2_70b_fsdp", [*words, *one.change.words], []).memory.fits is True


def test_the_fastest_comes_first_and_what_changes_learning_last():
    candidates = changes._candidates(draft_run("llama3_8b_ddp", ["activation=stored"], []))
    keeps = [change for change in candidates if not change.changes_learning]
    assert candidates[: len(keeps)] == keeps
    speeds = [change.speed or 0 for change in keeps]
    assert speeds == sorted(speeds, reverse=True)
    assert "parallelism=fsdp activation=checkpointing" in [" ".join(change.words) for change in keeps]


def test_parts_of_layers_are_recomputed_only_where_blocks_are_compiled():
    def words_offered(*words):
        return [" ".join(change.words) for change in changes._candidates(draft_run("llama3_8b_ddp", [*words], []))]

    compiled = words_offered("activation=stored", "hardware=hopper")
    assert compiled.index("activation=selective") < compiled.index("activation=checkpointing")
    assert "parallelism=fsdp activation=selective" in compiled
    assert not any("selective" in words for words in words_offered("activation=stored", "hardware=volta"))
    less = words_offered("activation=selective", "hardware=hopper")
    assert "activation=checkpointing" in less and not any("selective" in words for words in less)
    assert not any("activation" in words for words in words_offered("activation=checkpointing", "hardware=hopper"))


def test_what_fits_with_less_is_not_offered_with_more():
    fitting = offered(
        "qwen3b_zero2", "parallelism=ddp", "hardware=volta", "activation=stored", "training.max_length=512"
    )
    for one in fitting:
        others = [set(other.change.words) for other in fitting if other is not one]
        assert not any(other < set(one.change.words) for other in others)


def test_nothing_is_offered_where_nothing_fits():
    alone = ("hardware=turing", "hardware.gpus_per_node=1", "hardware.num_nodes=1", "hardware.memory_gib=8")
    assert offered("llama2_70b_fsdp", *alone) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("hardware.gpus_per_node=1",), "peft=qlora"),
        (("hardware.gpus_per_node=4", "hardware.memory_gib=12"), "parallelism=fsdp peft=qlora"),
    ],
)
def test_adapters_are_offered_also_in_4_bits_and_with_what_divides_the_model(words, expected):
    asked = ("hardware=ampere", "hardware.memory_gib=24", "hardware.host_memory_gib=64", *words)
    words = [*{word.partition("=")[0]: word for word in asked}.values()]
    assert expected in words_of(offered("llama3_8b_ddp", *words))


def test_speeds_of_a_pair_multiply_and_an_unknown_one_stays_unknown():
    fast, slow = Change(words=("a=1",), speed=0.8, note="x"), Change(words=("b=2",), speed=0.5, note="y")
    both = changes._both(fast, slow)
    assert (both.words, both.speed, both.note) == (("a=1", "b=2"), 0.4, "x; y")
    unknown = changes._both(fast, Change(words=("c=3",), speed=None, changes_learning=True))
    assert (unknown.speed, unknown.note, unknown.changes_learning) == (None, "x", True)


def test_the_cost_of_each_is_its_own_estimate_beside_that_of_the_run_as_asked():
    words = ["parallelism=ddp", "hardware=ampere", "activation=stored", "model.one_pass_head=false"]
    asked = draft_run("llama3_8b_ddp", words, []).time.tokens_per_second_per_gpu
    fitting = offered("llama3_8b_ddp", *words)
    assert len(fitting) == 3
    for one in fitting:
        tried = draft_run("llama3_8b_ddp", [*words, *one.change.words], []).time.tokens_per_second_per_gpu
        assert one.tokens_per_second_per_gpu == pytest.approx(tried)
        assert one.speed == pytest.approx(tried / asked)
        assert one.cost == f"estimated {tried:,.0f} tokens/s per GPU, {tried / asked:.0%} of the run as asked"
    speeds = [one.speed for one in fitting]
    assert speeds == sorted(speeds, reverse=True)


def test_the_order_follows_from_what_was_measured():
    by_words = {change.words: change.speed for change in (*changes._SHARDED, changes._CHECKPOINTING)}
    assert by_words == {
        ("parallelism=fsdp",): 1.0,
        ("parallelism=zero2",): pytest.approx(17_289 / 17_578),
        ("parallelism=zero3",): pytest.approx(7_969 / 17_578),
        ("activation=checkpointing",): pytest.approx(17_810 / 22_233),
    }


def test_as_json():
    change = Change(words=("parallelism=zero3",), speed=0.45)
    fitting = Fitting(change=change, total_gib=12.34567, tokens_per_second_per_gpu=1234.56, speed=0.45678)
    assert fitting.to_json() == {
        "overrides": ["parallelism=zero3"], "total_gib": 12.346, "tokens_per_second_per_gpu": 1234.6, "speed": 0.457,
        "cost": "estimated 1,235 tokens/s per GPU, 46% of the run as asked",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("speed", "cost"),
    [(None, "on the host; speed not estimated"), (50.0, "on the host; estimated 50 tokens/s per GPU")],
)
def test_what_has_no_estimate_says_so(speed, cost):
    change = Change(words=("parallelism=zero3_offload",), speed=None, note="on the host")
    assert Fitting(change=change, total_gib=1.0, tokens_per_second_per_gpu=speed).cost == cost
