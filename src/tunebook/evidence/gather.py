"""The sections of an evidence file, from the folder of a finished run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tunebook.config.book import book_root
from tunebook.config.choices import Generation, Source, Weights
from tunebook.config.compose import compose
from tunebook.config.frozen import load_config
from tunebook.config.identity import comparable_config, config_hash
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import RequestError
from tunebook.evidence.schema import Hardware, Inputs, Lock, Results, RunDescription, Score, Software
from tunebook.facts.methods import recorded_method
from tunebook.record.contamination import KINDS, contamination_of
from tunebook.record.locks import matters
from tunebook.record.manifest import RunState, read_manifest
from tunebook.record.page.overview import summarize, validation_of_model
from tunebook.record.run_folder import RUN_FILE, run_name
from tunebook.record.run_record import RunRecord, read_run

# Options of `tunebook train` whose value is the next word, which may contain a `=`.
_WITH_VALUE = ("--run-folder", "--recipes-dir")
# Overrides that do not change what is trained: the location of results, and whether an earlier run resumes.
_RESULT_LOCATION_PREFIXES = (
    "outputs=",
    "training.resume=",
    "tracking",
    "dataset.num_workers=",
)
_CLUSTER_PREFIX = "launcher."  # a partition or an account is private; the launcher's name is not


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run as evidence compares it. Each part is built from the run's records when it is first asked for."""

    record: RunRecord
    config: RunConfig
    manifest: dict[str, Any]

    @property
    def num_resumed(self) -> int:
        """The number of times that the run resumed."""
        return len(self.manifest.get("earlier_attempts") or [])

    @property
    def missing_steps(self) -> list[int]:
        """Steps whose loss should have been logged, and is missing or not finite.

        A run that was killed and resumed loses at most one. One that resumed from another run's checkpoint has none of
        the steps before it, which its command trains as well.
        """
        every, steps = self.record.log_every_steps or 1, self.results.steps
        return sorted(set(range(every, self.record.training[-1]["step"] + 1, every)) - set(steps))

    def description(self, recipes_dirs: list[Path]) -> RunDescription:
        """Return the first section of the file: what was run."""
        config, overrides = self.config, training_overrides(self.manifest)
        overrides = [override for override in overrides if not override.startswith(_CLUSTER_PREFIX)]
        return RunDescription(
            recipe=run_name(config),
            title=config.title,
            weights="random" if config.model.weights is Weights.random else "pretrained",
            data="generated" if config.dataset.source is Source.synthetic else "real",
            layers=_layers(config, overrides, recipes_dirs),
            steps=int(self.record.training[-1]["step"]),
            overrides=overrides,
        )

    @cached_property
    def hardware(self) -> Hardware:
        """The machine, as it was detected at the start of the run."""
        machine: dict[str, Any] = self.manifest["hardware"]
        is_on_cpu = self.config.hardware.generation is Generation.cpu
        gpus = [] if is_on_cpu else machine["gpus"]  # a run on a CPU leaves the machine's GPUs idle
        names = sorted({gpu["name"] for gpu in gpus})
        return Hardware(
            generation=self.config.hardware.generation.name,
            gpu=", ".join(names) or None,
            gpus=world_size(self.config),
            nodes=self.config.hardware.num_nodes,
            memory_gib=gpus[0]["memory_gib"] if gpus else machine["memory_gib"],
            driver=machine["driver"],
            nccl=machine["nccl"],
            cpus=machine["cpus"],
        )

    @cached_property
    def inputs(self) -> Inputs:
        """Everything except the code that determines the result."""
        manifest, data = self.manifest, self.manifest["dataset"] or {}
        return Inputs(
            config=comparable_config(self.config),
            seed=manifest["seed"],
            model_sha256=manifest["model"]["config_sha256"],
            model_revision=manifest["model"]["revision"],
            weights_fingerprint=manifest["model"]["weights_fingerprint"],
            tokenizer_sha256=manifest["tokenizer_sha256"],
            chat_template_sha256=manifest["chat_template_sha256"],
            data_sha256=data.get("content_sha256"),
            data_fingerprint=data.get("fingerprint"),
        )

    @cached_property
    def software(self) -> Software:
        """The code and packages. Runs without a commit are refused as evidence."""
        environment = self.manifest["environment"]
        lock = _lock_of(environment)
        return Software(
            git_commit=str(self.manifest["code"]["git_commit"]),
            lock_sha256=None if lock is None else environment["lock_sha256"],
            lock=lock,
            image_digest=environment["image_digest"],
            python=environment["python"],
            packages=environment["packages"],
        )

    @cached_property
    def results(self) -> Results:
        """The measured numbers. Raises: RequestError if there is no finite loss."""
        record, summary, plan = self.record, summarize(self.record), self.record.plan
        losses = [(step, loss) for step, loss in record.scheduled_losses() if loss is not None]
        if not losses:
            raise RequestError(
                f"{record.folder} has logged no finite loss at a multiple of training.log_every_steps="
                f"{record.log_every_steps}, so there is nothing to compare; name another run",
                problem_id="run-not-finished",
            )
        # A measurement says nothing about the error of estimates. The peak that is measured is that of tensors.
        is_estimate = self.hardware.gpu is not None and plan.get("memory_source") != "measured"
        tasks: dict[str, Any] = record.after.get("tasks", {})
        return Results(
            steps=[step for step, _ in losses],
            losses=[loss for _, loss in losses],
            tokens_per_second_per_gpu=_rounded(summary.tokens_per_second_per_gpu),
            memory_gib=_rounded(max(summary.peak_memory_gib, default=None)),
            planned_memory_gib=(plan.get("memory_gib") or {}).get("allocated") if is_estimate else None,
            validation_loss=summary.best_validation_loss,
            scores={name: _score(record, name, task) for name, task in tasks.items()} | self._held_out_score(),
        )

    def _held_out_score(self) -> dict[str, Score]:
        """The method's score on the validation part, of the last weights or of the best if those were loaded."""
        name, validation = recorded_method(self.record.config).score, self.record.validation
        if name is None or not validation:
            return {}
        line = validation_of_model(self.record) or validation[-1]
        value, num_items = line[f"validation_{name}"], self.manifest["dataset"]["counts"]["validation"]["num_documents"]
        stderr = math.sqrt(value * (1 - value) / num_items)
        return {f"validation_{name}": Score(metric="share", value=value, stderr=stderr, num_items=num_items)}


