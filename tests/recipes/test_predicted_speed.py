"""The bounds of the planned speed that docs/limits.md names hold for everything that is recorded in the book."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.compose import compose
from tunebook.data.batch import BatchPlan, solve_batch
from tunebook.evidence.files import read_evidence
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.speed.throughput import TimePlan, plan_time

ROOT = Path(__file__).resolve().parents[2]
H200 = ("hardware=hopper", "hardware.memory_gib=140.4")
NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=16.0)
BOUND, BOUND_OF_SDPA, OF_FEW_LAYERS = 1 / 3, 2.2, (0.6, 2.8)  # as docs/limits.md says them
RECORDED = [file for file in sorted(ROOT.glob("recipes/*/evidence/*.json")) if read_evidence(file).hardware.gpu]


def planned(file: Path) -> tuple[BatchPlan, TimePlan]:
    """What is planned for the words that evidence names, before any data is prepared."""
    evidence = read_evidence(file)
    words = [*evidence.ran.overrides, f"hardware.gpus_per_node={evidence.hardware.gpus}", *H200]
    config = resolve_auto(compose(evidence.ran.recipe, words).config, NO_GPU).config
    batch = solve_batch(config, None)
    return batch, plan_time(config, batch)


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: f"{file.parent.parent.name}-{file.stem}")
def test_a_planned_speed_is_as_near_to_the_recorded_one_as_the_readme_says(file: Path) -> None:
    batch, time = planned(file)
    speeds = [repeat.tokens_per_second_per_gpu for repeat in read_evidence(file).repeats]
    measured = max((speed for speed in speeds if speed is not None), default=None)  # what slows a run down is no plan's
    if time.tokens_per_second_per_gpu is None or measured is None:
        return
    if "dataset=jsonl" in read_evidence(file).ran.overrides:  # nothing states the documents' lengths
        assert "rows are full" in time.assumption
        return
    assert batch.tokens_per_step is not None and batch.rows_per_step is not None
    ratio = time.tokens_per_second_per_gpu / measured
    waits_for_host = "attention=sdpa" in read_evidence(file).ran.overrides  # by many small kernels
    highest = BOUND_OF_SDPA if waits_for_host else 1 + BOUND
    is_small = waits_for_host and "_layers" in file.stem
    lowest, highest = OF_FEW_LAYERS if is_small else (1 - BOUND, highest)
    assert lowest < ratio < highest, "the bounds of the planned speed in docs/limits.md are not true any more"


def test_the_page_names_these_bounds() -> None:
    text = " ".join((ROOT / "docs/limits.md").read_text().split())
    assert "at most a third too low or too high in all recorded evidence" in text
    assert f"with attention=sdpa up to {BOUND_OF_SDPA:g} times too high" in text
    assert "they were {:g} to {:g} times what was measured".format(*OF_FEW_LAYERS) in text


def test_generated_documents_that_leave_rows_empty_are_not_planned_as_if_they_filled_them() -> None:
    """Two documents on each GPU a step: 3,531 tokens a second were measured, 16,865 planned with full rows."""
    batch, time = planned(ROOT / "recipes/zero1_lora/evidence/hopper-4-random_weights.json")
    assert batch.tokens_per_step == pytest.approx(8 * 465.13, abs=1)  # the mean of the 1,500 that are generated
    assert time.tokens_per_second_per_gpu == pytest.approx(3_388, rel=0.02)
    assert "rows are full" not in time.assumption


def recorded(*names: str) -> list[dict[str, Any]]:
    """The lines of some results that ended well."""
    texts = [(ROOT / f"benchmarks/results/{name}.jsonl").read_text() for name in names]
    return [line for text in texts for line in map(json.loads, text.splitlines()) if line["verdict"] == "ok"]


def long_rows() -> list[dict[str, Any]]:
    """The measured rows of one document each that are as long as the plan, or the time, allowed: one GPU and two."""
    return [line for line in recorded("h100x2_sequence", "h200x2_sequence") if line["series"].startswith("longest")]


@pytest.mark.parametrize("line", long_rows(), ids=lambda line: f"{line['series']}-{line['name']}")
def test_rows_of_one_long_document_are_planned_at_the_speed_of_their_attention(line: dict[str, Any]) -> None:
    config = resolve_auto(compose(None, [*line["overrides"], *line["resolved"]]).config, NO_GPU).config
    time = plan_time(config, solve_batch(config, None))
    assert time.tokens_per_second_per_gpu == pytest.approx(line["tokens_per_second_per_gpu"], rel=0.15)
    assert "the attention of long documents" in time.assumption
    assert ("hide behind its computing" in time.assumption) == ("activation.offload=true" in line["overrides"])


def test_copies_to_the_host_have_a_planned_speed_only_in_rows_that_hide_them() -> None:
    """A forward pass of 32,768 tokens takes about a second; copies that fast were not measured."""
    (line,) = [line for line in long_rows() if line["name"] == "fsdp_tiled_offload"]
    shorter = [word.replace("=173056", "=32768") for word in line["overrides"]]
    config = resolve_auto(compose(None, [*shorter, *line["resolved"]]).config, NO_GPU).config
    time = plan_time(config, solve_batch(config, None))
    assert time.tokens_per_second is None and time.tokens
    assert time.assumption == (
        "not estimated: to hide behind its computing, the 6.04 GB that each GPU copies to the host in a forward pass "
        "would need more than 1.8 GB/s, the most that was measured"
    )
