"""What is offered where a run does not fit: it fits, it is in order, and nothing is offered that a rule refuses."""

from __future__ import annotations

import pytest

from tunebook.plan import draft
from tunebook.plan.advice import changes
from tunebook.plan.advice.changes import Change, FittingChange, changes_that_fit
from tunebook.plan.draft import draft_run
from tunebook.plan.memory import estimate_memory

from ..plans import NO_GPU

HOPPER = ("hardware=hopper", "hardware.gpus_per_node=8", "hardware.host_memory_gib=64")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(draft, "detect_machine", lambda: NO_GPU)


def offered(recipe, *words):
    return changes_that_fit(recipe, [*words], [], draft_run(recipe, [*words], []))


def words_of(fitting):
    return [" ".join(one.change.overrides) for one in fitting]


def test_three_changes_are_offered_and_each_is_a_plan_that_fits():
    words = ["parallelism=ddp", "hardware=volta"]
    assert draft_run("qwen3b_zero2", words, []).memory.fits is False
    fitting = offered("qwen3b_zero2", *words)
    # zero3 before zero2: only zero3 fits without checkpointing, which costs more on a V100 than zero3 loses
    assert words_of(fitting) == ["parallelism=fsdp", "parallelism=zero3", "parallelism=zero2"]
    for one in fitting:
        tried = draft_run("qwen3b_zero2", [*words, *one.change.overrides], [])
        assert (tried.exit_code, tried.memory.fits) == (0, True)
        assert tried.memory.memory.total == pytest.approx(one.total_gib)
        assert one.line().startswith(" ".join(one.change.overrides))


def test_where_auto_finds_nothing_that_fits_changes_do_and_none_is_what_it_took():
    words = ["parallelism=auto", "hardware.num_nodes=1"]
    asked = draft_run("llama2_70b_fsdp", words, [])
    assert (asked.exit_code, asked.resolution.config.parallelism.strategy.name) == (3, "fsdp")
    fitting = offered("llama2_70b_fsdp", *words)
    assert words_of(fitting) == ["parallelism=fsdp_offload", "parallelism=zero3_offload", "peft=lora"]
    for one in fitting:
        assert draft_run("llama2_70b_fsdp", [*words, *one.change.overrides], []).memory.fits is True


def test_the_fastest_comes_first_and_what_changes_learning_last():
    candidates = changes._candidates(draft_run("llama3_8b_ddp", ["activation=stored"], []))
    keeps = [change for change in candidates if not change.changes_learning]
    assert candidates[: len(keeps)] == keeps
    speeds = [change.speed or 0 for change in keeps]
    assert speeds == sorted(speeds, reverse=True)
    assert "parallelism=fsdp activation=checkpointing" in [" ".join(change.overrides) for change in keeps]


def test_parts_of_layers_are_recomputed_only_where_blocks_are_compiled():
    def words_offered(*words):
        return [" ".join(change.overrides) for change in changes._candidates(draft_run("llama3_8b_ddp", [*words], []))]

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
        others = [set(other.change.overrides) for other in fitting if other is not one]
        assert not any(other < set(one.change.overrides) for other in others)


def test_nothing_is_offered_where_nothing_fits():
    alone = ("hardware=turing", "hardware.gpus_per_node=1", "hardware.num_nodes=1", "hardware.memory_gib=4")
    assert offered("llama2_70b_fsdp", *alone) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("hardware.gpus_per_node=1",), "peft=qlora"),
        (("hardware.gpus_per_node=4", "hardware.memory_gib=7"), "parallelism=fsdp peft=qlora"),
    ],
)
def test_adapters_are_offered_also_in_4_bits_and_with_what_divides_the_model(words, expected):
    asked = ("hardware=ampere", "hardware.memory_gib=24", "hardware.host_memory_gib=64", *words)
    words = [*{word.partition("=")[0]: word for word in asked}.values()]
    assert expected in words_of(offered("llama3_8b_ddp", *words))


