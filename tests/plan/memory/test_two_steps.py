"""A plan by two measured steps in place of the estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunebook.config.compose import compose
from tunebook.data.batch import solve_batch
from tunebook.errors import DoesNotFitError
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.draft import refuse_too_large
from tunebook.plan.memory import two_steps
from tunebook.plan.memory.gpu import Memory, MemoryPlan
from tunebook.plan.memory.two_steps import judge_measurement, measured_memory
from tunebook.plan.show import memory_lines
from tunebook.record.measurement import Measurement

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
    machine = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
    config = resolve_auto(compose("qwen3b_zero2", [f"hardware={generation}"]).config, machine).config
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
    assert lines[1].startswith("  estimated parts of it: weights 20.0, gradients 10.0")
    assert "overhead" not in lines[1]
    assert lines[2] == "  the second of the two steps trained 12,346 tokens/s per GPU or rank"


@pytest.mark.parametrize(("longest_row", "is_used"), [(None, True), (4096, True), (4050, True), (3600, False)])
def test_steps_with_longer_rows_than_the_run_has_do_not_replace_the_estimate(monkeypatch, longest_row, is_used):
    machine = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
    config = resolve_auto(compose("qwen3b_zero2", ["hardware=hopper"]).config, machine).config
    monkeypatch.setattr(two_steps, "recall_measurement", lambda *_: GPUS)
    batch = replace(solve_batch(config, None), longest_row=longest_row)
    assert (measured_memory(config, batch, machine) is not None) is is_used