def read_facts(folder: Path) -> RunFacts:
    """Read a run, finished or not. Raises: RequestError if it has no configuration, DataError for a damaged file."""
    record = read_run(folder)
    return RunFacts(record=record, config=load_config(record.folder / RUN_FILE), manifest=read_manifest(record.folder))


def read_finished(folder: Path) -> RunFacts:
    """Read a finished run. Raises: RequestError if it did not finish or was changed, DataError for a damaged file."""
    run = read_facts(folder)
    status = run.record.status
    if status["state"] != RunState.finished.name:
        reason = f": {status['reason'].splitlines()[0]}" if status.get("reason") else ""
        raise RequestError(
            f"{folder} has not finished ({status['state']}{reason}); name a run that has, or resume it with the "
            "command that started it, without training.resume=never",
            problem_id="run-not-finished",
        )
    changed = run.record.changed_files
    if config_hash(run.config) != run.manifest["config_sha256"]:
        changed.append(RUN_FILE)
    if changed:
        raise RequestError(
            f"{folder}: {' and '.join(changed)} was changed after the run, by the hash in its manifest, so what was "
            "measured is unknown; restore it from a copy, or train again",
            problem_id="run-changed",
        )
    return run


def training_overrides(manifest: dict[str, Any]) -> list[str]:
    """The overrides that repeat the training, without those for the location of the results."""
    pairs = pairwise(manifest["command"][1:])  # each word with the one before it
    overrides = [word for before, word in pairs if before not in _WITH_VALUE and not word.startswith("-")]
    return [word for word in overrides if "=" in word and not word.startswith(_RESULT_LOCATION_PREFIXES)]


def _layers(config: RunConfig, overrides: list[str], recipes_dirs: list[Path]) -> str:
    """Return `all 36`, or `12 of 36` if the overrides or the recipe remove layers of the model's group file."""
    facts = config.model.facts
    if facts is None:
        return "all"
    group = compose(config.recipe, overrides, recipes_dirs).groups["model"]
    file = book_root() / "hydra_configs" / "model" / f"{group}.yaml"
    content: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}  # a model of the user's own
    total: int | None = (content.get("facts") or {}).get("num_layers")
    if total is None and not any(word.startswith("model.facts.num_layers=") for word in overrides):
        total = facts.num_layers
    return f"all {total}" if total == facts.num_layers else f"{facts.num_layers} of {total or 'unknown'}"


def _lock_of(environment: dict[str, Any]) -> Lock | None:
    """The lock that a run was compared with; None if it was not."""
    recorded = environment["lock"]
    differences = recorded["differences"]
    if differences is None:
        return None
    important = {name: difference for name, difference in differences.items() if matters(name)}
    return Lock(
        name=recorded["name"], sha256=recorded["sha256"], differences=important,
        num_other_differences=len(differences) - len(important),
    )  # fmt: skip


def _score(record: RunRecord, name: str, task: Mapping[str, Any]) -> Score:
    counts, contamination = contamination_of(record.after).get(name), None
    if counts is not None:
        clean = counts["scores"].get("clean") or {}
        kinds = {key: counts[key] for key in ("num_items", *(f"num_{kind}" for kind in (*KINDS, "clean")))}
        contamination = kinds | {"value": clean.get("value"), "stderr": clean.get("stderr")}
    keys = ("metric", "value", "stderr", "num_items", "items_sha256")
    return Score(**{key: task[key] for key in keys}, contamination=contamination)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