def test_speeds_of_a_pair_multiply_and_an_unknown_one_stays_unknown():
    fast, slow = Change(overrides=("a=1",), speed=0.8, note="x"), Change(overrides=("b=2",), speed=0.5, note="y")
    both = changes._combined(fast, slow)
    assert (both.overrides, both.speed, both.note) == (("a=1", "b=2"), 0.4, "x; y")
    unknown = changes._combined(fast, Change(overrides=("c=3",), speed=None, changes_learning=True))
    assert (unknown.speed, unknown.note, unknown.changes_learning) == (None, "x", True)


def test_the_cost_of_each_is_its_own_estimate_beside_that_of_the_run_as_asked():
    words = ["parallelism=ddp", "hardware=ampere", "activation=stored", "model.one_pass_head=false"]
    asked = draft_run("llama3_8b_ddp", words, []).time.tokens_per_second_per_gpu
    fitting = offered("llama3_8b_ddp", *words)
    assert len(fitting) == 3
    for one in fitting:
        tried = draft_run("llama3_8b_ddp", [*words, *one.change.overrides], []).time.tokens_per_second_per_gpu
        assert one.tokens_per_second_per_gpu == pytest.approx(tried)
        assert one.speed == pytest.approx(tried / asked)
        assert one.cost.endswith(f"estimated {tried:,.0f} tokens/s per GPU, {tried / asked:.0%} of the run as asked")
    speeds = [one.speed for one in fitting]
    assert speeds == sorted(speeds, reverse=True)


def test_the_order_follows_from_what_was_measured():
    by_words = {change.overrides: change.speed for change in (*changes._SHARDED, changes._CHECKPOINTING)}
    assert by_words == {
        ("parallelism=fsdp",): 1.0,
        ("parallelism=zero2",): pytest.approx(17_289 / 17_578),
        ("parallelism=zero3",): pytest.approx(7_969 / 17_578),
        ("activation=checkpointing",): pytest.approx(17_810 / 22_233),
    }


def test_as_json():
    change = Change(overrides=("parallelism=zero3",), speed=0.45)
    fitting = FittingChange(change=change, total_gib=12.34567, tokens_per_second_per_gpu=1234.56, speed=0.45678)
    assert fitting.to_json() == {
        "overrides": ["parallelism=zero3"], "total_gib": 12.346, "tokens_per_second_per_gpu": 1234.6, "speed": 0.457,
        "leave_out": [], "cost": "estimated 1,235 tokens/s per GPU, 46% of the run as asked", "host_gib": None,
        "warnings": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("speed", "cost"),
    [(None, "on the host; speed not estimated"), (50.0, "on the host; estimated 50 tokens/s per GPU")],
)
def test_what_has_no_estimate_says_so(speed, cost):
    change = Change(overrides=("parallelism=zero3_offload",), speed=None, note="on the host")
    assert FittingChange(change=change, total_gib=1.0, tokens_per_second_per_gpu=speed).cost == cost


def test_activations_that_fill_the_host_are_left_on_the_gpu(monkeypatch):
    candidates = changes._candidates

    def only(draft_to_mend):
        return [one for one in candidates(draft_to_mend) if "activation.offload=false" in one.overrides]

    monkeypatch.setattr(changes, "_candidates", only)
    long_rows = ("packing.row_length=32768", "activation=stored", "activation.offload=true")
    fitting = offered("qwen3b_zero2", *HOPPER, "parallelism=fsdp", *long_rows)
    assert words_of(fitting)[0] == "activation.offload=false activation=checkpointing"
    assert (round(fitting[0].total_gib, 1), fitting[0].change.changes_learning) == (26.6, False)
    assert fitting[0].cost.startswith("activations stay on the GPU; estimated ")


def test_a_paged_optimizer_that_fills_the_host_has_a_twin_that_does_not():
    fitting = offered("qwen3b_zero2", *HOPPER, "parallelism=ddp", "optimizer=paged_adamw_32bit")
    assert words_of(fitting)[0] == "optimizer=adamw"
    assert (round(fitting[0].total_gib, 1), fitting[0].change.changes_learning) == (72.4, False)


