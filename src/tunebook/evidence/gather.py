"""From a finished run's folder to the sections of an evidence file."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tunebook.config.book import book_root
from tunebook.config.choices import Source, Weights
from tunebook.config.compose import compose
from tunebook.config.frozen import load_config
from tunebook.config.identity import comparable_config
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import RequestError
from tunebook.evidence.schema import Hardware, Inputs, Ran, Results, Score
from tunebook.evidence.unchanged import require_unchanged
from tunebook.model.weights_fingerprint import recorded_in
from tunebook.record.files import RUN_FILE
from tunebook.record.manifest import MANIFEST_FILE, RunState
from tunebook.record.manifest_schema import check_read_manifest
from tunebook.record.page.summary import summarise
from tunebook.record.run_folder import WITHOUT_RECIPE
from tunebook.record.run_record import RunRecord, read_run

# Options of `tunebook train` that take the next word, which may hold a `=` itself.
_WITH_VALUE = ("--run-folder", "--recipes-dir")
# Typed with a run, but no part of what it trains: where results go, and whether an earlier run is taken up.
_RESULTS_WORDS = ("outputs=", "training.resume=", "tracking", "training.push_to_hub=", "dataset.num_workers=")
_CLUSTER_WORDS = "launcher."  # a partition or an account: somebody's own, where which launcher it was is everybody's


def read_finished(folder: Path) -> RunRecord:
    """A run that came to its end, with all that a comparison needs.

    Raises: RequestError saying what it lacks or that it was changed since, DataError for a damaged file.
    """
    record = read_run(folder)
    state = record.status.get("state")
    if state != RunState.finished.name:
        said = f": {record.status['reason']}" if record.status.get("reason") else ""
        anew = (record.config or {}).get("training", {}).get("resume") == "never"
        raise RequestError(
            f"{folder} has not finished ({state or 'it has no manifest'}{said}); name a run that has, or let it go on "
            f"with the command that it was started with{', without training.resume=never' if anew else ''}",
            problem_id="run-not-finished",
        )
    if record.config is None or not record.training:
        lacks = "run.yaml" if record.config is None else "any logged step"
        raise RequestError(f"{folder} lacks {lacks}; name a whole run folder", problem_id="run-not-finished")
    assert record.manifest is not None
    check_read_manifest(record.manifest, record.folder / MANIFEST_FILE)
    require_unchanged(record.folder, record.config, config_of(record.folder), record.manifest)
    return record


def gather_ran(record: RunRecord, config: RunConfig, recipes_dirs: list[Path]) -> Ran:
    """What was run, in the words that come first in the file."""
    assert record.manifest is not None
    overrides = typed_overrides(record.manifest)
    return Ran(
        recipe=config.recipe or WITHOUT_RECIPE,
        title=config.title,
        weights="random" if config.model.weights is Weights.random else "pretrained",
        data="generated" if config.dataset.source is Source.synthetic else "real",
        layers=_layers(config, overrides, recipes_dirs),
        steps=int(record.training[-1]["step"]),
        overrides=overrides,
    )


def typed_overrides(manifest: dict[str, Any]) -> list[str]:
    """What was typed after the recipe and belongs to the claim: also by which launcher, as the recipe may have another.

    Raises: as `typed_words`.
    """
    return [word for word in typed_words(manifest) if not word.startswith(_CLUSTER_WORDS)]


def typed_words(manifest: dict[str, Any]) -> list[str]:
    """What was typed after the recipe, but for where results go: what starts the same training again.

    Raises: RequestError for a run that `tunebook reproduce` made before it noted the words that it trained with.
    """
    command: list[str] = manifest["command"]
    if command[1:2] != ["train"]:
        raise RequestError(
            f"the manifest of this run says `{shlex.join(command)}`, and not what was trained: an earlier Tunebook "
            "wrote it. Name the run that it repeated, or train again",
            problem_id="run-without-words",
        )
    pairs = pairwise(command[1:])  # each word with the one before it
    words = [word for before, word in pairs if before not in _WITH_VALUE and not word.startswith("-")]
    return [word for word in words if "=" in word and not word.startswith(_RESULTS_WORDS)]


def _layers(config: RunConfig, overrides: list[str], recipes_dirs: list[Path]) -> str:
    """`all 36`, or `12 of 36` where the words or the recipe leave out some of those that the model's group names."""
    facts = config.model.facts
    if facts is None:
        return "all"
    whole = _layers_of_group(compose(config.recipe, overrides, recipes_dirs).groups["model"])
    if whole == facts.num_layers:
        return f"all {whole}"
    if whole is None and not any(word.startswith("model.facts.num_layers=") for word in overrides):
        return f"all {facts.num_layers}"
    return f"{facts.num_layers} of {'unknown' if whole is None else whole}"


