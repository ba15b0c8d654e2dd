"""Finished runs of the quickstart that were never trained: real configuration and manifest, made-up numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands.verify import find_claim, verify_command
from tunebook.config.choices import Generation
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.identity import config_hash
from tunebook.config.schema import RunConfig
from tunebook.evidence import schema
from tunebook.evidence.compare import Comparison, Row, compare
from tunebook.evidence.gather import read_finished
from tunebook.evidence.schema import Hardware, content_hash
from tunebook.facts.generations import GENERATIONS
from tunebook.hardware.detect import Gpu, Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.record.manifest import MANIFEST_FILE, RunState, finish_manifest, read_manifest, start_manifest
from tunebook.record.run_folder import PLAN_FILE, RUN_FILE

NUM_STEPS = 60
CPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
H200 = {"name": "NVIDIA H200", "memory_gib": 139.8, "generation": "hopper"}
CARD = "# quickstart\n\n## Claim\n\nIt learns.\n\n## Evidence\n\nNone recorded yet.\n\n### Measured\n\nBy hand.\n"
MakeRun = Callable[..., Path]
Record = Callable[..., Path]


def curve(scale: float = 1.0) -> list[float]:
    """Falls from 6 towards 0.1; the last steps are `scale` times as high."""
    losses = [0.1 + 6.0 * 0.9**step for step in range(NUM_STEPS)]
    return [*losses[:-10], *(scale * loss for loss in losses[-10:])]


@cache
def resolved(*words: str) -> RunConfig:
    """The quickstart with overrides on a machine without GPUs; not to be changed."""
    return resolve_auto(compose("quickstart", list(words)).config, CPU).config


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run folder to copy from."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    folder.mkdir()
    config = resolved()
    (folder / RUN_FILE).write_text(config_to_yaml(config))
    (folder / PLAN_FILE).write_text("{}")
    start_manifest(
        folder, config, world_size=1, command=["tunebook", "train", "quickstart", "outputs=/somewhere"],
        tokenizer_sha256="1" * 64, chat_template_sha256="2" * 64,
        dataset={"records": [], "fingerprint": "4" * 64, "content_sha256": "3" * 64},
    )  # fmt: skip
    finish_manifest(folder, RunState.finished, 0, step=NUM_STEPS)
    return folder


@pytest.fixture
def make_run(whole_run: Path, tmp_path: Path) -> MakeRun:
    """Make a run: overrides for its configuration, `manifest` for sections of its manifest, the rest its numbers."""
    count = iter(range(100))

    def make(
        *words: str,
        losses: list[float | None] | None = None,
        speed: float = 1000.0,
        memory: float = 2.0,
        score: float = 0.9,
        manifest: dict[str, dict[str, Any]] | None = None,
        gpus: int = 0,
        replaced: dict[str, str] | None = None,
        validation: dict[int, float] | None = None,
    ) -> Path:
        number = next(count)
        folder = tmp_path / "outputs" / "quickstart" / f"2026-11-21T10-00-{number:02d}Z"
        shutil.copytree(whole_run, folder)
        config = deepcopy(resolved(*words))
        if gpus:
            config.hardware.generation = Generation.hopper
        (folder / RUN_FILE).write_text(config_to_yaml(config))
        for old, new in (replaced or {}).items():
            text = (folder / RUN_FILE).read_text()
            assert old in text
            (folder / RUN_FILE).write_text(text.replace(old, new))
        _change_manifest(folder, {"status": {"started": started(number)}} | (manifest or {}), gpus, words)
        lines = [
            {
                "step": step,
                "num_steps": 1,
                "loss": loss,
                "tokens_per_second_per_gpu": speed,
                "memory_gib": [memory],
                "seconds": 0.1 + number / 1000,
            }  # no two runs take the same time
            | ({} if loss is not None else {"not_finite": ["loss"]})
            for step, loss in enumerate(losses or curve(), 1)
        ]
        for step, loss in (validation or {}).items():
            lines.append({"step": step, "validation_loss": loss, "validation_tokens": 100})
        lines.sort(key=lambda line: line["step"])  # stable: a step's training line comes first
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        task = {"metric": "exact_match", "value": score, "stderr": 0.01, "num_items": 256, "groups": {}}
        task["items_sha256"] = "of the 256"
        (folder / "evaluation").mkdir()
        (folder / "evaluation" / "after.json").write_text(json.dumps({"when": "after", "tasks": {"words": task}}))
        return folder

    return make


def started(number: int) -> str:
    """The start time of the run with this number; all differ."""
    return f"2026-11-21T10:{number // 60:02d}:{number % 60:02d}+00:00"


def _change_manifest(folder: Path, changes: dict[str, dict[str, Any]], gpus: int, overrides: tuple[str, ...]) -> None:
    command = ["tunebook", "train", "quickstart", *overrides, "outputs=/somewhere"]
    manifest = read_manifest(folder) | {"command": command}
    lock = manifest["environment"]["lock"] | {"differences": {}}  # whatever is installed here
    manifest["environment"] |= {"lock": lock, "lock_sha256": lock["sha256"]}
    manifest["code"] = {"git_commit": "a" * 40, "git_diff_sha256": None, "is_clean": True, "reason": None}
    config = load_config(folder / RUN_FILE)
    manifest |= {"config_sha256": config_hash(config), "seed": config.training.seed}
    manifest["hardware"] |= {"gpus": [H200] * gpus, "driver": "580.1" if gpus else None, "cpus": 2, "memory_gib": 8.0}
    for section, values in changes.items():
        manifest[section] = manifest.get(section, {}) | values
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The card of the quickstart in a folder of recipes whose evidence is used instead of the book's."""
    monkeypatch.setattr(schema, "recipe_file", lambda recipe, dirs: tmp_path / "recipes" / f"{recipe}.yaml")
    file = tmp_path / "recipes" / "quickstart" / "README.md"
    file.parent.mkdir(parents=True)
    file.write_text(CARD)
    return file


@pytest.fixture
def record(card: Path) -> Record:
    """Record evidence of runs; returns its file."""

    def recorded(*runs: Path, label: str = "try", target: str | None = None) -> Path:
        words, console = [str(run) for run in runs], Console(file=StringIO())
        assert verify_command(words, Path(), [], console, record=True, label=label, target=target) == 0
        return next((card.parent / "evidence").glob(f"*-{label}.json"))

    return recorded


def machine_of(hardware: Hardware) -> Machine:
    """The machine that evidence was recorded on, or one of its nodes."""
    generation = Generation[hardware.generation]
    gpus = [
        Gpu(
            name=str(hardware.gpu), memory_gib=hardware.memory_gib or 0.0, generation=generation, index=index,
            compute_capability=GENERATIONS[generation].compute_capabilities[0],
        )
        for index in range(0 if hardware.gpu is None else hardware.gpus // hardware.nodes)
    ]  # fmt: skip
    return Machine(gpus=gpus, driver=hardware.driver, num_cpus=hardware.cpus, host_memory_gib=512.0)


def verified(run: Path) -> Comparison:
    """A run compared with the evidence of its recipe."""
    found = read_finished(run)
    return compare(find_claim(found, [], None), found)


def rows_of(run: Path) -> dict[str, Row]:
    return {row.name: row for row in verified(run).rows}


def edit_json(file: Path, **changes: Any) -> Path:
    """Replace top-level keys of a manifest, or of evidence, whose hash is computed again."""
    content = json.loads(file.read_text()) | changes
    if "content_sha256" in content:
        content["content_sha256"] = content_hash(content)
    file.write_text(json.dumps(content))
    return file