@pytest.mark.parametrize(("host_gib", "is_tried"), [(20, True), (4000, False)])
def test_what_spares_the_host_is_tried_only_where_the_host_is_too_small(host_gib, is_tried):
    words = ["hardware=hopper", "hardware.gpus_per_node=8", "parallelism=ddp", "activation.offload=true",
             "optimizer=paged_adamw_32bit", f"hardware.host_memory_gib={host_gib}"]  # fmt: skip
    candidates = changes._candidates(draft_run("qwen3b_zero2", words, []))
    tried = {" ".join(change.overrides) for change in candidates}
    sparing = {"activation.offload=false", "activation.offload=false activation=checkpointing", "optimizer=adamw"}
    assert sparing & tried == (sparing if is_tried else set())


def test_a_typed_key_that_a_change_has_no_use_for_is_said_to_be_left_out():
    words = ("hardware=ada", "parallelism=zero2", "hardware.gpus_per_node=4")
    plain, fitting = offered("qwen3b_zero2", *words), offered("qwen3b_zero2", *words, "parallelism.overlap_comm=true")
    expected = ["parallelism=fsdp", "parallelism=fsdp_offload", "parallelism=zero3_offload"]
    assert words_of(plain) == words_of(fitting) == expected
    assert [one.left_out for one in plain] == [(), (), ()]
    left_out = ("parallelism.overlap_comm=true",)
    assert [one.left_out for one in fitting] == [left_out, left_out, ()]  # zero3_offload knows it
    assert fitting[0].cost.startswith("leave out parallelism.overlap_comm=true; estimated ")
    assert fitting[0].to_json()["leave_out"] == ["parallelism.overlap_comm=true"]
    assert [one.total_gib for one in fitting[:2]] == [one.total_gib for one in plain[:2]]


def test_a_typed_answer_that_would_undo_a_change_is_left_out_and_a_number_is_not():
    words = ("hardware=hopper", "hardware.num_nodes=1", "hardware.gpus_per_node=8", "hardware.host_memory_gib=60")
    typed = ("parallelism.offload_parameters=cpu", "parallelism.wrap_min_num_parameters=1000000")
    fitting = offered("llama3_8b_fsdp_offload", *words, *typed)
    assert words_of(fitting)[0] == "parallelism=fsdp"
    assert fitting[0].left_out == ("parallelism.offload_parameters=cpu",)


def test_a_typed_key_that_would_bring_a_warning_is_left_out_too():
    words = (*HOPPER, "parallelism=zero3_nvme", "parallelism.nvme_path=/tmp")
    with_it = draft_run("qwen3b_zero2", [*words, "parallelism=zero3"], [])
    assert [problem.id for problem in with_it.problems] == ["parallelism-setting-ignored"]
    asked, zero3 = draft_run("qwen3b_zero2", [*words], []), Change(overrides=("parallelism=zero3",), speed=1.0)
    tried, left_out = changes._try(zero3, "qwen3b_zero2", [*words], [], asked)
    assert (tried.problems, left_out) == ([], ("parallelism.nvme_path=/tmp",))


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        (
            "dolly3b_zero3_nvme",
            ("parallelism=fsdp_grad_op", "hardware=turing", "hardware.gpus_per_node=2", "packing.row_length=32768"),
            "parallelism=fsdp_offload packing.row_length=512",
        ),
        (
            "qwen05b_single",
            ("hardware=turing", "hardware.gpus_per_node=1", "training.max_length=4096", "packing.row_length=65536"),
            "packing.row_length=4096",
        ),
    ],
)
def test_rows_that_are_too_long_are_made_shorter(recipe, words, expected, monkeypatch):
    monkeypatch.setattr(changes, "MAX_CHANGES", 1)
    fitting = offered(recipe, *words)
    assert words_of(fitting)[0] == expected
    assert "shorter rows, as many documents in each step" in fitting[0].change.note
    tried = draft_run(recipe, [*words, *fitting[0].change.overrides], [])
    assert (tried.exit_code, tried.memory.fits) == (0, True)


