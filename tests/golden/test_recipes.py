"""What every recipe resolves to on the machine of its source: the plan in `plans.yaml`, all values in `runs.yaml`.

Planning all of them takes minutes without a cache, so a usual run of the tests takes some.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden.record import check, read
from tunebook.config.book import find_recipes
from tunebook.config.frozen import TYPED_IN_KEY, config_to_yaml
from tunebook.config.launchers import SlurmConfig
from tunebook.hardware.detect import Machine
from tunebook.launch.commands import launch_command, ranks_command
from tunebook.launch.slurm import job_script
from tunebook.plan.draft import Draft, draft_json, draft_run

NO_GPU = Machine(gpus=[], driver=None, num_cpus=8, host_memory_gib=32.0)
BATCH = ("global_samples", "global_tokens", "world_size", "accumulation", "micro", "row_length", "is_packed",
         "documents_per_step", "tokens_per_step", "steps_per_epoch", "total_steps", "sequence_group_size")  # fmt: skip

OF_DRAWN_DATA = "data-file-not-found"  # of digits: whether its images are drawn here
SOME = ("quickstart", "qwen3b_zero2", "llama3_8b_ddp", "zero3_lora", "dolly3b_ray_zero3_offload", "gpt_oss_20b_lora")


@cache
def draft_of(recipe: str) -> Draft:
    return draft_run(recipe, [], [], NO_GPU)


def plan(draft: Draft) -> dict[str, Any]:
    found = draft_json(draft)
    folder, config = Path("RUN"), draft.config
    launch = " ".join(launch_command(config, folder))
    if isinstance(config.launcher, SlurmConfig):
        launch += "\n" + " ".join(ranks_command(config, folder))
        launch += f"\n{job_script(config, folder)}"
    batch = {key: found["batch"][key] for key in BATCH if found["batch"][key] is not None}
    return {
        "choices": {choice["key"]: choice["value"] for choice in found["choices"]},
        "batch": batch,
        "gpu_memory_gib": round(found["memory_gib"]["total"], 2),
        "host_memory_gib": round(found["host_memory_gib"]["total"], 2),
        "fits": found["fits"],
        "problems": [problem["id"] for problem in found["problems"] if problem["id"] != OF_DRAWN_DATA],
        "launch": launch.replace(sys.executable, "python").replace(str(Path.cwd()), "FOLDER"),
    }


def tolerance(path: str) -> float:
    return 0.2 if path.endswith("memory_gib") and "/choices/" not in path else 0.0


@pytest.mark.nightly
def test_plans() -> None:
    check("plans", {recipe: plan(draft_of(recipe)) for recipe in find_recipes([])}, tolerance)


def test_plans_of_some_recipes() -> None:
    check("plans", {recipe: plan(draft_of(recipe)) for recipe in SOME}, tolerance, is_part=True)


def values(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{path}{name}"
        if key != TYPED_IN_KEY:
            found |= values(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return found


def resolved_values(recipe: str) -> dict[str, Any]:
    return values(yaml.load(config_to_yaml(draft_of(recipe).config), Loader=yaml.CSafeLoader))


@pytest.mark.nightly
def test_resolved_configurations() -> None:
    """Values that more than half of the recipes have are written once."""
    of = {recipe: resolved_values(recipe) for recipe in find_recipes([])}
    counts = Counter((key, json.dumps(value)) for run in of.values() for key, value in run.items())
    usual = {key: json.loads(value) for (key, value), number in counts.items() if number > len(of) / 2}
    recipes = {
        name: {key: value for key, value in run.items() if key not in usual or value != usual[key]}
        | {key: "(absent)" for key in usual if key not in run}
        for name, run in of.items()
    }
    check("runs", {"usual": usual, "recipes": recipes})


@pytest.mark.parametrize("recipe", SOME)
def test_resolved_configurations_of_some_recipes(recipe: str) -> None:
    recorded = read("runs")
    expected = {
        key: value for key, value in (recorded["usual"] | recorded["recipes"][recipe]).items() if value != "(absent)"
    }
    assert resolved_values(recipe) == expected
