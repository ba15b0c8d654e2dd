"""The estimated memory part by part, what is left open, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunebook.config.choices import Checkpointing
from tunebook.data.batch import solve_batch
from tunebook.errors import DoesNotFitError
from tunebook.plan.draft import estimate_time, refuse_too_large
from tunebook.plan.memory import gpu
from tunebook.plan.memory.activations import shape_of
from tunebook.plan.memory.gpu import Memory, MemoryPlan, judge_measurement, measured_memory, plan_memory
from tunebook.plan.show import memory_lines
from tunebook.record.measurement import Measurement

from ..plans import NO_GPU, resolved

GIB = 2**30


def test_zero2_divides_gradients_and_optimizer_state_among_8_gpus() -> None:
    config = resolved("qwen3b_zero2")
    assert config.model.facts is not None
    num_parameters = config.model.facts.num_parameters
    memory = plan_memory(config).memory
    assert memory.weights == pytest.approx(4 * num_parameters / GIB)
    assert memory.gradients == pytest.approx(2 * 4 * num_parameters / 8 / GIB)  # one pass's, and the sum
    assert memory.optimizer == pytest.approx(12 * num_parameters / 8 / GIB)  # with DeepSpeed's master copy
    # room for whole parameters of which a rank has a piece: less than the embeddings and one more
    assert memory.buffers is not None and 0 <= memory.buffers < 4 * 2 * 151_936 * 2048 / GIB
    assert memory.capacity == 32.0
    assert memory.allocated is not None and memory.overhead is not None
    # CUDA's context, the communicator of 8 GPUs, and what the allocator holds besides
    assert memory.overhead == pytest.approx((781 + 688) / 1024 + 0.22 * memory.allocated)


def test_with_every_activation_kept_the_parts_add_up() -> None:
    plan = plan_memory(resolved("qwen05b_single"))
    memory = plan.memory
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.buffers, memory.activations)
    assert memory.allocated == pytest.approx(sum(part for part in parts if part is not None))
    assert memory.total == pytest.approx((memory.allocated or 0) * 1.10 + 781 / 1024)  # one GPU talks to no other
    assert plan.fits is True
    assert (
        plan.verdict
        == f"fits: {memory.allocated:.1f} GiB (or 4% more) without the overhead, no more than 83% of 32 GiB"
    )


@pytest.mark.parametrize(
    ("capacity", "checkpointing", "fits", "said"),
    [
        (7.0, Checkpointing.enabled, False, "does not fit: 8.9 GiB are more than 7 GiB"),  # 7.4 GiB of states
        (
            10.0,
            Checkpointing.enabled,
            None,
            "8.9 GiB (or 4% more) without the overhead, more than 83%",
        ),
        (
            12.0,
            Checkpointing.enabled,
            True,
            "fits: 8.9 GiB (or 4% more) without the overhead",
        ),
        (16.0, Checkpointing.disabled, False, "does not fit: 20.4 GiB are more than 16 GiB"),
        (18.0, Checkpointing.disabled, None, "20.4 GiB of tensors are more than 18 GiB"),
        (
            21.0,
            Checkpointing.disabled,
            None,
            "20.4 GiB (or 4% more) without the overhead, more than 83%",
        ),
        (None, Checkpointing.disabled, None, "hardware.memory_gib is not set"),
    ],
)
def test_the_verdict_is_no_only_where_it_cannot_be_yes(
    capacity: float | None, checkpointing: Checkpointing, fits: bool | None, said: str
) -> None:
    config = resolved("qwen05b_single", "attention=sdpa")
    config.hardware.memory_gib = capacity
    config.activation.checkpointing = checkpointing
    plan = plan_memory(config)
    assert plan.fits is fits
    assert said in plan.verdict


def test_a_model_of_unknown_size_has_no_numbers() -> None:
    config = resolved("qwen05b_single")
    plan = plan_memory(replace(config, model=replace(config.model, facts=None)))
    assert plan.memory == Memory(capacity=32.0)
    assert plan.fits is None
    assert "nor is the model's size" in plan.verdict


def test_json_has_every_part_and_no_infinity() -> None:
    expected: dict[str, Any] = dict.fromkeys(
        ("weights", "gradients", "optimizer", "activations", "buffers", "overhead", "total", "capacity", "allocated")
    )
    assert Memory(weights=1.23456, capacity=float("inf")).to_json() == expected | {"weights": 1.235}


def test_an_overhead_larger_than_what_is_left_takes_the_yes_away() -> None:
    """A small model on a slice of a GPU: CUDA's context alone is 781 MiB."""
    config = resolved("quickstart", "hardware=hopper", "hardware.memory_gib=0.7")
    plan = plan_memory(config)
    assert plan.memory.allocated is not None and plan.memory.allocated < 0.8 * 0.7
    assert plan.fits is None
    assert "with an overhead of about 0.8 GiB it is more than 0.7 GiB" in plan.verdict
    config.hardware.memory_gib = 2.0
    assert plan_memory(config).fits is True