def test_rows_that_nobody_asked_for_are_not_made_shorter():
    asked = draft_run("llama3_8b_ddp", ["activation=stored", "hardware=hopper"], [])
    assert not any("row_length" in word for change in changes._candidates(asked) for word in change.overrides)


LONG = ("model=qwen3_4b", "dataset=synthetic", "training.global_samples=64", "parallelism=zero3",
        "model.facts.max_position_embeddings=262144", *HOPPER)  # fmt: skip


def groups_tried(*words):
    tried = [" ".join(change.overrides) for change in changes._candidates(draft_run(None, [*words], []))]
    return [word.partition("=")[2] for word in tried if word.startswith("parallelism.sequence_group_size=")]


@pytest.mark.parametrize(("tokens", "size"), [(131_072, 2), (262_144, 4)])
def test_a_row_that_is_too_long_for_a_gpu_is_offered_to_the_smallest_group_that_holds_it(tokens, size):
    words = [*LONG, f"training.max_length={tokens}"]
    assert draft_run(None, words, []).fits is not True
    fitting = offered(None, *words)
    (shared,) = [one for one in fitting if any("sequence_group_size" in word for word in one.change.overrides)]
    assert shared.change.overrides == (f"parallelism.sequence_group_size={size}",)
    assert f"{size} GPUs share each row" in shared.cost and not shared.change.changes_learning
    smaller = draft_run(None, [*words, f"parallelism.sequence_group_size={size // 2}"], [])
    assert smaller.fits is not True and draft_run(None, [*words, *shared.change.overrides], []).exit_code == 0


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ((), ["2", "4", "8"]),  # Qwen3-4B has 8 heads of keys and values
        (("hardware.gpus_per_node=6",), ["2"]),
        (("model=qwen25_3b",), ["2"]),
        (("parallelism.sequence_group_size=2", "training.max_length=4096"), ["4", "8"]),
        (("hardware.gpus_per_node=1", "parallelism=single"), []),
        (("packing=padded",), []),
        (("packing.row_length=8192",), []),  # rows of one document are shorter
        (("model=gemma3_4b",), ["2", "4"]),  # with an image tower, and 4 heads of keys and values
        (("model=gpt_oss_20b",), []),  # with a sink for each head
        (("hardware=cpu", "hardware.memory_gib=64", "parallelism=ddp"), []),
    ],
    ids=str,
)
def test_groups_are_tried_where_the_rules_allow_them_and_rows_cannot_be_shorter(words, sizes):
    found = groups_tried(*LONG, "training.max_length=4096", "packing.row_length=4096", *words)
    assert [size for size in found if " " not in size] == sizes


LONG_ROWS = ("hardware=hopper", "hardware.memory_gib=79.6", "model.facts.max_position_embeddings=1000000")


@pytest.mark.parametrize(
    ("words", "tokens", "expected", "said"),
    [
        (("hardware.gpus_per_node=1", "parallelism=single", "peft=lora", "model=llama31_8b"), 110_592,
         "activation.mlp_tile_tokens=4096", "blocks are not compiled with it"),
        (("hardware.gpus_per_node=4",), 163_840, "parallelism.sequence_group_size=2", "2 GPUs share each row"),
    ],
)  # fmt: skip
def test_long_documents_get_tiles_or_more_gpus(words, tokens, expected, said):
    rows = (f"training.max_length={tokens}", f"training.global_tokens={4 * tokens}")
    group = "parallelism.sequence_group_size=1"
    fitting = offered("qwen3_4b_long", *LONG_ROWS, *words, *rows, group)
    assert words_of(fitting)[0] == expected
    assert said in fitting[0].cost
    tried = draft_run("qwen3_4b_long", [*LONG_ROWS, *words, *rows, group, expected], [])
    assert (tried.exit_code, tried.memory.fits) == (0, True)


