"""What a plan that is too large for its hosts is told: the part that is largest, and what is estimated to need less."""

from __future__ import annotations

import re

import pytest

from tunebook.errors import DoesNotFitError
from tunebook.plan.memory.host_memory import plan_host_memory

from ..plans import resolved

EIGHT = ("hardware=hopper", "hardware.gpus_per_node=8")
ON_DISK = ("parallelism=zero3_nvme", "parallelism.nvme_path=FOLDER")
LONG_ROWS = ("packing.row_length=32768", "activation=stored", "activation.offload=true")


def told(recipe: str, capacity: float, *overrides: str) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        plan_host_memory(resolved(recipe, *overrides), capacity).raise_if_too_large()
    return caught.value.message


def advised(message: str) -> dict[str, float]:
    """The words of every change that is named, with its GiB."""
    found = re.findall(r"(?:try|or) ((?:\S+=\S+ )+(?:without [^()]+)?)\((\S+) GiB\)", message)
    return {words.strip(): float(gib.replace(",", "")) for words, gib in found}


@pytest.mark.parametrize(
    ("capacity", "words", "largest", "expected"),
    [
        (
            16, (*EIGHT, "parallelism=fsdp"), "16.0 GiB, is the processes, one for each GPU",
            {"hardware.gpus_per_node=2": 15.5},
        ),
        (
            64, (*EIGHT, "parallelism=zero3_offload"),
            "99.3 GiB, is offloaded states (parallelism.offload_optimizer=cpu parallelism.offload_parameters=cpu)",
            {
                "parallelism=fsdp without parallelism.offload_optimizer, parallelism.offload_parameters": 27.5,
                "hardware.num_nodes=4": 52.3, "peft=lora": 49.6,
            },
        ),
        (
            64, (*EIGHT, "parallelism=fsdp", *LONG_ROWS), "1,701.6 GiB, is activations (activation.offload=true)",
            {"activation=checkpointing activation.offload=false": 27.5},
        ),
        (
            64, (*EIGHT, "parallelism=ddp", "optimizer=paged_adamw_32bit"),
            "183.9 GiB, is pages of the optimizer (optimizer=paged_adamw_32bit)",
            {"optimizer.name=adamw": 27.5, "hardware.gpus_per_node=2": 61.5, "peft=lora": 25.3},
        ),
        (
            64, EIGHT, "92.0 GiB, is the model while it is saved",
            {"parallelism=fsdp": 27.5, "hardware.gpus_per_node=4": 54.0},
        ),
        (
            64, (*EIGHT, "parallelism=fsdp_all_ranks_load"), "92.0 GiB, is the weights while they load",
            {"parallelism=fsdp": 27.5, "hardware.gpus_per_node=4": 54.0},
        ),
    ],
    ids=["processes", "states", "activations", "pages", "saving", "loading"],
)  # fmt: skip
def test_the_largest_part_and_what_makes_it_smaller_are_named(
    capacity: float, words: tuple[str, ...], largest: str, expected: dict[str, float]
) -> None:
    message = told("qwen3b_zero2", capacity, *words)
    assert f"; the largest part, {largest}; try " in message
    assert advised(message) == expected
    assert message.endswith("or say what the nodes really have: hardware.host_memory_gib=GIB")


@pytest.mark.parametrize("strategy", ["fsdp", "zero3_offload", "zero2"])
def test_what_is_named_is_what_its_own_plan_says(strategy: str) -> None:
    capacity = {"fsdp": 16.0, "zero3_offload": 64.0, "zero2": 64.0}[strategy]
    words = (*EIGHT, f"parallelism={strategy}")
    named = advised(told("qwen3b_zero2", capacity, *words))
    assert named
    for change, gib in named.items():
        change, _, without = change.partition(" without ")
        typed = {word.partition("=")[0]: word for word in (*words, *change.split())}
        typed = {key: word for key, word in typed.items() if key not in without.split(", ")}
        plan = plan_host_memory(resolved("qwen3b_zero2", *typed.values()), capacity)
        assert plan.fits is not False
        assert plan.memory.total == pytest.approx(gib, abs=0.05)


def test_a_disk_is_named_only_where_its_buffers_are_less_than_what_is_offloaded() -> None:
    small = told("qwen3b_zero2", 64.0, *EIGHT, "parallelism=zero3_offload")
    assert "zero3_nvme" not in small
    on_disk = told("qwen3b_zero2", 64.0, *EIGHT, *ON_DISK)
    assert "parallelism.offload_parameters=nvme" in on_disk and "zero3_nvme" not in on_disk
    large = told("llama2_70b_fsdp_1node", 1000.0)
    without = "without parallelism.offload_parameters"
    assert f"parallelism=zero3_nvme parallelism.nvme_path=FOLDER {without} (951.1 GiB)" in large


def test_memory_that_is_not_page_locked_is_not_rounded_up() -> None:
    words = (*EIGHT, "parallelism=zero3_offload")
    named = advised(told("qwen3b_zero2", 105.0, *words))
    assert named["parallelism.pin_memory=false"] == 96.5
    assert "pin_memory" not in told("qwen3b_zero2", 64.0, *words, "parallelism.pin_memory=false")


def test_a_gpu_alone_is_offered_what_it_has_alone() -> None:
    words = ("hardware=hopper", "hardware.gpus_per_node=1", "parallelism=fsdp_offload")
    assert advised(told("qwen05b_single", 4.0, *words)) == {
        "parallelism=single without parallelism.offload_parameters": 3.8
    }


@pytest.mark.parametrize(
    "typed", [[], ["parallelism.offload_parameters=cpu"], ["parallelism=zero3", "parallelism.offload_optimizer=cpu"]]
)
def test_what_was_typed_to_be_offloaded_is_said_to_go(typed: list[str]) -> None:
    """With it beside the other group the same refusal came back, or one of a key that the group does not have."""
    words = ("hardware=hopper", "hardware.num_nodes=1", "hardware.gpus_per_node=8", *typed)
    named = advised(told("llama3_8b_fsdp_offload", 60.0, *words))
    ((change, gib),) = [(change, gib) for change, gib in named.items() if change.startswith("parallelism=fsdp")]
    group, _, without = change.partition(" without ")
    kept = [word for word in words if word.partition("=")[0] not in (*without.split(", "), "parallelism")]
    plan = plan_host_memory(resolved("llama3_8b_fsdp_offload", *kept, group), 60.0)
    assert plan.fits and plan.memory.total == pytest.approx(gib, abs=0.05)


def test_where_nothing_is_enough_the_least_is_named() -> None:
    message = told("llama2_70b_fsdp_1node", 100.0)
    assert "; no change that was estimated is enough, peft=lora needs least (564.8 GiB); say what" in message
