"""Figures on cards are those in the recorded results, and the sentences about them hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS: dict[str, dict[str, Any]] = {
    line["name"]: line
    for line in map(json.loads, (ROOT / "benchmarks/results/h200_qwen05b_single.jsonl").read_text().splitlines())
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


OLDER, NEWER = (
    [json.loads(line) for line in (ROOT / f"benchmarks/results/{name}.jsonl").read_text().splitlines()]
    for name in ("h200x4_recipes", "h200x2_recipes")
)


def on_cards() -> dict[str, dict[str, Any]]:
    """By recipe what its card shows: the newest run that ended, else the newest of which steps were seen."""
    found: dict[str, dict[str, Any]] = {}
    for line in [*OLDER, *NEWER]:
        ended = line["exit_code"] == 0
        if ended or (line.get("steps", 0) > 1 and found.get(line["recipe"], {}).get("exit_code") != 0):
            found[line["recipe"]] = line
    return found


ON_CARDS = on_cards()


def card_of(recipe: str) -> str:
    return (ROOT / f"recipes/{recipe}/README.md").read_text()


@pytest.mark.parametrize("recipe", ON_CARDS)
def test_the_card_of_a_recipe_shows_its_run(recipe: str) -> None:
    line, card = ON_CARDS[recipe], card_of(recipe)
    row = (
        f"| {line['layers']} of {line['layers_of_the_model']} | {line['gpus']} | {line['steps']} "
        f"| {line['losses'][0]:.2f} | {line['losses'][-1]:.2f} | {line['tokens_per_second_per_gpu']:,.0f} "
        f"| {max(line['memory_gib']):.1f} |"
    )
    told = " ".join(card.split("### Run on H200")[1].split())
    assert row in told
    assert f"On {line['date']}, on " in told
    assert f"`benchmarks/results/{'h200x2_recipes' if line in NEWER else 'h200x4_recipes'}.jsonl`" in told
    assert f"on {'`' + line['attention'] + '`' if 'attention' in line else 'sdpa'}" in told
    assert ("Cut short" in card) == (line["exit_code"] != 0)
    assert len(line["losses"]) == line["steps"]


@pytest.mark.parametrize(
    ("recipe", "digits"),
    [
        ("llama3_8b_fsdp_offload", 2),
        ("llama2_70b_fsdp_1node", 2),
        ("dolly3b_ray_zero3_offload", 2),
        ("dolly3b_zero3_nvme", 1),
    ],
)
def test_the_card_says_how_long_a_step_took_with_states_off_the_gpu(recipe: str, digits: int) -> None:
    assert f"A step took {ON_CARDS[recipe]['seconds_per_step']:.{digits}f} s, " in " ".join(card_of(recipe).split())


def test_the_recipes_that_ran_learned() -> None:
    ran = {recipe: line for recipe, line in ON_CARDS.items() if line["exit_code"] == 0}
    older = {"qwen3b_zero2", "zero1_lora", "zero3_lora", "llama3_8b_ddp", "llama2_70b_fsdp"}
    newer = {
        "zero2_lora",
        "llama3_8b_fsdp_offload",
        "llama3_8b_fp8",
        "llama2_70b_fsdp_1node",
        "dolly3b_ray_zero3_offload",
    }
    assert set(ran) == older | newer
    assert set(ON_CARDS) - set(ran) == {"dolly3b_zero3_nvme"}
    for line in ran.values():
        assert line["losses"][-1] < line["losses"][0] / 4, line["recipe"]
        assert line["parallelism_found"]["ranks"] == line["gpus"]


def largest_difference(losses: list[float], reference: list[float]) -> float:
    return max(abs(loss / other - 1) for loss, other in zip(losses, reference, strict=True))


def test_two_strategies_had_the_same_losses_as_the_cards_say() -> None:
    losses = {line["recipe"]: line["losses"] for line in OLDER if "losses" in line}
    for recipe, other, steps, told in (
        ("zero2_lora", "zero1_lora", 16, "3.5e-04"),
        ("llama3_8b_fsdp_offload", "llama3_8b_ddp", 7, "2.6e-04"),
    ):
        assert f"{largest_difference(losses[recipe], losses[other][:steps]):.1e}" == told
        card = " ".join(card_of(recipe).split())
        assert f"cut off after {steps} steps, had the losses of `{other}` up to there, to {told}" in card


def test_fp8_had_the_losses_of_bf16_as_the_card_says() -> None:
    losses = {line["recipe"]: line["losses"] for line in NEWER}
    assert largest_difference(losses["llama3_8b_fp8"], losses["llama3_8b_fsdp_offload"]) < 0.0026
    assert ON_CARDS["llama3_8b_fp8"]["parallelism_found"]["fp8_layers"] == 20
    card = " ".join(card_of("llama3_8b_fp8").split())
    assert "20 linear layers, 5 in each block, were in fp8" in card
    assert "Its losses are those of `llama3_8b_fsdp_offload`, in bf16 on the same machine, within 0.26%" in card