def test_short_rows_and_mixtures_of_experts_get_no_tiles():
    """Those of the latter are refused by a rule."""
    asked = draft_run("llama3_8b_ddp", ["activation=stored", "hardware=hopper"], [])
    assert not any("mlp_tile" in word for change in changes._candidates(asked) for word in change.overrides)
    words = ["training.max_length=65536", "hardware=hopper"]
    asked = draft_run("qwen3_30b_a3b_fsdp", words, [])
    assert any("mlp_tile" in word for change in changes._candidates(asked) for word in change.overrides)
    fitting = changes_that_fit("qwen3_30b_a3b_fsdp", words, [], asked)
    assert not any("mlp_tile" in word for word in words_of(fitting))


def test_one_gpu_is_offered_what_it_has_alone_and_nothing_that_a_rule_calls_useless():
    alone = ("hardware=hopper", "hardware.gpus_per_node=1", "hardware.host_memory_gib=4")
    words = (*alone, "parallelism=fsdp_offload")
    fitting = offered("qwen05b_single", *words)
    assert words_of(fitting)[0] == "parallelism=single"
    for one in fitting:
        assert draft_run("qwen05b_single", [*words, *one.change.overrides], []).problems == []
    several = changes._candidates(draft_run("qwen3b_zero2", list(HOPPER), []))
    assert several[0].overrides == ("parallelism=ddp",)
    assert not any("parallelism=single" in change.overrides for change in several)


def test_a_change_that_brings_a_warning_is_a_second_choice_that_says_so(monkeypatch):
    words = ("hardware=hopper", "hardware.gpus_per_node=1", "hardware.host_memory_gib=4", "parallelism=fsdp_offload")
    useless = Change(overrides=("parallelism=zero2",), speed=1.0)
    with_less = Change(overrides=(*useless.overrides, "activation=checkpointing"), speed=0.8)
    tried = draft_run("qwen05b_single", [*words, *useless.overrides], [])
    assert (tried.fits, [problem.id for problem in tried.problems]) == (True, ["sharding-on-one-rank"])
    good = Change(overrides=("parallelism=single",), speed=1.0)
    monkeypatch.setattr(changes, "_candidates", lambda _: [useless, with_less, good])
    fitting = offered("qwen05b_single", *words)
    assert words_of(fitting) == ["parallelism=single", "parallelism=zero2"]
    assert [one.warnings for one in fitting] == [(), ("sharding-on-one-rank",)]
    assert "warning sharding-on-one-rank; estimated " in fitting[1].line()
    assert fitting[1].to_json()["warnings"] == ["sharding-on-one-rank"]
    monkeypatch.setattr(changes, "MAX_CHANGES", 1)
    assert words_of(offered("qwen05b_single", *words)) == ["parallelism=single"]


def test_in_fp8_what_refuses_it_is_offered_in_bf16():
    words = ("hardware=hopper", "hardware.gpus_per_node=1", "parallelism=single")
    fitting = offered("llama3_8b_fp8", *words)
    zero = ["parallelism=zero2_offload precision=bf16", "parallelism=zero3_offload precision=bf16"]
    assert words_of(fitting) == [*zero, "peft=lora precision=bf16"]
    assert [one.change.changes_learning for one in fitting] == [False, False, True]
    assert all("computes in bf16 instead of fp8: more exactly" in one.cost for one in fitting)
    for one in fitting:
        tried = draft_run("llama3_8b_fp8", [*words, *one.change.overrides], [])
        assert (tried.exit_code, tried.fits, tried.problems) == (0, True, [])
    fitting = offered("llama3_8b_fp8", *words, "hardware.memory_gib=24")  # too little for ZeRO's gradients
    adapters = ["peft=lora precision=bf16", "peft=qlora precision=bf16"]
    assert words_of(fitting) == ["parallelism=fsdp_offload", *adapters]
    assert [one.warnings for one in fitting] == [("fp8-not-compiled",), (), ()]


