"""What fits, what does not and what is tight: of a GPU, of a node's host, and of two measured steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunebook.config.choices import Checkpointing, Generation, LauncherName, Offload, Strategy
from tunebook.config.compose import compose
from tunebook.config.schema import ActivationConfig, FsdpConfig, ModelConfig, RunConfig, ZeroConfig
from tunebook.data.batch import solve_batch
from tunebook.facts.generations import generation_of
from tunebook.hardware.detect import Gpu, Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.draft import Draft
from tunebook.plan.memory import verdict
from tunebook.plan.memory.activations import shape_of
from tunebook.plan.memory.verdict import (
    MemoryPlan,
    judge_measurement,
    margin_of,
    measured_memory,
    plan_host_memory,
    plan_memory,
    tensors_fit,
)
from tunebook.plan.show import host_memory_text
from tunebook.record.measurement import Measurement

from ..plans import NO_GPU, resolved

GIB = 2**30
# Decisions by the memory, which takes seconds to estimate.
SETTLED = ("activation=stored", "packing.mode=isolated", "packing.row_length=1024", "training.max_length=1024")
GPU_PARTS = {"weights", "gradients", "optimizer", "activations", "buffers", "overhead"}
HOST_PARTS = {"processes", "training", "loading", "offload", "saving"}


def test_zero2_divides_gradients_and_optimizer_state_among_8_gpus() -> None:
    config = resolved("qwen3b_zero2")
    assert config.model.facts is not None
    num_parameters = config.model.facts.num_parameters
    plan = plan_memory(config)
    assert plan.parts["weights"] == pytest.approx(4 * num_parameters / GIB)
    assert plan.parts["gradients"] == pytest.approx(2 * 4 * num_parameters / 8 / GIB)  # one pass's, and the sum
    assert plan.parts["optimizer"] == pytest.approx(12 * num_parameters / 8 / GIB)  # with DeepSpeed's master copy
    # whole parameters of which a rank has a piece: less than the embeddings and one more
    assert 0 <= (plan.parts["buffers"] or 0) < 4 * 2 * 151_936 * 2048 / GIB
    assert plan.capacity == 32.0
    # CUDA's context, NCCL's buffers, and 6% of blocks that are too small
    assert plan.parts["overhead"] == pytest.approx((781 + 688) / 1024 + 0.06 * (plan.allocated or 0))


def test_one_gpu_has_no_communicator_and_the_parts_add_up() -> None:
    plan = plan_memory(resolved("qwen05b_single"))
    assert plan.total == pytest.approx(sum(part or 0 for part in plan.parts.values()))
    assert plan.total == pytest.approx((plan.allocated or 0) * 1.06 + 781 / 1024)
    assert plan.fits is True
    assert {*plan.to_json()} == GPU_PARTS | {"total", "capacity", "allocated"}


@pytest.mark.parametrize(
    ("capacity", "checkpointing", "fits"),
    [
        (7.0, Checkpointing.enabled, False),  # 7.4 GiB of states
        (10.0, Checkpointing.enabled, False),  # 8.9 GiB of tensors: 8.9 x 1.06 + 0.8 = 10.2
        (11.0, Checkpointing.enabled, None),
        (12.0, Checkpointing.enabled, True),  # (8.9 x 1.10 + 0.8) / 0.94 = 11.2
        (22.0, Checkpointing.disabled, False),  # 20.4 GiB of tensors: 20.4 x 1.06 + 0.8 = 22.4
        (24.0, Checkpointing.disabled, None),
        (26.0, Checkpointing.disabled, True),  # (20.4 x 1.10 + 0.8) / 0.94 = 24.7
        (None, Checkpointing.disabled, None),
    ],
)
def test_the_estimate_and_its_margin_are_compared_with_the_memory(
    capacity: float | None, checkpointing: Checkpointing, fits: bool | None
) -> None:
    config = resolved("qwen05b_single", "attention=sdpa")
    config.hardware.memory_gib = capacity
    config.activation.checkpointing = checkpointing
    plan = plan_memory(config)
    assert plan.fits is fits
    assert plan.is_tight is (fits is None and capacity is not None)
    word = "not known" if capacity is None else {True: "fits", False: "does not fit", None: "tight"}[fits]
    assert plan.verdict.startswith(f"{word}: {plan.needed:.1f} ")
    assert tensors_fit(config) is (None if capacity is None else fits is True)


FSDP = FsdpConfig(strategy=Strategy.fsdp)
RECOMPUTED = ActivationConfig(checkpointing=Checkpointing.enabled)
COMPILED = ModelConfig(name="a/b", compile_layers=True)


@pytest.mark.parametrize(
    ("changes", "margin"),
    [
        ({"parallelism": FSDP, "activation": RECOMPUTED}, 0.04),
        ({"parallelism": ZeroConfig(strategy=Strategy.zero3)}, 0.15),
        ({"parallelism": FsdpConfig(strategy=Strategy.fsdp, offload_parameters=Offload.cpu)}, 0.15),
        ({"parallelism": FSDP, "activation": replace(RECOMPUTED, offload=True)}, 0.15),
        ({"parallelism": FSDP, "activation": RECOMPUTED, "model": COMPILED}, 0.15),
        ({"parallelism": FSDP, "model": COMPILED}, 0.04),
    ],
)
def test_the_margin_is_wide_for_what_is_not_run(sound: RunConfig, changes: dict[str, Any], margin: float) -> None:
    assert margin_of(replace(sound, **changes)) == margin


def test_a_model_of_unknown_size_has_no_numbers() -> None:
    config = resolved("qwen05b_single")
    config = replace(config, model=replace(config.model, facts=None))
    plan, host = plan_memory(config), plan_host_memory(config, 64.0)
    assert plan.to_json() == dict.fromkeys(GPU_PARTS | {"total", "allocated"}) | {"capacity": 32.0}
    assert host.to_json() == dict.fromkeys(HOST_PARTS | {"total"}) | {"capacity": 64.0}
    assert (plan.fits, plan.is_tight, host.fits, host.nvme_gib) == (None, False, None, None)


def test_a_small_model_needs_more_than_its_tensors() -> None:
    """On a slice of a GPU: CUDA's context alone is 781 MiB."""
    config = resolved("quickstart", "hardware=hopper", "hardware.memory_gib=0.7", *SETTLED)
    plan = plan_memory(config)
    assert plan.allocated is not None and plan.allocated < 0.8 * 0.7
    assert plan.fits is False
    config.hardware.memory_gib = 2.0
    assert plan_memory(config).fits is True


