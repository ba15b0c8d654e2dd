"""Figures on cards are those in the recorded results, and the sentences about them hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / f"benchmarks/results/{name}.jsonl").read_text().splitlines()]


RESULTS = {line["name"]: line for line in lines_of("h200_qwen05b_single")}
OLDER, NEWER = lines_of("h200x4_recipes"), lines_of("h200x2_recipes")
SHOWN = ("single", "sdpa", "padded", "flash_attention_4_rows_8192", "fp32_as_volta", "ddp", "fsdp", "zero2", "zero3")


def card_of(recipe: str) -> str:
    return " ".join((ROOT / f"recipes/{recipe}/README.md").read_text().split())


def test_the_card_of_one_gpu_shows_what_was_measured() -> None:
    for line in map(RESULTS.__getitem__, SHOWN):
        cells = f"| {line['gpus']} | {line['tokens_per_second_per_gpu']:,.0f} | {line['mfu']:.1%} | "
        assert f"{cells}{max(line['memory_gib']):.1f} |" in card_of("qwen05b_single")


def test_losses_agree_as_the_card_says() -> None:
    reference = RESULTS["sdpa_rows_4096"]["losses"]
    for name in ("sdpa", "padded", "flash_attention_4", "flash_attention_4_rows_8192", "fp32_as_volta"):
        losses = RESULTS[name]["losses"]
        assert len(losses) >= 15
        assert losses == pytest.approx(reference[: len(losses)], rel=1e-4), name
    assert RESULTS["zero2"]["losses"][9] / RESULTS["ddp"]["losses"][9] == pytest.approx(1.05, abs=0.005)
    assert RESULTS["zero3"]["losses"] == pytest.approx(RESULTS["zero2"]["losses"], rel=1e-4)


def on_cards() -> dict[str, dict[str, Any]]:
    """By recipe what its card shows: the newest run that ended, else the newest of which steps were seen."""
    found: dict[str, dict[str, Any]] = {}
    for line in [*OLDER, *NEWER]:
        ended = line["exit_code"] == 0
        if ended or (line.get("steps", 0) > 1 and found.get(line["recipe"], {}).get("exit_code") != 0):
            found[line["recipe"]] = line
    return found


def test_the_card_of_a_recipe_shows_its_run() -> None:
    assert len(on_cards()) == 11
    for recipe, line in on_cards().items():
        row = (
            f"| {line['layers']} of {line['layers_of_the_model']} | {line['gpus']} | {line['steps']} "
            f"| {line['losses'][0]:.2f} | {line['losses'][-1]:.2f} | {line['tokens_per_second_per_gpu']:,.0f} "
            f"| {max(line['memory_gib']):.1f} |"
        )
        section = card_of(recipe).split("### Run on H200")[1]
        assert row in section and f"On {line['date']}, on " in section, recipe
        assert ("Cut short" in card_of(recipe)) == (line["exit_code"] != 0)
        if line["exit_code"] == 0:
            assert line["losses"][-1] < line["losses"][0] / 4, recipe