def _layers_of_group(model: str) -> int | None:
    """The layers that a file of the group `model` names; None for a model of the user's own."""
    content: Any = OmegaConf.to_container(OmegaConf.load(book_root() / "hydra_configs" / "model" / f"{model}.yaml"))
    layers: int | None = (content.get("facts") or {}).get("num_layers")
    return layers


def gather_hardware(record: RunRecord, config: RunConfig) -> Hardware:
    """The machine, from what detection found when the run began."""
    assert record.manifest is not None
    found: dict[str, Any] = record.manifest["hardware"]
    names = sorted({gpu["name"] for gpu in found["gpus"]})
    return Hardware(
        generation=config.hardware.generation.name,
        gpu=", ".join(names) or None,
        gpus=world_size(config),
        nodes=config.hardware.num_nodes,
        memory_gib=found["gpus"][0]["memory_gib"] if found["gpus"] else found["memory_gib"],
        driver=found["driver"],
        nccl=found["nccl"],
        cpus=found["cpus"],
    )


def gather_inputs(record: RunRecord, config: RunConfig) -> Inputs:
    """Everything that decides the result beside the code."""
    assert record.manifest is not None
    manifest, data = record.manifest, record.manifest["dataset"] or {}
    return Inputs(
        config=comparable_config(config),
        seed=manifest["seed"],
        model_sha256=manifest["model"]["config_sha256"],
        model_revision=manifest["model"]["revision"],
        weights_fingerprint=recorded_in(manifest["model"]),
        tokenizer_sha256=manifest["tokenizer_sha256"],
        chat_template_sha256=manifest["chat_template_sha256"],
        data_sha256=data.get("content_sha256"),
        data_fingerprint=data.get("fingerprint"),
    )


def gather_results(record: RunRecord) -> Results:
    """The numbers. Raises: RequestError for one that is not finite."""
    summary = summarise(record)
    lines = [line for line in record.training if "loss" in line]
    if not lines:
        raise RequestError(
            f"{record.folder} has logged no loss, so there is nothing to compare; name a whole run folder",
            problem_id="run-not-finished",
        )
    for line in lines:
        if line["loss"] is None:
            raise RequestError(
                f"{record.folder}: the loss is not finite at step {line['step']}; such a run proves nothing",
                problem_id="evidence-not-finite",
            )
    losses = record.scheduled_losses()
    if not losses:
        raise RequestError(
            f"{record.folder} has logged no loss at a step that is a multiple of training.log_every_steps="
            f"{record.log_every_steps}, so there is nothing to compare; train longer, or with "
            "training.log_every_steps=1",
            problem_id="run-not-finished",
        )
    tasks: dict[str, Any] = (record.after or {}).get("tasks", {})
    planned = ((record.plan or {}).get("memory_gib") or {}).get("allocated")  # as the peak of tensors is measured
    scores = {name: _score(record, name, task) for name, task in tasks.items()}
    return Results(
        steps=[step for step, _ in losses],
        losses=[loss for _, loss in losses if loss is not None],
        tokens_per_second_per_gpu=_rounded(summary.tokens_per_second_per_gpu),
        memory_gib=_rounded(max(summary.peak_memory_gib, default=None)),
        planned_memory_gib=planned if record.manifest and record.manifest["hardware"]["gpus"] else None,
        scores=scores,
    )


def _score(record: RunRecord, name: str, task: dict[str, Any]) -> Score:
    if not _finite([task["value"], task["stderr"]]):
        raise RequestError(
            f"{record.folder}: the score of {name} is not finite ({task['value']} ± {task['stderr']}); evaluate it "
            "again before it is recorded",
            problem_id="evidence-not-finite",
        )
    return Score(metric=task["metric"], value=task["value"], stderr=task["stderr"], num_items=task["num_items"])


def _finite(values: Iterable[float | None]) -> bool:
    return all(value is None or math.isfinite(value) for value in values)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def config_of(folder: Path) -> RunConfig:
    """The frozen configuration of a run."""
    return load_config(folder / RUN_FILE)