def test_a_process_on_a_cpu_is_python_and_its_libraries() -> None:
    assert plan_memory(resolved("quickstart", "hardware=cpu", *SETTLED)).parts["overhead"] == pytest.approx(502 / 1024)


def test_rows_that_the_data_does_not_fill_take_less() -> None:
    """16 documents of 128 tokens over 4 GPUs are 512 tokens each, whatever a row could hold."""
    config = resolved("qwen3b_zero2", "hardware.gpus_per_node=4", "training.global_samples=16", *SETTLED)
    lengths = np.full(1600, 128, dtype=np.int64)
    batch = solve_batch(config, lengths)
    assert config.packing.row_length is not None and config.packing.row_length > 512 == batch.longest_row
    as_filled = replace(config, packing=replace(config.packing, row_length=512))
    assert plan_memory(config, batch).parts == plan_memory(as_filled, solve_batch(as_filled, lengths)).parts
    full, filled = plan_memory(config).parts["activations"], plan_memory(config, batch).parts["activations"]
    assert full is not None and filled is not None and filled < 0.6 * full


@pytest.mark.parametrize(("samples", "micro"), [(8, 1), (528, 11)])
def test_padded_passes_are_planned_as_the_batch_is_solved(samples: int, micro: int) -> None:
    words = ("packing=padded", "training.max_length=512", "hardware.gpus_per_node=8", "activation=stored")
    asked = ("qwen05b_single", "parallelism=ddp", f"training.global_samples={samples}", *words)
    left_open, typed = resolved(*asked), resolved(*asked, f"training.micro_batch_size={micro}")
    assert solve_batch(left_open, None).micro_batch_size == micro
    assert plan_memory(left_open).parts == plan_memory(typed).parts


SHORT = ("dataset=synthetic", "dataset.synthetic.max_tokens=256", "training.micro_batch_size=2", *SETTLED)


def test_padded_rows_are_as_long_as_generated_documents_can_be() -> None:
    """As if `training.max_length` were no more; packed rows are full whatever fills them."""
    short, long = (
        resolved("qwen3b_zero2", *SHORT, "packing.mode=padded", *words)
        for words in ((), ("dataset.synthetic.max_tokens=4096",))
    )
    assert solve_batch(short, None).row_length == 256 < short.training.max_length == solve_batch(long, None).row_length
    assert shape_of(short) == (2, 256) and shape_of(long) == (2, long.training.max_length)
    packed = resolved("qwen3b_zero2", *SHORT)
    assert shape_of(packed) == (1, 2 * 1024)
    assert shape_of(resolved("qwen3b_zero2", *SHORT, "packing.mode=padded", "method=dpo")) == (2 * 2, 256), (
        "the sides of two pairs"
    )


GPUS = Measurement(
    date="2026-01-02",
    row_length=4096,
    memory_gib=[62.0, 61.5],
    memory_reserved_gib=[66.0, 70.0],
    memory_device_gib=[72.0, 71.0],
    tokens_per_second_per_gpu=12_345.6,
)
ESTIMATED = MemoryPlan(
    parts={"weights": 20.0, "gradients": 10.0, "optimizer": 30.0, "activations": 9.0, "buffers": 1.0, "overhead": 5.0},
    total=75.0,
    capacity=79.6,
    fits=None,
    verdict="tight",
)


def judged(
    measurement: Measurement = GPUS, capacity: float | None = 79.6, generation: Generation = Generation.hopper
) -> MemoryPlan:
    config = resolved("qwen3b_zero2")
    config.hardware.generation = generation
    return judge_measurement(config, replace(ESTIMATED, capacity=capacity), measurement)


