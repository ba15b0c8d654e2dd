"""What was asked for against what was found, on every rank."""

import pytest

from tunebook.errors import InvalidTrainingError
from tunebook.parallel.expected import expected_parallelism, require_expected, require_fp8

FSDP = {
    "strategy": "fsdp", "wrapper": "FSDPQwen2ForCausalLM", "ranks": 4, "mesh": [4], "offload_parameters": "none",
    "whole_parameters": 0, "weights": "fp32", "gathered": "bf16", "reduced": "fp32",
    "unit_classes": ["Qwen2DecoderLayer"],
}  # fmt: skip
ZERO2 = {
    "strategy": "zero2", "wrapper": "DeepSpeedEngine", "ranks": 4, "autocast": "bf16", "offload_optimizer": "none",
    "offload_parameters": "none",
}  # fmt: skip
DDP = {"strategy": "ddp", "wrapper": "DistributedDataParallel", "ranks": 4}


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ("fsdp", FSDP),
        ("fsdp_offload", FSDP | {"offload_parameters": "cpu"}),
        ("fsdp_grad_op", FSDP | {"strategy": "fsdp_grad_op"}),
        ("zero2", ZERO2),
        ("zero3_nvme", ZERO2 | {"strategy": "zero3", "offload_optimizer": "nvme", "offload_parameters": "nvme"}),
        ("ddp", DDP),
    ],
)
def test_what_was_asked_for_passes(config_on, choice, found):
    require_expected(config_on(choice, 4), [found] * 4, found.get("unit_classes", []))


def test_hsdp_is_a_mesh_of_copies_and_shards(config_on):
    expected = expected_parallelism(config_on("hsdp", 4, "parallelism.shard_group_size=2"))
    assert (expected["strategy"], expected["mesh"], expected["ranks"]) == ("hsdp", [2, 2], 4)


def test_ddp_on_one_rank_is_the_bare_module(config_on):
    assert expected_parallelism(config_on("ddp", 1))["strategy"] == "single"
    for found in ({"strategy": "single", "wrapper": "Qwen2ForCausalLM", "ranks": 1}, DDP | {"ranks": 1}):
        require_expected(config_on("ddp", 1), [found], [])


@pytest.mark.parametrize(
    ("choice", "found", "words"),
    [
        ("fsdp", DDP, "strategy fsdp was asked for and ddp found.*DistributedDataParallel"),
        ("fsdp_offload", FSDP, "offload_parameters cpu was asked for and none found"),
        ("fsdp", FSDP | {"whole_parameters": 2}, "whole_parameters 0 was asked for and 2 found"),
        ("fsdp", FSDP | {"gathered": "fp32"}, "gathered bf16 was asked for and fp32 found"),
        ("fsdp", FSDP | {"reduced": "bf16"}, "reduced fp32 was asked for and bf16 found"),
        ("fsdp", FSDP | {"unit_classes": ["Embedding"]}, "units of Qwen2DecoderLayer were asked for"),
        ("zero2", ZERO2 | {"strategy": "zero1"}, "strategy zero2 was asked for and zero1 found"),
        ("zero2", ZERO2 | {"autocast": None}, "autocast bf16 was asked for and None found"),
        ("ddp", DDP | {"ranks": 2}, "ranks 4 was asked for and 2 found"),
    ],
)
def test_anything_else_is_refused_by_name_on_the_rank_that_has_it(config_on, choice, found, words):
    asked = {"fsdp": FSDP, "fsdp_offload": FSDP | {"offload_parameters": "cpu"}, "zero2": ZERO2, "ddp": DDP}[choice]
    units = asked.get("unit_classes", [])
    with pytest.raises(InvalidTrainingError, match=f"parallelism=.* on rank 2 {words}") as caught:
        require_expected(config_on(choice, 4), [asked, asked, found, asked], units)
    assert (caught.value.exit_code, caught.value.problem_id) == (7, "other-parallelism")


def test_bf16_weights_are_expected_where_they_were_asked_for(config_on):
    expected = expected_parallelism(config_on("fsdp", 4, "precision.master_weights=bf16"))
    assert (expected["weights"], expected["gathered"], expected["reduced"]) == ("bf16", "bf16", "bf16")
    assert "weights" not in expected_parallelism(config_on("fsdp", 4, "peft=lora"))


def test_what_computes_in_fp16_is_gathered_so_and_summed_in_fp32(config_on):
    expected = expected_parallelism(config_on("fsdp", 4, "precision=fp16"))
    assert (expected["weights"], expected["gathered"], expected["reduced"]) == ("fp32", "fp16", "fp32")


def test_fp8_layers_are_those_that_were_converted_on_every_rank(config_on):
    fp8 = config_on("fsdp", 2, "precision=fp8")
    require_fp8(fp8, [FSDP | {"fp8_layers": 72}] * 2, 72)
    require_fp8(config_on("fsdp", 2), [FSDP] * 2, 0)  # bf16


@pytest.mark.parametrize(
    ("second", "num_layers", "words"),
    [
        (FSDP | {"fp8_layers": 71}, 72, "on rank 1 71 linear layers multiply in fp8, and 72 were converted"),
        (FSDP, 72, "on rank 1 0 linear layers multiply in fp8, and 72 were converted"),
        (FSDP | {"fp8_layers": 0}, 0, "on rank 0 72 linear layers multiply in fp8, and 0 were converted"),
    ],
)
def test_a_rank_that_is_not_in_fp8_is_named(config_on, second, num_layers, words):
    with pytest.raises(InvalidTrainingError, match=words) as caught:
        require_fp8(config_on("fsdp", 2, "precision=fp8"), [FSDP | {"fp8_layers": 72}, second], num_layers)
    assert (caught.value.exit_code, caught.value.problem_id) == (7, "not-in-fp8")
