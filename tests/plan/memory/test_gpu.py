"""The estimated memory part by part, what is left open, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunebook.config.choices import Checkpointing
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.data.batch import solve_batch
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.draft import estimate_time
from tunebook.plan.memory.gpu import Memory, plan_memory
from tunebook.plan.memory.kept import tokens_per_pass

GIB = 2**30
NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


def resolved(recipe: str, *overrides: str) -> RunConfig:
    return resolve_auto(compose(recipe, [*overrides]).config, NO_GPU).config


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


def test_checkpointing_keeps_each_layers_input_while_the_head_is_computed() -> None:
    config = resolved("qwen05b_single", "hardware=volta", "attention=sdpa")
    config.activation.checkpointing = Checkpointing.disabled
    stored = plan_memory(config).memory
    config.activation.checkpointing = Checkpointing.enabled
    recomputed = plan_memory(config).memory
    assert stored.activations is not None and recomputed.activations is not None
    saved = stored.activations - recomputed.activations
    tokens = config.packing.row_length
    assert tokens is not None
    # 24 layers keep no more than their input of 896 numbers in fp32; none is whole beside the head's tiles
    assert config.model.facts is not None and config.model.facts.measured is not None
    one_layer = (config.model.facts.measured.saved["fp32/full/sdpa"][4] + 4 * tokens) * tokens
    assert saved == pytest.approx((24 * one_layer - 24 * 4 * 896 * tokens) / GIB)
    assert recomputed.total is not None


def test_with_every_activation_kept_the_parts_add_up() -> None:
    plan = plan_memory(resolved("qwen05b_single"))
    memory = plan.memory
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.buffers, memory.activations)
    assert memory.allocated == pytest.approx(sum(part for part in parts if part is not None))
    assert memory.total == pytest.approx((memory.allocated or 0) * 1.10 + 781 / 1024)  # one GPU talks to no other
    assert plan.fits is True
    assert plan.verdict == f"fits: {memory.allocated:.1f} GiB without the overhead, no more than 83% of 32 GiB"


@pytest.mark.parametrize(
    ("capacity", "checkpointing", "fits", "said"),
    [
        (7.0, Checkpointing.enabled, False, "does not fit: 8.9 GiB are more than 7 GiB"),  # 7.4 GiB of states
        (10.0, Checkpointing.enabled, None, "8.9 GiB without the overhead, more than 83% of 10 GiB, which leaves"),
        (12.0, Checkpointing.enabled, True, "fits: 8.9 GiB without the overhead, no more than 83% of 12 GiB"),
        (16.0, Checkpointing.disabled, False, "does not fit: 20.5 GiB are more than 16 GiB"),
        (18.0, Checkpointing.disabled, None, "20.5 GiB of tensors are more than 18 GiB"),
        (21.0, Checkpointing.disabled, None, "20.5 GiB without the overhead, more than 83% of 21 GiB, which leaves"),
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
    """71 of 80 GiB with a layer's weights and gradients beside all states; its source pages the optimizer's out."""
    plan = plan_memory(resolved("llama2_70b_fsdp"))
    assert plan.fits is None
    assert plan.memory.allocated == pytest.approx(71.2, abs=0.3)
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
    assert tokens_per_pass(short) == 512 and tokens_per_pass(long) == 2 * long.training.max_length
    assert estimate_time(short, solve_batch(short, None), NO_GPU) == estimate_time(
        same, solve_batch(same, None), NO_GPU
    )
    packed = resolved("qwen3b_zero2", *SHORT, "packing=isolated")
    assert tokens_per_pass(packed) == 2 * (packed.packing.row_length or 0) >= 2 * packed.training.max_length
