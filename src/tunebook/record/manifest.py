"""`manifest.json`: what a run was made from and how it ended. Written before step 0 and updated later.

If the state is `running` long after the last line of the metrics, the run was killed. Facts that are learnt during a
run are added at the top level: `parallelism_found`, `leak_probe`, `compiled`, `start_up`, `slurm`, `model_files`,
`wandb_run_id` and, when the run ends, `files_sha256`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from tunebook.config.book import book_root, resolve_path
from tunebook.config.identity import config_hash
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.config.unsafe_text import without_secrets
from tunebook.errors import DataError
from tunebook.files import atomic_write_json, read_json, sha256_file, sha256_text
from tunebook.model.weight_files import weights_fingerprint
from tunebook.record.metrics import METRICS_FILE
from tunebook.record.provenance import (
    describe_code,
    describe_command,
    describe_environment,
    describe_hardware,
    shorten_paths,
)
from tunebook.record.run_folder import FINISHED, trained_outcome

MANIFEST_FILE = "manifest.json"
WANDB_RUN_ID = "wandb_run_id"  # the same for all attempts
MODEL_FILES = "model_files"  # size and SHA-256 of each file in model/, by path
FORMAT = 1  # increased when a key changes its meaning or is removed
# Results whose hashes are recorded when the run ends. Later evaluations (`tunebook eval`) write other files.
RESULT_FILES = (METRICS_FILE, "evaluation/after.json")


class RunState(Enum):
    """The state of a run."""

    running = "running"
    finished = "finished"
    stopped = "stopped"
    failed = "failed"
    invalid = "invalid"


def state_of_exit_code(exit_code: int) -> RunState:
    """The state of a run whose process ended with this code."""
    return {0: RunState.finished, 6: RunState.stopped, 7: RunState.invalid}.get(exit_code, RunState.failed)


def start_manifest(
    folder: Path,
    config: RunConfig,
    *,
    world_size: int,
    command: list[str],
    model: dict[str, Any] | None = None,
    tokenizer_sha256: str | None = None,
    chat_template_sha256: str | None = None,
    template_date: str | None = None,
    dataset: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the manifest of a run that is about to start, and return it.

    `command` trains the same again. `model` adds facts to those of the configuration, such as the revision that the hub
    resolved. `dataset` is `{records, fingerprint, content_sha256, counts}` of the prepared data. A run that resumes in
    its folder keeps the status of its earlier attempts under `earlier_attempts`, its id at wandb and, if training had
    ended, the files of model/.
    """
    earlier = manifest_or_empty(folder)
    manifest = {
        "format": FORMAT,
        "recipe": config.recipe,
        "title": config.title,
        "status": {
            "state": RunState.running.name,
            "exit_code": None,
            "reason": None,  # one sentence; for every state but running, and finished at the last step
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "ended": None,
            "seconds": None,
        },
        "earlier_attempts": [*earlier["earlier_attempts"], earlier["status"]] if earlier else [],
        "code": describe_code(book_root()),
        "environment": describe_environment(config.hardware.generation.name),
        "config_sha256": config_hash(config),
        "model": describe_model(config.model, weights_fingerprint(config.model)) | (model or {}),
        "tokenizer_sha256": tokenizer_sha256,
        "chat_template_sha256": chat_template_sha256,
        "template_date": template_date,  # that the chat template writes as today's date
        "system_prompt_sha256": system_prompt_hash(config.dataset.system_prompt),
        "dataset": dataset,
        "hardware": describe_hardware(None),
        "world_size": world_size,
        "seed": config.training.seed,
        "command": describe_command(command),
    }
    manifest |= {key: value for key in (WANDB_RUN_ID, MODEL_FILES) if (value := earlier.get(key)) is not None}
    atomic_write_json(folder / MANIFEST_FILE, manifest)
    return manifest


def update_manifest(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Add facts that became known later. Existing sections are extended, not replaced."""
    manifest = read_manifest(folder)
    for key, value in facts.items():
        is_section = key != MODEL_FILES and isinstance(value, dict) and isinstance(manifest.get(key), dict)
        manifest[key] = manifest[key] | value if is_section else value
    atomic_write_json(folder / MANIFEST_FILE, manifest)
    return manifest


def add_to_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """As `update_manifest`; nothing in a folder without a manifest, such as that of a measurement."""
    if (folder / MANIFEST_FILE).is_file():
        update_manifest(folder, facts)


def manifest_or_empty(folder: Path) -> dict[str, Any]:
    """The manifest of a run; empty without one. Raises: as `read_manifest`."""
    return read_manifest(folder) if (folder / MANIFEST_FILE).is_file() else {}


def finish_manifest(
    folder: Path,
    state: RunState,
    exit_code: int,
    reason: str | None = None,
    *,
    step: int | None = None,
    last_checkpoint: str | None = None,
) -> dict[str, Any]:
    """Record how the run ended. `reason` is one sentence, required for every state but finished.

    The ranks' outcomes say whether training stopped early and which step the model is from.
    """
    ended, trained = datetime.now(UTC), trained_outcome(folder)
    if reason is None and trained is not None and trained.reason != FINISHED:
        reason = trained.reason
    started = datetime.fromisoformat(read_manifest(folder)["status"]["started"])
    status = {
        "state": state.name,
        "exit_code": exit_code,
        "reason": without_secrets(reason) if reason is not None else None,
        "ended": ended.isoformat(timespec="seconds"),
        "seconds": round((ended - started).total_seconds(), 1),
        "step": step,
        "best_step": trained.best_step if trained is not None else None,
        "last_checkpoint": last_checkpoint,
    }
    files = [name for name in RESULT_FILES if (folder / name).is_file()]
    return update_manifest(
        folder, {"status": status, "files_sha256": {name: sha256_file(folder / name) for name in files}}
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run. Raises: DataError if there is none, or one of another format."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise DataError(
            f"{path} does not exist: the run never started, or this is not a run folder; "
            "name one that `tunebook train` made",
            problem_id="broken-record",
        )
    manifest: dict[str, Any] = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(
            f"{path} is no manifest of format {FORMAT}, which this Tunebook reads; name another run, or read it with "
            "the version that wrote it",
            problem_id="broken-record",
        )
    return manifest


def system_prompt_hash(prompt: str | None) -> str:
    """The SHA-256 of a system prompt, or of the empty text without one."""
    return sha256_text(prompt or "")


def describe_model(model: ModelConfig, fingerprint: str | None = None) -> dict[str, Any]:
    """Name (or configured path), revision, weights, and for a folder the hash of its config.json.

    `fingerprint` is that of the weights in the folder, if the caller has computed it.
    """
    config_file = resolve_path(model.path) / "config.json" if model.path else None
    return {
        "name": model.name or shorten_paths(model.path or ""),
        **({"run": shorten_paths(model.run)} if model.run is not None else {}),
        "revision": model.revision,
        "config_sha256": sha256_file(config_file) if config_file and config_file.is_file() else None,
        "weights": model.weights.name,
        "weights_fingerprint": fingerprint,
    }
