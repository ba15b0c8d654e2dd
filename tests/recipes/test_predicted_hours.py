"""The sources' own runs: the predicted hours, worked out by hand, are what the plan says and stand on the cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.data.batch import solve_batch
from tunebook.plan.speed.throughput import TimePlan, plan_time

from ..plan.plans import resolved

ROOT = Path(__file__).resolve().parents[2]
# fp32, padded and recomputed: 1,200.5 tokens/s of 68.31% of a pass x (8 x 3,085,938,688 + 8 x 36 layers x 2048 x 1033)
# = 44.457 TFLOP/s of 67
FP32_SHARE = 0.66354
# compiled, rows of 16,384: 26,355.5 tokens/s x (6 x 3,085,938,688 + 6 x 36 layers x 2048 x 1033) = 500.04 of 989
BF16_SHARE = 0.50560
# 12 layers of Llama 3 8B, compiled, rows of 16,384: 27,452.15 tokens/s x (6 x 3,668,021,248 + 6 x 12 x 4096 x 1033)
WIDE_SHARE = 0.61935
LONG_ATTENTION_SHARE = 0.27  # of Qwen3-4B in rows of 73,472 and 144,128 tokens, two H100
RECOMPUTED_SPEED = 17_810 / 22_233 * 4 / 3  # of the share: four thirds of the work in 1.25 times the time


def planned(recipe: str, *words: str) -> TimePlan:
    config = resolved(recipe, *words)
    return plan_time(config, solve_batch(config, None))


def card(recipe: str) -> str:
    return " ".join((ROOT / f"recipes/{recipe}/README.md").read_text().split())


def test_133_hours_on_8_v100() -> None:
    flops = 8 * 3_085_938_688 + 8 * 36 * 2048 * 1024  # with the forward pass again; documents of up to 1,024 tokens
    computing = 11 * 424 / (1 - 0.4983) * flops / (15.7e12 * FP32_SHARE)  # seconds of a pass
    assert computing == pytest.approx(22.6, abs=0.05)
    lost = 11 * 458 * (1 / 1863 - 1 / 3886)
    speed = 8 * 11 * 424 / (computing + lost)
    hours = 3 * 659_808 * 424 / speed / 3600
    time = planned("qwen3b_zero2_exact", "dataset.mean_tokens=424")
    assert time.tokens_per_second == pytest.approx(speed, rel=1e-3) == pytest.approx(1_556, abs=1)
    assert time.hours == pytest.approx(hours, rel=1e-3) == pytest.approx(150, abs=0.5)
    meets = planned("qwen3b_zero2_exact", "dataset.mean_tokens=373").hours
    assert meets == pytest.approx(133, abs=0.5)
    text = card("qwen3b_zero2_exact")
    assert "meet at about 373 tokens" in text
    assert "About 133 hours" in text
    assert "1,556 tokens per second of the 8 V100, so 150 hours for documents of 424 tokens" in text
    assert "66.4% of fp32" in text


def test_the_same_run_packed_on_v100_and_on_h200() -> None:
    volta = planned("qwen3b_zero2", "dataset.mean_tokens=424").hours
    hopper = planned("qwen3b_zero2", "dataset.mean_tokens=424", "hardware=hopper", "hardware.gpus_per_node=8").hours
    assert volta == pytest.approx(74, abs=0.5)
    assert hopper == pytest.approx(1.37, abs=0.005)
    assert (
        "74 hours on the 8 V100, packed where the article padded (as it ran: 150, `qwen3b_zero2_exact`), and 1.4 hours"
        in card("qwen3b_zero2")
    )


def test_13_5_hours_on_2_nodes_of_8_a100() -> None:
    asked = planned("llama2_70b_fsdp")
    assert (asked.hours, asked.tokens_per_second, asked.tokens_per_second_per_gpu) == (None, None, None)
    assert asked.assumption.startswith(
        "not estimated: no speed was measured on several nodes, where the network decides it; at least 1.02 hours, at "
        "most 4,482 tokens/s in all, as if the 16 GPUs were in one node: what the links between nodes cost is not "
        "counted; assumed: the share of its peak that one H200 with 12 layers of Llama 3 8B"
    )
    products = 8 * 68_976_648_192 + 8 * 80 * 8192 * 1033  # with the attention of as short documents as were measured
    beyond = 8 * 80 * 8192 * (2048 - 1033)
    computing = 2048 / 312e12 * (products / (WIDE_SHARE * RECOMPUTED_SPEED) + beyond / LONG_ATTENTION_SHARE)
    lost = 16_384 * (1 / 11_348.05 - 1 / 12_502) * (68_976_648_192 / 8_030_261_248 * 80 / 32) ** 0.5
    ending = 30e-12 * 68_976_648_192 / 2  # one pass a step, and the measured loss is of two
    assert [computing, lost, ending] == pytest.approx([5.65, 0.62, 1.03], abs=0.01)
    seconds = computing + lost + ending
    together = planned("llama2_70b_fsdp", "hardware.num_nodes=1", "hardware.gpus_per_node=16", "launcher=local")
    assert together.tokens == 500 * 32_768
    assert together.hours == pytest.approx(500 * seconds / 3600, rel=2e-3) == pytest.approx(1.016, abs=0.001)
    assert asked.least_hours == together.hours  # the bound is the speed of one node with all GPUs
    assert asked.most_tokens_per_second == pytest.approx(16 * 2048 / seconds, rel=2e-3)
    text = card("llama2_70b_fsdp")
    assert "it would be 1.02 hours: 7.3 s for each of the 500 steps, where the source took 97 s" in text
    assert round(13.5 * 3600 / 500) == 97


def test_72_hours_on_2_rtx_4090() -> None:
    assert planned("llama3_8b_fsdp_offload").assumption.startswith("not estimated: no measured speed applies to")
    lines = map(json.loads, (ROOT / "benchmarks/results/h200x2_recipes.jsonl").read_text().splitlines())
    slice_: dict[str, Any] = next(line for line in lines if line["name"] == "llama3_8b_fsdp_offload")
    growth = 8_030_261_248 / slice_["num_parameters"]
    hours = 52_000 / 16 * slice_["seconds_per_step"] * growth / 3600
    assert (slice_["seconds_per_step"], growth) == (pytest.approx(0.94, abs=0.005), pytest.approx(4.2, abs=0.05))
    assert hours == pytest.approx(3.5, abs=0.05)
    text = card("llama3_8b_fsdp_offload")
    assert "72 hours" in text
    assert "0.94 s a step, 4.2 times as much for all 8.03 billion parameters, 3,250 steps of the 52,000" in text
    assert "3.5 hours on two H200 and 32 cores that did little else, if a step grows with the parameters" in text
