"""Predicted speeds, memory and hours: those on cards are the plan's, and recorded runs were as fast as predicted."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from tunebook.data.batch import solve_batch
from tunebook.evidence.schema import read_evidence
from tunebook.plan.memory.verdict import plan_memory
from tunebook.plan.show import about
from tunebook.plan.speed import TimePlan, plan_time

from ..plan.plans import resolved

ROOT = Path(__file__).resolve().parents[2]
CARDS = {card.parent.name: " ".join(card.read_text().split()) for card in sorted(ROOT.glob("recipes/*/README.md"))}
MARK = "Estimated by `tunebook plan`, not measured: "
H200 = ("hardware=hopper", "hardware.memory_gib=140.4")
USUAL, FARTHEST = 1 / 3, 1.8  # as docs/limits.md says them


def planned(recipe: str | None, *words: str) -> TimePlan:
    config = resolved(recipe, *words)
    return plan_time(config, solve_batch(config, None))


def test_a_card_without_evidence_says_that_the_recipe_was_not_run() -> None:
    recipes = [recipe for recipe, text in CARDS.items() if MARK in text]
    assert len(recipes) >= 8
    for recipe in recipes:
        has_evidence = any((ROOT / "recipes" / recipe / "evidence").glob("*.json"))
        assert ("This recipe has not been run" in CARDS[recipe]) is not has_evidence


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [recipe for recipe, text in CARDS.items() if MARK in text])
def test_the_estimates_on_a_card_are_those_of_the_plan(recipe: str) -> None:
    config = resolved(recipe)
    memory, time = plan_memory(config), plan_time(config, solve_batch(config, None))
    stated = f"{memory.needed:.1f} GiB of {config.hardware.memory_gib:g} GiB"
    if time.tokens_per_second_per_gpu is not None:
        stated += f" and about {about(time.tokens_per_second_per_gpu)} tokens/s per GPU"
    assert MARK + stated in CARDS[recipe]
    for hours in re.findall(r"about ([\d.]+) hours for all", CARDS[recipe]):
        assert time.hours is not None and about(time.hours) == hours


def test_133_hours_on_8_v100() -> None:
    products, attention = 6 * 3_085_938_688, 12 * 36 * 2048 * 1024 / 2  # documents of up to 1,024 tokens
    # half of a pass is padding, layers are recomputed, and ZeRO-2
    speed = 0.5 * 0.8 * 0.8 * 15.7e12 / (products / 0.6 + attention / 0.3)
    hours = 3 * 659_808 * 424 / (8 * speed) / 3600
    time = planned("qwen3b_zero2_exact", "dataset.mean_tokens=424")
    assert time.hours == pytest.approx(hours, rel=1e-3) == pytest.approx(188, abs=0.5)
    assert "about 1,200 tokens per second of the 8 V100, so about 190 hours" in CARDS["qwen3b_zero2_exact"]


@pytest.mark.nightly
def test_the_same_run_packed_on_v100_and_on_h200() -> None:
    volta = planned("qwen3b_zero2", "dataset.mean_tokens=424").hours
    hopper = planned("qwen3b_zero2", "dataset.mean_tokens=424", "hardware=hopper", "hardware.gpus_per_node=8").hours
    assert (volta, hopper) == (pytest.approx(94, abs=0.5), pytest.approx(1.36, abs=0.05))
    text = CARDS["qwen3b_zero2"]
    assert "about 94 hours on the 8 V100" in text and "about 1.4 hours on 8 H100 or H200" in text


@pytest.mark.nightly
def test_13_5_hours_on_2_nodes_of_8_a100() -> None:
    time = planned("llama2_70b_fsdp")
    assert time.tokens == 500 * 32_768
    assert time.hours == pytest.approx(1.175, abs=0.005)
    assert "about 1.2 hours: 8.5 s for each of the 500 steps, where the source took 97 s" in CARDS["llama2_70b_fsdp"]


@pytest.mark.nightly
def test_planned_speeds_are_as_close_to_recorded_ones_as_the_page_says() -> None:
    ratios = []
    for file in sorted(ROOT.glob("recipes/*/evidence/*.json")):
        evidence = read_evidence(file)
        measured = [repeat.tokens_per_second_per_gpu or 0.0 for repeat in evidence.repeats]
        if evidence.hardware.gpu is None or not any(measured) or "dataset=file" in evidence.ran.overrides:
            continue  # nothing states the lengths of documents in such files
        words = (*evidence.ran.overrides, f"hardware.gpus_per_node={evidence.hardware.gpus}", *H200)
        if (speed := planned(evidence.ran.recipe, *words).tokens_per_second_per_gpu) is not None:
            ratios.append(speed / max(measured))
    errors = [abs(ratio - 1) for ratio in ratios]
    assert len(ratios) > 20 and min(ratios) > 1 / FARTHEST and max(ratios) < FARTHEST
    assert statistics.median(errors) < 0.2
    assert sum(error <= USUAL for error in errors) / len(errors) > 0.8
    text = " ".join((ROOT / "docs/limits.md").read_text().split())
    assert f"at most {FARTHEST:g} times too high or too low" in text


def long_rows() -> list[dict[str, Any]]:
    """The measured rows of one document each that are as long as the plan, or the time, allowed: one GPU and two."""
    files = [ROOT / f"benchmarks/results/{name}.jsonl" for name in ("h100x2_sequence", "h200x2_sequence")]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line["verdict"] == "ok" and line["series"].startswith("longest")]


@pytest.mark.nightly
@pytest.mark.parametrize("line", long_rows(), ids=lambda line: f"{line['series']}-{line['name']}")
def test_rows_of_one_long_document_are_planned_by_the_share_of_their_attention(line: dict[str, Any]) -> None:
    speed = planned(None, *line["overrides"], *line["resolved"]).tokens_per_second_per_gpu
    assert speed is not None
    lowest = 0.45 if line["name"] == "zero3" else 1 - USUAL  # ZeRO-3 loses less in passes so long
    assert lowest < speed / line["tokens_per_second_per_gpu"] < 1 + USUAL