def test_another_optimizer_is_offered_by_the_key_that_one_was_set_by():
    """The group's answer would leave the key as it is, and the change would change nothing."""
    words = (*HOPPER, "parallelism=single", "hardware.gpus_per_node=1", "optimizer.name=adamw")
    candidates = [" ".join(one.overrides) for one in changes._candidates(draft_run("qwen3b_zero2", [*words], []))]
    assert "optimizer.name=adamw_8bit" in candidates
    assert not any(word.startswith("optimizer=") for change in candidates for word in change.split())
    words = (*HOPPER, "parallelism=ddp", "optimizer.name=paged_adamw_32bit")
    assert words_of(offered("qwen3b_zero2", *words))[0] == "optimizer.name=adamw"


def test_an_optimizer_that_a_strategy_refuses_is_offered_as_adamw_beside_it():
    words = ("hardware=volta", "hardware.gpus_per_node=1", "hardware.memory_gib=16", "parallelism=single")
    fitting = offered("qwen3b_zero2", *words, "optimizer=paged_adamw_8bit")
    full = ["parallelism=fsdp_offload optimizer=adamw", "parallelism=zero3_offload optimizer=adamw"]
    assert words_of(fitting) == [*full, "peft=lora"]
    for one in fitting:
        tried = draft_run("qwen3b_zero2", [*words, "optimizer=paged_adamw_8bit", *one.change.overrides], [])
        assert (tried.exit_code, tried.fits, tried.problems) == (0, True, [])
    notes = [one.change.note for one in fitting]
    moved = "weights and optimizer state in host memory"
    assert notes[:2] == [f"{moved}; optimizer state in 32 bits instead of 8: learns no less exactly"] * 2
    of_32_bits = offered("qwen3b_zero2", *words, "optimizer=paged_adamw_32bit")
    assert of_32_bits[0].change.note == f"{moved}; the same steps"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (("optimizer=adamw_8bit",), "parallelism=fsdp optimizer=adamw"),
        (("optimizer.name=adamw_8bit",), "parallelism=fsdp optimizer.name=adamw"),  # which optimizer=adamw leaves
        (("precision=fp8",), "parallelism=zero3 precision=bf16"),
        (("precision.compute=fp8",), "parallelism=fsdp peft=lora precision.compute=bf16"),
        (("precision=fp8", "optimizer=adamw_8bit"), "parallelism=zero3_offload optimizer=adamw precision=bf16"),
        (("optimizer=muon",), "parallelism=zero3 optimizer=adamw"),
        (("optimizer=adafactor",), "parallelism=fsdp optimizer=adamw"),
    ],
)
def test_only_what_a_rule_refuses_has_another_answer_beside_it(typed, expected):
    words = [*HOPPER, "parallelism=ddp", *typed]
    asked = draft_run("llama3_8b_ddp", words, [])
    candidates = [" ".join(change.overrides) for change in changes._candidates(asked)]
    assert expected in candidates
    assert expected.rpartition(" ")[0] not in candidates
    assert ("optimizer=adamw_8bit" in candidates) is not any("optimizer" in word for word in typed)
    assert draft_run("llama3_8b_ddp", [*words, *expected.split()], []).exit_code != 2


@pytest.mark.parametrize(
    ("words", "host"),
    [
        ((), ", and 816.9 GiB of each host, whose capacity is unknown"),
        (("hardware.host_memory_gib=1000",), ", and 816.9 GiB of each host"),
    ],
)
def test_what_is_moved_to_the_host_says_how_much_of_it_that_takes(words, host):
    offload, *_, adapter = offered("llama2_70b_fsdp", *words)
    assert offload.line().startswith(f"parallelism=fsdp_offload   (18.0 GiB{host}; weights and optimizer state in ")
    asked = draft_run("llama2_70b_fsdp", [*words, "parallelism=fsdp_offload"], [])
    assert offload.to_json()["host_gib"] == pytest.approx(asked.host.memory.total, abs=0.001)
    assert "of each host" not in adapter.line()  # nothing is moved there
    assert adapter.to_json()["host_gib"] > 0


