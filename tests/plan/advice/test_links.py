"""ZeRO-2 or ZeRO-3: the arithmetic, and the advice for recipes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tunebook.data.batch import solve_batch
from tunebook.hardware.bandwidth import ALL_REDUCE, Bandwidth
from tunebook.plan.advice.links import Costs, LinkAdvice, advise, costs_of
from tunebook.plan.rules import check

from ...doctor.conftest import h200, machine_with, measured, resolved

FOUR = machine_with(*(h200(index) for index in range(4)))
COSTS = Costs(
    num_parameters=10**9, element_bytes=2, num_gpus=4, tokens_per_pass=4096, passes_per_step=1, operations_per_token=6,
    trains_all=True, is_fsdp=False, peak_tflops=989.0, bus_gb_per_s=100.0,
)  # fmt: skip


def test_the_arithmetic_by_hand() -> None:
    assert COSTS.gathered_bytes_per_pass == pytest.approx(4.5e9)  # 3 x 1e9 x 2 bytes x 3/4
    assert COSTS.gathering_s == pytest.approx(0.045)
    assert COSTS.computing_s == pytest.approx(6 * 1e9 * 4096 / 989e12)  # 24.8 ms
    assert COSTS.needed_gb_per_s == pytest.approx(181.09, abs=0.01)
    assert COSTS.needed_tokens == 7418
    assert not COSTS.hides


def test_zero3_moves_one_and_a_half_times_as_much_in_a_step_of_one_pass_and_up_to_three_times_in_more() -> None:
    assert COSTS.gathered_bytes_per_pass / COSTS.kept_bytes_per_step == pytest.approx(1.5)
    many = replace(COSTS, passes_per_step=99)
    assert 99 * many.gathered_bytes_per_pass / many.kept_bytes_per_step == pytest.approx(2.97)
    assert "(2.97 times what ZeRO-2 moves a step)" in many.text("ZeRO-2", "ZeRO-3")


def test_fsdp_moves_one_and_a_half_times_as_much_however_many_passes_a_step_has() -> None:
    """It shards the weights again after each backward pass and reduces the gradients of each."""
    for passes in (1, 2, 99):
        fsdp = replace(COSTS, is_fsdp=True, passes_per_step=passes)
        assert fsdp.kept_bytes_per_step == pytest.approx(passes * 3e9)  # 2 x 1e9 x 2 bytes x 3/4
        assert "(1.5 times what FSDP without resharding moves a step)" in fsdp.text("FSDP without resharding", "FSDP")


def test_fsdp_gathers_the_frozen_weights_of_an_adapter() -> None:
    fsdp = replace(COSTS, is_fsdp=True, passes_per_step=4, trains_all=False)
    assert fsdp.kept_bytes_per_step == pytest.approx(4 * 1.5e9)
    assert "(2 times what FSDP without resharding moves a step)" in fsdp.text("FSDP without resharding", "FSDP")
    assert "(ZeRO-2 moves an adapter only)" in replace(fsdp, is_fsdp=False).text("ZeRO-2", "ZeRO-3")


def test_communication_hides_at_the_threshold() -> None:
    assert replace(COSTS, bus_gb_per_s=COSTS.needed_gb_per_s * 1.001).hides
    assert not replace(COSTS, bus_gb_per_s=COSTS.needed_gb_per_s * 0.999).hides
    assert replace(COSTS, tokens_per_pass=COSTS.needed_tokens).hides
    assert not replace(COSTS, tokens_per_pass=COSTS.needed_tokens - 1).hides


@pytest.mark.parametrize("size", [10**8, 7 * 10**10])
def test_the_threshold_does_not_depend_on_the_size_of_the_model(size: int) -> None:
    assert replace(COSTS, num_parameters=size).needed_gb_per_s == pytest.approx(COSTS.needed_gb_per_s)


def test_an_adapter_sends_no_gradients_and_computes_none_of_the_weights() -> None:
    adapter = replace(COSTS, trains_all=False, operations_per_token=4)
    assert adapter.gathered_bytes_per_pass == pytest.approx(3e9)
    assert adapter.kept_bytes_per_step == 0
    assert adapter.needed_gb_per_s == pytest.approx(COSTS.needed_gb_per_s)


def test_the_arithmetic_is_shown() -> None:
    assert COSTS.text("ZeRO-2", "ZeRO-3") == (
        "ZeRO-3 moves 3 x 1e9 parameters x 2 bytes x 3/4 = 4.5 GB through each GPU in a pass (1.5 times what ZeRO-2 "
        "moves a step), 45 ms at the measured 100 GB/s. The pass computes 6 x 1e9 x 4096 tokens = 24.6 TFLOP, at least "
        "24.8 ms at 989 TFLOP/s: it hides from 181 GB/s or 7418 tokens a pass on"
    )


def advice(bandwidth: Bandwidth, *words: str, **changes: Any) -> LinkAdvice | None:
    config = resolved(*words, machine=FOUR)
    if changes:
        config = replace(config, hardware=replace(config.hardware, **changes))
    return advise(config, solve_batch(config, None), bandwidth, "NVIDIA H200")


@pytest.mark.parametrize(
    ("words", "speed", "advised", "fix"),
    [
        (["qwen3b_zero2"], 360.0, "zero2", None),
        (["qwen3b_zero2"], 12.0, "zero2", None),
        (["qwen3b_zero2", "parallelism=zero3"], 360.0, "zero2", None),
        (["qwen3b_zero2", "parallelism=zero3"], 12.0, "zero2", "parallelism=zero2"),
        (["qwen3b_zero2", "parallelism=fsdp"], 12.0, "fsdp_grad_op", "parallelism=fsdp_grad_op"),
        (["zero3_lora"], 12.0, "zero2", "parallelism=zero2"),
        (["qwen3b_zero2", "hardware.memory_gib=12"], 600.0, "zero3", "parallelism=zero3"),
        (["qwen3b_zero2", "parallelism=zero3", "hardware.memory_gib=12"], 600.0, "zero3", None),
    ],
)
def test_what_is_advised_and_when_the_recipe_should_change(
    words: list[str], speed: float, advised: str, fix: str | None
) -> None:
    found = advice(measured(speed), *words)
    assert found is not None
    assert (found.data["advised"], found.fix) == (advised, fix)


@pytest.mark.parametrize(
    ("words", "speed", "fix"),
    [
        (["llama2_70b_fsdp_1node"], 300.0, "training.micro_batch_size=2"),  # the two rows that a step has for a GPU
        # 64 rows a pass would be more than a step has, and than memory holds; so is the adapter on whole weights
        (["llama2_70b_fsdp_1node"], 5.0, "GPUs whose links reach 317 GB/s: no change of the run was estimated to fit "
         "and to be enough"),
        (["dolly3b_ray_zero3_offload", "hardware.gpus_per_node=4"], 300.0, "a larger global batch: "
         "training.global_samples=32 training.micro_batch_size=2; or peft=lora parallelism=zero2"),
        (["dolly3b_ray_zero3_offload", "hardware.gpus_per_node=4"], 5.0, "peft=lora parallelism=zero2"),
    ],
    ids=["rows", "nothing", "larger_batch", "adapter"],
)  # fmt: skip
def test_advice_for_slow_links_names_only_what_can_run(words: list[str], speed: float, fix: str) -> None:
    config = resolved(*words)
    found = advise(config, solve_batch(config, None), measured(speed), "NVIDIA H200")
    assert found is not None
    assert found.fix == fix


@pytest.mark.parametrize("fix", ["training.micro_batch_size=2", None])
def test_more_rows_than_a_step_has_are_refused(fix: str | None) -> None:
    """Why the second case above suggests no more rows: a suggestion must be possible to plan."""
    words = (fix or "training.micro_batch_size=64",)
    problems = check(resolved("llama2_70b_fsdp_1node", *words))
    assert [problem.id for problem in problems if problem.is_error] == ([] if fix else ["batch-too-small"])


@pytest.mark.parametrize(
    ("strategy", "memory_gib", "said", "fix"),
    [
        ("ddp", 48, "ZeRO-2 fits, and ddp is estimated not to.", "parallelism=zero2"),
        ("zero1", 24, "ZeRO-2 is estimated not to fit.", "parallelism=zero3"),
    ],
)
def test_strategies_that_communicate_once_a_step_get_no_advice(
    strategy: str, memory_gib: int, said: str, fix: str
) -> None:
    words = ("qwen3b_zero2", f"parallelism={strategy}")
    assert advice(measured(5.0), *words) is None
    found = advice(measured(5.0), *words, f"hardware.memory_gib={memory_gib}")
    assert found is not None
    assert (said in found.text, found.fix) == (True, fix)


def test_numbers_come_from_the_recipe_and_the_gpu() -> None:
    config = resolved("qwen3b_zero2", machine=FOUR)
    batch = solve_batch(config, None)
    costs = costs_of(config, batch, measured(360.0), "NVIDIA H200")
    assert costs is not None
    assert (costs.num_parameters, costs.element_bytes, costs.num_gpus) == (3085938688, 2, 4)
    assert (costs.peak_tflops, costs.operations_per_token) == (989.0, 6)
    assert costs.tokens_per_pass == batch.micro_batch_size * batch.row_length


def test_in_fp32_twice_the_bytes_move_and_recomputing_takes_longer() -> None:
    words = ("qwen3b_zero2", "precision=fp32", "attention=sdpa", "activation=checkpointing")
    config = resolved(*words, machine=FOUR)
    costs = costs_of(config, solve_batch(config, None), measured(360.0), "NVIDIA H200")
    assert costs is not None
    assert (costs.element_bytes, costs.operations_per_token) == (4, 8)


def test_padded_rows_hold_one_document_each() -> None:
    config = resolved("qwen3b_zero2", "packing=padded", "dataset.mean_tokens=500.4", machine=FOUR)
    batch = solve_batch(config, None)
    costs = costs_of(config, batch, measured(360.0), "NVIDIA H200")
    assert costs is not None
    assert costs.tokens_per_pass == batch.micro_batch_size * 500


def test_the_slower_operation_at_the_size_of_a_layer_counts() -> None:
    """A layer of the 3B model is 171 MB in bf16; the nearest of these sizes is 256 MiB."""
    config = resolved("qwen3b_zero2", machine=FOUR)
    bandwidth = measured(1.0, 200.0, 360.0, sizes=(2**20, 2**28, 2**32))
    costs = costs_of(config, solve_batch(config, None), bandwidth, "NVIDIA H200")
    assert costs is not None and costs.bus_gb_per_s == 200.0
    slower = [
        replace(one, bus_gb_per_s=150.0) if one.operation == ALL_REDUCE else one for one in bandwidth.measurements
    ]
    costs = costs_of(config, solve_batch(config, None), replace(bandwidth, measurements=slower), "NVIDIA H200")
    assert costs is not None and costs.bus_gb_per_s == 150.0


def test_no_advice_without_a_choice() -> None:
    assert advice(measured(360.0), "quickstart", "hardware=auto") is None
    assert advice(measured(360.0), "qwen3b_zero2", "hardware.gpus_per_node=1", "parallelism=single") is None
    assert advice(measured(sizes=()), "qwen3b_zero2") is None


def test_links_between_nodes_were_not_measured() -> None:
    found = advice(measured(360.0), "qwen3b_zero2", num_nodes=2)
    assert found is not None
    assert (found.text, found.fix) == (
        "the links between the 2 nodes were not measured, so no strategy is advised",
        None,
    )
