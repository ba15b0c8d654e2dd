"""The estimated speed and time: numbers by hand, what is not known is said, and recorded runs are near."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Generation,
    Offload,
    PackingMode,
    PeftMethod,
    Strategy,
)
from tunebook.config.schema import RunConfig, ZeroConfig
from tunebook.data.batch import BatchPlan, solve_batch
from tunebook.data.synthetic import generate
from tunebook.plan.speed import SHARES, TimePlan, plan_time, tokens_of_the_run

from .plans import resolved

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
H200 = ("hardware=hopper", "hardware.memory_gib=139.8")
ROWS = ("activation=stored", "packing.row_length=16384", "training.micro_batch_size=1")
KERNELS = ("attention=varlen_attention", "model.compile_layers=true")
# FLOPs per token of Qwen2.5-3B: 6 x 3,085,938,688 in products, at 55% of the peak, and 12 x 36 layers x 2,048 x
# 1,000 / 2 in the attention of documents of 1,000 tokens, at 30% of it
NUM_PARAMETERS = 3_085_938_688
PRODUCTS, ATTENTION = 6 * NUM_PARAMETERS / 0.55, 442_368_000 / 0.3
# sdpa computes every pair of tokens of a row of 16,384, at 20%
EVERY_PAIR = 2 * 16.384 * 442_368_000 / 0.2
HOST_S = 0.015 + 36 * 0.0025  # of a pass of compiled layers


def by_hand(
    factor: float = 1.0, host: float = 1.0, *, flops: float = PRODUCTS + ATTENTION, tokens: float = 16_384,
    trained: int = NUM_PARAMETERS, tflops: float = 989.0, update: float = 20e-12,
) -> float:  # fmt: skip
    """Tokens per second in steps of four passes, of which the host takes so many times `HOST_S`.

    `update`: seconds for each parameter that the rank updates.
    """
    computed = tokens * flops / (tflops * 1e12 * factor)
    busy = computed / math.cbrt(computed**3 + (host * HOST_S) ** 3)
    return 4 * tokens / (4 * computed / (busy if busy < 0.95 else 1) + trained * update)


def changed(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """A copy with other values at dotted keys, which takes a hundredth of the time of composing it."""
    copied = copy.deepcopy(config)
    for key, value in values.items():
        *path, name = key.split(".")
        group: Any = copied
        for part in path:
            group = getattr(group, part)
        setattr(group, name, value)
    return copied


def qwen_3b(**values: Any) -> RunConfig:
    """Qwen2.5-3B on one H200, compiled, in rows of 16,384 tokens; values at dotted keys, with __ for a dot."""
    base = resolved("qwen3b_zero2", *H200, "parallelism=single", "hardware.gpus_per_node=1", *ROWS, *KERNELS)
    return changed(base, {key.replace("__", "."): value for key, value in values.items()})


def batch_of(config: RunConfig, **changes: Any) -> BatchPlan:
    """100 steps of 4 full passes of documents of 1,000 tokens."""
    ranks = (config.hardware.gpus_per_node or 1) * config.hardware.num_nodes
    micro, row = config.training.micro_batch_size or 1, config.packing.row_length or 1
    is_packed = config.packing.mode is PackingMode.isolated
    values: dict[str, Any] = {
        "global_samples": 64, "global_tokens": None, "world_size": ranks, "micro_batch_size": micro,
        "accumulation": 4, "rows_per_step": 4 * micro * ranks, "row_length": row, "is_packed": is_packed,
        "is_estimate": False, "documents_per_step": 64.0, "tokens_per_step": 4.0 * micro * ranks * row,
        "num_documents": 6_400, "steps_per_epoch": 100, "total_steps": 100, "attended_length": 1000.0,
        "padding_share": 0.0 if is_packed else None,
    }  # fmt: skip
    return BatchPlan(**values | changes)


def timed(config: RunConfig, **changes: Any) -> TimePlan:
    return plan_time(config, batch_of(config, **changes))


def spread(strategy: Strategy, gpus: int = 8) -> dict[str, Any]:
    return {"parallelism__strategy": strategy, "hardware__gpus_per_node": gpus}


PLAIN = {"model__compile_layers": False}
MASKED = PLAIN | {"attention__implementation": Attention.sdpa}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        (PLAIN, {"factor": 0.75}),
        (MASKED, {"factor": 0.75, "flops": PRODUCTS + EVERY_PAIR}),
        ({"activation__checkpointing": Checkpointing.enabled}, {"factor": 0.8}),
        ({"activation__memory_budget": 0.6}, {}),
        ({"activation__memory_budget": 0.4}, {"factor": 0.85}),
        (spread(Strategy.ddp), {"factor": 0.95}),
        (spread(Strategy.fsdp), {"factor": 0.9}),
        (spread(Strategy.zero2) | PLAIN, {"factor": 0.8 * 0.75, "host": 2.5 * 1.3}),
        (spread(Strategy.zero3) | PLAIN, {"factor": 0.5 * 0.75, "host": 2.5 * 4}),
        ({"packing__row_length": 2048}, {"tokens": 2048}),
        ({"packing__row_length": 2048} | PLAIN, {"factor": 0.75, "tokens": 2048, "host": 2.5}),
        ({"packing__row_length": 2048} | spread(Strategy.fsdp), {"factor": 0.9, "tokens": 2048, "host": 1.3}),
        ({"activation__offload": True}, {"factor": 0.2}),
        ({"parallelism": ZeroConfig(strategy=Strategy.zero2, offload_optimizer=Offload.cpu)}, {"update": 1e-9}),
        (
            {"parallelism": ZeroConfig(strategy=Strategy.zero3, offload_parameters=Offload.nvme)},
            {"update": 15e-9, "host": 4},
        ),
    ],
)
def test_the_speed_by_hand(changes: dict[str, Any], expected: dict[str, float]) -> None:
    time = timed(qwen_3b(**changes))
    assert time.tokens_per_second_per_gpu == pytest.approx(by_hand(**expected), rel=1e-3)
    is_short = expected.get("tokens") == 2048 or expected.get("host", 1) >= 4
    assert ("too few tokens in a pass to keep a GPU busy" in time.assumption) is is_short
    assert ("the updates of weights take" in time.assumption) is (expected.get("tokens") == 2048)
    assert ("the updates of weights on the host, known to a factor of two only, take" in time.assumption) is (
        "update" in expected
    )


def test_the_time_by_hand() -> None:
    time, speed = timed(qwen_3b(**spread(Strategy.zero2))), 8 * by_hand(0.8)
    assert time.tokens == 100 * 4 * 16_384 * 8
    assert time.tokens_per_second == pytest.approx(speed, rel=1e-3)
    assert time.hours == pytest.approx(52_428_800 / speed / 3600, rel=1e-3)
    assert time.gpu_hours == pytest.approx(8 * (time.hours or 0))
    assert time.assumption == (
        "right to about a third: 55% of 989 TFLOP/s (Qwen2.5-3B, h200_selective.jsonl); x 0.8: zero2 "
        "(h200x4_speed.jsonl)"
    )


def test_an_adapter_computes_no_gradients_of_frozen_weights() -> None:
    config = qwen_3b(peft__method=PeftMethod.lora, peft__rank=16)
    # 36 layers of rank 16: queries and outputs, keys and values, gate, up and down
    trained = 36 * 16 * (2 * (2048 + 2048) + 2 * (2048 + 256) + 3 * (2048 + 11008))
    flops = (4 * NUM_PARAMETERS + 2 * trained) / 0.55 + ATTENTION
    speed = by_hand(host=2, flops=flops, trained=trained)
    assert timed(config).tokens_per_second_per_gpu == pytest.approx(speed, rel=1e-3)


def test_another_generation_takes_the_same_share_of_its_own_peak_and_says_so() -> None:
    time = timed(qwen_3b(hardware__generation=Generation.ampere))
    assert time.tokens_per_second_per_gpu == pytest.approx(by_hand(tflops=312), rel=1e-3)
    assert "never measured on ampere GPUs" in time.assumption


def test_the_peak_is_that_of_the_gpu_which_is_there() -> None:
    config = qwen_3b(hardware__generation=Generation.ampere)
    time = plan_time(config, batch_of(config), gpu_name="NVIDIA A10G")
    assert time.tokens_per_second_per_gpu == pytest.approx(by_hand(tflops=70), rel=1e-3)
    part = plan_time(config, batch_of(config), gpu_name="NVIDIA A100-SXM4-80GB MIG 1g.10gb")
    assert part.tokens_per_second is None
    assert part.assumption == "not estimated: no peak is known for NVIDIA A100-SXM4-80GB MIG 1g.10gb in bf16"


def test_adapters_over_a_base_on_nvme_have_no_estimate() -> None:
    nvme = ZeroConfig(strategy=Strategy.zero3, offload_parameters=Offload.nvme)
    time = timed(qwen_3b(parallelism=nvme, peft__method=PeftMethod.lora))
    assert time.tokens_per_second is None
    assert time.assumption == "not estimated: adapters over a base on NVMe were never measured"


def test_padding_is_computed_and_does_not_count() -> None:
    padded = qwen_3b(**PLAIN, packing__mode=PackingMode.padded, training__micro_batch_size=2)
    real = 0.75 * 2 * 16_384
    known = timed(padded, padding_share=0.25, tokens_per_step=4 * real)
    assert known.tokens_per_second_per_gpu == pytest.approx(by_hand(0.75 * 0.75, tokens=real), rel=1e-3)
    unknown = timed(padded)
    assert unknown.tokens_per_second_per_gpu == pytest.approx(by_hand(0.5 * 0.75, tokens=2 * 16_384), rel=1e-3)
    assert "x 0.5: the rest of each row is padding" in unknown.assumption
    one_row = changed(padded, {"training.micro_batch_size": 1})  # each pass as wide as its one document
    assert "padding" not in timed(one_row).assumption


def test_every_share_names_a_recorded_result() -> None:
    for share in SHARES.values():
        assert (RESULTS / share.source.rpartition(", ")[2]).is_file()


def test_tokens_of_a_run() -> None:
    config = qwen_3b()  # 3 epochs
    smaller_last_step = batch_of(config, tokens_per_step=1000.0, num_documents=6_390, total_steps=300)
    assert tokens_of_the_run(config, smaller_last_step) == 3 * 6_390 / 64 * 1000
    assert tokens_of_the_run(config, batch_of(config, tokens_per_step=None)) is None
    assert tokens_of_the_run(config, batch_of(config, total_steps=None)) is None
    budget = batch_of(config, tokens_per_step=None, global_tokens=32_768, global_samples=None, total_steps=500)
    assert tokens_of_the_run(config, budget) == 500 * 32_768


def test_generated_documents_have_steps_tokens_and_hours() -> None:
    config = resolved("qwen05b_single", *H200, *ROWS, "dataset=synthetic", "dataset.max_documents=10560")
    batch = solve_batch(config, None)
    # 10,560 documents in steps of 528, three times
    assert (batch.num_documents, batch.steps_per_epoch, batch.total_steps) == (10_560, 20, 60)
    time = plan_time(config, batch)
    settings = config.dataset.synthetic
    batches = generate(settings, num_documents=10_560, vocab_size=1000, eos_token_id=0)
    lengths = np.concatenate([batch.column("input_ids").value_lengths().to_numpy() for batch in batches])
    num_tokens = 3 * int(np.minimum(lengths, config.training.max_length).sum())
    assert time.tokens == pytest.approx(num_tokens, rel=1e-5)
    assert time.tokens_per_second is not None
    assert time.hours == pytest.approx(num_tokens / time.tokens_per_second / 3600, rel=1e-5)
