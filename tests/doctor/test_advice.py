"""ZeRO-2 or ZeRO-3: the arithmetic by hand, and what follows from it for recipes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tunebook.doctor.advice import Costs, advise, costs_of
from tunebook.doctor.collectives.formulas import ALL_REDUCE
from tunebook.doctor.collectives.run import Bandwidth
from tunebook.doctor.findings import Finding, Level
from tunebook.plan.batch import solve_batch

from .conftest import h200, machine_with, measured, resolved

FOUR = machine_with(*(h200(index) for index in range(4)))
COSTS = Costs(
    num_parameters=10**9, element_bytes=2, num_gpus=4, tokens_per_pass=4096, passes_per_step=1, operations_per_token=6,
    trains_all=True, peak_tflops=989.0, bus_gb_per_s=100.0,
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


def test_at_the_needed_bandwidth_and_tokens_it_just_hides() -> None:
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


def advice(bandwidth: Bandwidth, *words: str, **changes: Any) -> Finding | None:
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
    assert found.level is (Level.ok if fix is None else Level.warning)


def test_where_only_zero3_fits_and_the_links_are_slow_more_tokens_are_named() -> None:
    words = ("qwen3b_zero2", "parallelism=zero3", "hardware.memory_gib=12")
    found = advice(measured(12.0), *words)
    assert found is not None
    config = resolved(*words, machine=FOUR)
    micro = solve_batch(config, None).micro_batch_size
    times = -(-found.data["needed_tokens_per_pass"] // found.data["tokens_per_pass"])
    assert f"training.micro_batch_size={micro * times} " in (found.fix or "")
    assert found.level is Level.warning


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
    """A layer of the 3B model is 171 MB in bf16: nearest to 256 MiB of these."""
    config = resolved("qwen3b_zero2", machine=FOUR)
    bandwidth = measured(1.0, 200.0, 360.0, sizes=(2**20, 2**28, 2**32))
    costs = costs_of(config, solve_batch(config, None), bandwidth, "NVIDIA H200")
    assert costs is not None and costs.bus_gb_per_s == 200.0
    slower = [
        replace(one, bus_gb_per_s=150.0) if one.operation == ALL_REDUCE else one for one in bandwidth.measurements
    ]
    costs = costs_of(config, solve_batch(config, None), replace(bandwidth, measurements=slower), "NVIDIA H200")
    assert costs is not None and costs.bus_gb_per_s == 150.0


def test_where_the_question_does_not_arise_nothing_is_said() -> None:
    assert advice(measured(360.0), "quickstart", "hardware=auto") is None
    assert advice(measured(360.0), "qwen3b_zero2", "hardware.gpus_per_node=1", "parallelism=single") is None
    assert advice(measured(sizes=()), "qwen3b_zero2") is None


def test_links_between_nodes_were_not_measured() -> None:
    found = advice(measured(360.0), "qwen3b_zero2", num_nodes=2)
    assert found is not None
    assert (found.level, found.what) == (
        Level.ok, "the links between the 2 nodes were not measured, so no strategy is advised",
    )  # fmt: skip
