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