def test_rows_that_the_data_does_not_fill_take_less() -> None:
    """16 documents of 256 tokens over 4 GPUs are 1,024 tokens each, whatever a row could hold."""
    config = resolved("qwen3b_zero2", "hardware=hopper", "hardware.gpus_per_node=4", "training.global_samples=16")
    lengths = np.full(1600, 256, dtype=np.int64)
    batch = solve_batch(config, lengths)
    assert config.packing.row_length is not None and config.packing.row_length > 1024 == batch.longest_row
    as_filled = replace(config, packing=replace(config.packing, row_length=1024))
    assert plan_memory(config, batch).memory == plan_memory(as_filled, solve_batch(as_filled, lengths)).memory
    full, filled = plan_memory(config).memory.activations, plan_memory(config, batch).memory.activations
    assert full is not None and filled is not None and filled < full / 2


@pytest.mark.parametrize(("samples", "micro"), [(8, 1), (528, 11), (512, 16)])
def test_padded_passes_are_planned_as_the_batch_is_solved(samples: int, micro: int) -> None:
    words = ("packing=padded", "training.max_length=512", "hardware=hopper", "hardware.gpus_per_node=8")
    asked = ("qwen05b_single", "parallelism=ddp", f"training.global_samples={samples}", *words)
    left_open, typed = resolved(*asked), resolved(*asked, f"training.micro_batch_size={micro}")
    assert solve_batch(left_open, None).micro_batch_size == micro
    assert plan_memory(left_open).memory == plan_memory(typed).memory


def test_the_source_s_70b_model_is_not_refused_on_the_machines_it_was_trained_on() -> None:
    """70 of 80 GiB with a layer's weights and gradients beside all states; its source pages the optimizer's out."""
    plan = plan_memory(resolved("llama2_70b_fsdp"))
    assert plan.fits is None
    assert plan.memory.allocated == pytest.approx(70.5, abs=0.3)
    assert plan.memory.capacity == 80  # of each of 16 A100


SHORT = ("dataset=synthetic", "dataset.synthetic.max_tokens=256", "activation=stored", "training.micro_batch_size=2")


def test_padded_rows_are_as_long_as_generated_documents_can_be() -> None:
    """As if `training.max_length` were no more; packed rows are full whatever fills them."""
    short, same, long = (
        resolved("qwen3b_zero2", *SHORT, "packing=padded", *words)
        for words in ((), ("training.max_length=256",), ("dataset.synthetic.max_tokens=4096",))
    )
    assert plan_memory(short).memory == plan_memory(same).memory
    assert solve_batch(short, None).row_length == 256 < short.training.max_length == solve_batch(long, None).row_length
    assert shape_of(short) == (2, 256) and shape_of(long) == (2, long.training.max_length)
    assert estimate_time(short, solve_batch(short, None), NO_GPU) == estimate_time(
        same, solve_batch(same, None), NO_GPU
    )
    packed = resolved("qwen3b_zero2", *SHORT, "packing=isolated")
    rows, tokens = shape_of(packed)
    assert rows == 1 and tokens == 2 * (packed.packing.row_length or 0) >= 2 * packed.training.max_length


