"""The bounds of the planned speed that docs/limits.md names hold for all recorded evidence."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.compose import compose
from tunebook.data.batch import solve_batch
from tunebook.evidence.schema import read_evidence
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.speed import plan_time

ROOT = Path(__file__).resolve().parents[2]
H200 = ("hardware=hopper", "hardware.memory_gib=140.4")
NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=16.0)
USUAL, FARTHEST = 1 / 3, 2.0  # as docs/limits.md says them
RECORDED = [file for file in sorted(ROOT.glob("recipes/*/evidence/*.json")) if read_evidence(file).hardware.gpu]


@cache
def ratio(file: Path) -> float | None:
    """The speed that is planned for the overrides that evidence names, as a multiple of the faster repeat."""
    evidence = read_evidence(file)
    words = [*evidence.ran.overrides, f"hardware.gpus_per_node={evidence.hardware.gpus}", *H200]
    config = resolve_auto(compose(evidence.ran.recipe, words).config, NO_GPU).config
    speed = plan_time(config, solve_batch(config, None)).tokens_per_second_per_gpu
    measured = [repeat.tokens_per_second_per_gpu or 0.0 for repeat in evidence.repeats]
    if speed is None or not any(measured) or "dataset=jsonl" in evidence.ran.overrides:
        return None  # nothing states the lengths of documents in such files
    return speed / max(measured)


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: f"{file.parent.parent.name}-{file.stem}")
def test_a_planned_speed_is_not_off_by_more_than_the_page_says(file: Path) -> None:
    found = ratio(file)
    assert found is None or 1 / FARTHEST < found < FARTHEST


def test_most_are_within_a_third() -> None:
    ratios = [found for file in RECORDED if (found := ratio(file)) is not None]
    errors = [abs(each - 1) for each in ratios]
    assert len(errors) > 20
    assert statistics.median(errors) < 0.2
    assert sum(error <= USUAL for error in errors) / len(errors) > 0.6
    text = " ".join((ROOT / "docs/limits.md").read_text().split())
    assert f"at most {FARTHEST:g} times too high or too low" in text


def long_rows() -> list[dict[str, Any]]:
    """The measured rows of one document each that are as long as the plan, or the time, allowed: one GPU and two."""
    files = [ROOT / f"benchmarks/results/{name}.jsonl" for name in ("h100x2_sequence", "h200x2_sequence")]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line["verdict"] == "ok" and line["series"].startswith("longest")]


@pytest.mark.parametrize("line", long_rows(), ids=lambda line: f"{line['series']}-{line['name']}")
def test_rows_of_one_long_document_are_planned_by_the_share_of_their_attention(line: dict[str, Any]) -> None:
    config = resolve_auto(compose(None, [*line["overrides"], *line["resolved"]]).config, NO_GPU).config
    speed = plan_time(config, solve_batch(config, None)).tokens_per_second_per_gpu
    assert speed is not None
    lowest = 0.45 if line["name"] == "zero3" else 1 - USUAL  # ZeRO-3 loses less in passes so long
    assert lowest < speed / line["tokens_per_second_per_gpu"] < 1 + USUAL
