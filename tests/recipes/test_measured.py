"""Figures on cards are those in the recorded results, and the sentences about them hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS: dict[str, dict[str, Any]] = {
    line["name"]: line
    for line in map(json.loads, (ROOT / "tests/bench/results/h200_qwen05b_single.jsonl").read_text().splitlines())
}
CARD = (ROOT / "recipes/qwen05b_single/README.md").read_text()


@pytest.mark.parametrize(
    "name",
    ["single", "sdpa", "padded", "flash_attention_4_rows_8192", "fp32_as_volta", "ddp", "fsdp", "zero2", "zero3"],
)
def test_the_card_shows_what_was_measured(name: str) -> None:
    line = RESULTS[name]
    cells = f"| {line['gpus']} | {line['tokens_per_second_per_gpu']:,.0f} | {line['mfu']:.1%} | "
    assert f"{cells}{max(line['memory_gib']):.1f} |" in CARD


def test_the_losses_agree_as_the_card_says() -> None:
    reference = RESULTS["sdpa_rows_4096"]["losses"]
    for name in ("sdpa", "padded", "flash_attention_4", "flash_attention_4_rows_8192", "fp32_as_volta"):
        losses = RESULTS[name]["losses"]
        assert len(losses) >= 15
        assert losses == pytest.approx(reference[: len(losses)], rel=1e-4), name


def test_zero_differs_as_the_card_says() -> None:
    assert RESULTS["zero2"]["losses"][9] / RESULTS["ddp"]["losses"][9] == pytest.approx(1.05, abs=0.005)
    assert RESULTS["zero3"]["losses"] == pytest.approx(RESULTS["zero2"]["losses"], rel=1e-4)


RECIPE_RUNS: list[dict[str, Any]] = [
    json.loads(line) for line in (ROOT / "tests/bench/results/h200x4_recipes.jsonl").read_text().splitlines()
]
ON_CARDS = [line for line in RECIPE_RUNS if line.get("steps", 0) > 1]


@pytest.mark.parametrize("line", ON_CARDS, ids=[line["name"] for line in ON_CARDS])
def test_the_card_of_a_recipe_shows_its_run(line: dict[str, Any]) -> None:
    card = (ROOT / f"recipes/{line['recipe']}/README.md").read_text()
    row = (
        f"| {line['layers']} of {line['layers_of_the_model']} | {line['gpus']} | {line['steps']} "
        f"| {line['losses'][0]:.2f} | {line['losses'][-1]:.2f} | {line['tokens_per_second_per_gpu']:,.0f} "
        f"| {max(line['memory_gib']):.1f} |"
    )
    assert row in card
    assert ("Cut short" in card) == (line["exit_code"] != 0)
    assert len(line["losses"]) == line["steps"]


def test_the_recipes_that_ran_learned() -> None:
    ran = {line["recipe"]: line for line in RECIPE_RUNS if line["exit_code"] == 0}
    assert set(ran) == {"qwen3b_zero2", "zero1_lora", "zero3_lora", "llama3_8b_ddp", "llama2_70b_fsdp"}
    for line in ran.values():
        assert line["losses"][-1] < line["losses"][0] / 4, line["recipe"]
        assert line["parallelism_found"]["ranks"] == line["gpus"]


def test_two_strategies_had_the_same_losses_as_the_cards_say() -> None:
    losses = {line["recipe"]: line["losses"] for line in RECIPE_RUNS if "losses" in line}
    assert losses["zero2_lora"] == pytest.approx(losses["zero1_lora"][:16], rel=3.6e-4)
    assert losses["llama3_8b_fsdp_offload"] == pytest.approx(losses["llama3_8b_ddp"][:7], rel=2.7e-4)