def test_a_cpu_is_not_offered_what_moves_states_to_its_own_memory():
    words = ["model=qwen25_7b", "dataset=synthetic", "training.global_samples=64", "launcher=ray"]
    asked = draft_run(None, words, [])
    assert (asked.fits, asked.resolution.config.hardware.generation.name) == (False, "cpu")
    assert not any("offload" in word for change in changes._candidates(asked) for word in change.overrides)


def test_passes_that_are_too_large_are_made_smaller_beside_what_makes_room_for_the_states():
    words = ["model=qwen25_7b", "dataset=synthetic", "training.global_samples=64", "hardware=hopper", "packing=padded"]
    words += ["hardware.gpus_per_node=1", "training.micro_batch_size=64", "training.max_length=8192"]
    fitting = changes_that_fit(None, words, [], draft_run(None, words, []))
    assert "parallelism=zero3_offload training.micro_batch_size=1" in words_of(fitting)


def tried_words(recipe, *words, monkeypatch):
    """What is composed to find changes, without the words that were typed."""
    tried = []

    def count(recipe, overrides, recipes_dirs):
        tried.append(overrides[len(words) :])
        return draft_run(recipe, overrides, recipes_dirs)

    asked = draft_run(recipe, [*words], [])
    monkeypatch.setattr(changes, "draft_run", count)
    changes_that_fit(recipe, [*words], [], asked)
    return tried


def test_what_cannot_fit_by_its_states_is_not_composed(monkeypatch):
    tried = tried_words("llama2_70b_fsdp", monkeypatch=monkeypatch)
    # Each GPU of ZeRO-2 has 4 bytes for each of 68,976,648,192 weights, and DDP's more.
    assert draft_run("llama2_70b_fsdp", ["parallelism=zero2"], []).memory.memory.weights > 80
    hopeless = {"parallelism=ddp", "parallelism=zero2", "parallelism=zero2_offload"}
    assert not hopeless & {word for words in tried for word in words}
    assert ["parallelism=fsdp_offload"] in tried  # its states have room
    assert ["parallelism=zero3"] not in tried  # with its master copy 80.3 GiB
    # A key of its own may move the states away, so then it is tried.
    tuned = ("parallelism.offload_parameters=cpu",)
    assert ["parallelism=ddp"] in tried_words("llama2_70b_fsdp", *tuned, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "words",
    [["parallelism=ddp"], ["parallelism=zero2"], ["parallelism=zero2_offload"], ["parallelism=fsdp"],
     ["parallelism=zero3", "activation=checkpointing"], ["optimizer=adamw_8bit"],
     ["parallelism=zero3", "precision=bf16"], ["parallelism=fsdp", "optimizer.name=adamw", "precision.compute=bf16"],
     ["peft=lora"], ["peft=qlora"], ["peft=lora", "parallelism=fsdp"]],
)  # fmt: skip
def test_nothing_that_has_room_is_told_without_composing_to_have_none(words):
    asked = draft_run("llama3_8b_ddp", ["hardware=hopper"], [])
    config = draft_run("llama3_8b_ddp", ["hardware=hopper", *words], []).resolution.config
    estimate = estimate_memory(config, config.model.facts)
    for room, is_hopeless in ((estimate.states_gib * 0.9, True), (estimate.total_gib * 1.001, False)):
        asked.composition.config.hardware.memory_gib = room
        assert changes._exceeds_by_states(Change(overrides=tuple(words), speed=None), asked, []) is is_hopeless


def test_what_is_refused_is_composed_once_and_not_again_with_what_is_no_cure(monkeypatch):
    words = ("hardware=cpu", "activation=stored")
    tried = tried_words("qwen3b_zero2", *words, monkeypatch=monkeypatch)
    assert tried.count(["peft=qlora"]) == 1
    assert ["peft=qlora", "activation=checkpointing"] not in tried


def test_the_strategy_without_the_offload_that_was_asked_for_is_another():
    candidates = changes._candidates(draft_run("qwen3b_zero2", [*HOPPER, "parallelism=fsdp_offload"], []))
    words = [change.overrides for change in candidates]
    assert ("parallelism=fsdp",) in words and ("parallelism=fsdp_offload",) not in words