GPUS = Measurement(
    date="2026-01-02",
    row_length=4096,
    memory_gib=[62.0, 61.5],
    memory_reserved_gib=[66.0, 70.0],
    memory_device_gib=[72.0, 71.0],
    tokens_per_second_per_gpu=12_345.6,
)
ESTIMATED = MemoryPlan(
    memory=Memory(weights=20.0, gradients=10.0, optimizer=30.0, activations=9.0, buffers=1.0, overhead=5.0, total=75.0,
                  capacity=79.6),
    fits=None,
    verdict="whether it fits is not known",
)  # fmt: skip


def judged(measurement=GPUS, capacity: float | None = 79.6, generation: str = "hopper") -> MemoryPlan:
    config = resolved("qwen3b_zero2", f"hardware={generation}")
    estimated = replace(ESTIMATED, memory=replace(ESTIMATED.memory, capacity=capacity))
    return judge_measurement(config, estimated, measurement)


def test_the_measured_peak_replaces_the_total_and_not_the_parts():
    plan = judged()
    memory = plan.memory
    assert (memory.allocated, memory.overhead, memory.total) == (62.0, 10.0, 72.0)
    assert (memory.weights, memory.activations) == (20.0, 9.0)
    assert set(memory.to_json()) == {
        "weights", "gradients", "optimizer", "activations", "buffers", "overhead", "total", "capacity", "allocated",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("capacity", "fits", "text"),
    [
        (79.6, True, "fits: two steps with rows of 4,096 tokens, measured on 2026-01-02, took 62.0 GiB of tensors and "
                     "72.0 GiB in all, of 79.6 GiB"),
        (71.0, None, "the allocator may take less where there is less"),
        (61.0, False, "does not fit: two steps"),
        (None, None, "hardware.memory_gib is not set"),
    ],
)  # fmt: skip
def test_what_two_steps_held_fits_into_as_much(capacity, fits, text):
    plan = judged(capacity=capacity)
    assert (plan.fits, text in plan.verdict) == (fits, True), plan.verdict


def test_a_process_on_a_cpu_records_its_libraries_too():
    plan = judged(Measurement(**vars(GPUS) | {"memory_gib": [3.0], "memory_reserved_gib": [], "memory_device_gib": []}),
                  generation="cpu")  # fmt: skip
    assert plan.memory.total == 3.0
    assert plan.memory.overhead == pytest.approx(418 / 1024)
    assert "took 3.0 GiB in each process, of 79.6 GiB" in plan.verdict


def test_steps_that_ran_out_do_not_fit_and_leave_the_numbers_estimated():
    plan = judged(replace(GPUS, memory_gib=[], ran_out="the GPU ran out of memory before the first step was over"))
    assert plan.memory == ESTIMATED.memory
    with pytest.raises(DoesNotFitError, match=r"as measured, this plan does not fit: .*, ended early: the GPU ran out"):
        refuse_too_large(plan)
    assert memory_lines(plan)[0] == "Memory of each GPU or rank (estimated, GiB, of 79.6)"
    assert "ended early" in memory_lines(plan)[-1]


def test_the_lines_for_people_say_when_it_was_measured():
    lines = memory_lines(judged())
    assert lines[0] == "Memory of each GPU or rank (measured on 2026-01-02, GiB, of 79.6)"
    assert lines[1] == "  the second of the two steps trained 12,346 tokens/s per GPU or rank"


@pytest.mark.parametrize(("longest_row", "is_used"), [(None, True), (4096, True), (4050, True), (3600, False)])
def test_steps_with_longer_rows_than_the_run_has_do_not_replace_the_estimate(monkeypatch, longest_row, is_used):
    config = resolved("qwen3b_zero2", "hardware=hopper")
    monkeypatch.setattr(gpu, "recall_measurement", lambda *_: GPUS)
    batch = replace(solve_batch(config, None), longest_row=longest_row)
    assert (measured_memory(config, batch, NO_GPU) is not None) is is_used