def test_the_measured_peak_replaces_the_total_and_not_the_parts() -> None:
    plan = judged()
    assert (plan.allocated, plan.parts["overhead"], plan.total) == (62.0, 10.0, 72.0)
    assert (plan.parts["weights"], plan.parts["activations"]) == (20.0, 9.0)


@pytest.mark.parametrize(("capacity", "fits"), [(79.6, True), (71.0, None), (61.0, False), (None, None)])
def test_what_two_steps_held_fits_into_as_much(capacity: float | None, fits: bool | None) -> None:
    assert judged(capacity=capacity).fits is fits


def test_a_process_on_a_cpu_records_its_libraries_too() -> None:
    alone = replace(GPUS, memory_gib=[3.0], memory_reserved_gib=[], memory_device_gib=[])
    plan = judged(alone, generation=Generation.cpu)
    assert (plan.total, plan.parts["overhead"]) == (3.0, pytest.approx(502 / 1024))


def test_steps_that_ran_out_do_not_fit_and_leave_the_numbers_estimated() -> None:
    plan = judged(replace(GPUS, memory_gib=[], ran_out="the GPU ran out of memory before the first step was over"))
    assert (plan.parts, plan.total) == (ESTIMATED.parts, ESTIMATED.total)
    (error,) = Draft(recipe=None, memory=plan, host=plan_host_memory(resolved("qwen3b_zero2"), None)).shortcomings
    assert (error.exit_code, error.problem_id) == (3, "does-not-fit")


@pytest.mark.parametrize(("longest_row", "is_used"), [(None, True), (4096, True), (4050, True), (3600, False)])
def test_steps_with_longer_rows_than_the_run_has_do_not_replace_the_estimate(
    monkeypatch: pytest.MonkeyPatch, longest_row: int | None, is_used: bool
) -> None:
    config = resolved("qwen3b_zero2")
    monkeypatch.setattr(verdict, "recall_measurement", lambda *_: GPUS)
    batch = replace(solve_batch(config, None), longest_row=longest_row)
    assert (measured_memory(config, batch, NO_GPU) is not None) is is_used


@pytest.mark.parametrize(
    ("capacity", "fits"),
    [
        (None, None),
        (931.0, False),  # 1,088 GiB are offloaded
        (1160.0, False),  # 1,361 GiB at the peak
        (1350.0, False),
        (1440.0, None),
        (1536.0, True),  # 1,361 x 1.04 / 0.94 = 1,506
    ],
)
def test_the_host_of_llama_2_70b_on_one_node(capacity: float | None, fits: bool | None) -> None:
    plan = plan_host_memory(resolved("llama2_70b_fsdp_1node"), capacity)
    assert plan.fits is fits
    assert plan.parts["offload"] == pytest.approx(1087.9, abs=0.5)
    assert plan.total == pytest.approx(1360.9, abs=0.5)
    errors = Draft(recipe=None, memory=replace(ESTIMATED, fits=True), host=plan).shortcomings
    assert [error.problem_id for error in errors] == (["host-memory-too-small"] if fits is False else [])


def test_what_the_ranks_of_a_cpu_need_is_compared_with_the_host() -> None:
    plan = plan_host_memory(resolved("qwen05b_single", "hardware=cpu", *SETTLED), 6.0)
    assert (plan.parts["training"] or 0) > 6
    assert plan.fits is False


def test_the_disk_holds_what_is_offloaded_to_it() -> None:
    """20 bytes for each of 2.8 billion parameters."""
    plan = plan_host_memory(resolved("dolly3b_zero3_nvme"), None)
    assert plan.nvme_gib == pytest.approx(20 * 2_775_086_080 / GIB)
    assert "51.7 GiB on its NVMe disk" in host_memory_text(plan)


def test_whose_memory_is_meant() -> None:
    """This machine's where the ranks start here; else only what the configuration has."""
    gpu = Gpu(name="NVIDIA H200", memory_gib=140.4, compute_capability=(9, 0), generation=generation_of((9, 0)))
    machine = Machine(gpus=[gpu], driver="580.65.06", num_cpus=8, host_memory_gib=200.0)
    config: RunConfig = compose("qwen05b_single", [*SETTLED]).config

    def known(
        machine: Machine, launcher: str = "local", gib: float | None = None, generation: str = "auto"
    ) -> float | None:
        config.launcher.name, config.hardware.host_memory_gib = LauncherName[launcher], gib
        config.hardware.generation = Generation[generation]
        return resolve_auto(config, machine).host_memory_gib

    assert known(machine) == 200.0
    assert known(machine, gib=64.0) == 64.0
    assert known(machine, "slurm") is None
    assert known(machine, "slurm", gib=64.0) == 64.0
    assert known(machine, generation="volta") is None  # it cannot run here
    assert known(NO_GPU) is None
    assert known(NO_GPU, generation="cpu") == 8.0
