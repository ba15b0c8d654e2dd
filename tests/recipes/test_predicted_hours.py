"""The sources' own runs: the predicted hours on the cards are what the plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.data.batch import solve_batch
from tunebook.plan.speed import TimePlan, plan_time

from ..plan.plans import resolved

ROOT = Path(__file__).resolve().parents[2]


def planned(recipe: str, *words: str) -> TimePlan:
    config = resolved(recipe, *words)
    return plan_time(config, solve_batch(config, None))


def card(recipe: str) -> str:
    return " ".join((ROOT / f"recipes/{recipe}/README.md").read_text().split())


def test_133_hours_on_8_v100() -> None:
    products, attention = 6 * 3_085_938_688, 12 * 36 * 2048 * 1024 / 2  # documents of up to 1,024 tokens
    # half of a pass is padding, layers are recomputed, and ZeRO-2
    speed = 0.5 * 0.8 * 0.8 * 15.7e12 / (products / 0.6 + attention / 0.3)
    hours = 3 * 659_808 * 424 / (8 * speed) / 3600
    time = planned("qwen3b_zero2_exact", "dataset.mean_tokens=424")
    assert time.hours == pytest.approx(hours, rel=1e-3) == pytest.approx(188, abs=0.5)
    assert "about 1,200 tokens per second of the 8 V100, so about 190 hours" in card("qwen3b_zero2_exact")


def test_the_same_run_packed_on_v100_and_on_h200() -> None:
    volta = planned("qwen3b_zero2", "dataset.mean_tokens=424").hours
    hopper = planned("qwen3b_zero2", "dataset.mean_tokens=424", "hardware=hopper", "hardware.gpus_per_node=8").hours
    assert (volta, hopper) == (pytest.approx(94, abs=0.5), pytest.approx(1.3, abs=0.05))
    text = card("qwen3b_zero2")
    assert "about 94 hours on the 8 V100" in text and "about 1.3 hours on 8 H100 or H200" in text


def test_13_5_hours_on_2_nodes_of_8_a100() -> None:
    time = planned("llama2_70b_fsdp")
    assert time.tokens == 500 * 32_768
    assert time.hours == pytest.approx(0.99, abs=0.005)
    assert "never measured on several nodes, whose links are not counted: at most this speed" in time.assumption
    assert "about 1 hour: 7.1 s for each of the 500 steps, where the source took 97 s" in card("llama2_70b_fsdp")


def test_72_hours_on_2_rtx_4090() -> None:
    lines = map(json.loads, (ROOT / "benchmarks/results/h200x2_recipes.jsonl").read_text().splitlines())
    slice_: dict[str, Any] = next(line for line in lines if line["name"] == "llama3_8b_fsdp_offload")
    growth = 8_030_261_248 / slice_["num_parameters"]
    hours = 52_000 / 16 * slice_["seconds_per_step"] * growth / 3600
    assert (slice_["seconds_per_step"], growth) == (pytest.approx(0.94, abs=0.005), pytest.approx(4.2, abs=0.05))
    assert hours == pytest.approx(3.5, abs=0.05)
    text = card("llama3_8b_fsdp_offload")
    assert "0.94 s a step, 4.2 times as much for all 8.03 billion parameters, 3,250 steps of the 52,000" in text
    assert "3.5 hours on two H200 and 32 cores that did little else, if a step grows with the parameters" in text
