"""Read a run folder: its configuration, plan, manifest, metrics and evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tunebook.errors import DataError, RequestError, first_line
from tunebook.files import read_json, sha256_file
from tunebook.record.contamination import read_contamination
from tunebook.record.manifest import MANIFEST_FILE, RunState, read_manifest
from tunebook.record.metrics import METRICS_FILE, NOT_FINITE, by_schedule, is_training_line, read_metrics
from tunebook.record.run_folder import PLAN_FILE, RUN_FILE


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of one run folder. Evaluations that were not made are empty."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    training: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl
    validation: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)  # evaluation
    after: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # later ones, by `tunebook eval`, oldest first
    contamination: dict[str, Any] = field(default_factory=dict)  # items that are in the training documents
    last_logged: datetime | None = None

    @property
    def name(self) -> str:
        """`<recipe>/<time>`, which is unique among runs."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def status(self) -> dict[str, Any]:
        """The manifest's `status`."""
        status: dict[str, Any] = self.manifest.get("status", {})
        return status

    @property
    def model_step(self) -> int | None:
        """Optimizer steps behind the weights in `model/`: fewer than were trained if the best were loaded."""
        best: int | None = self.status.get("best_step")
        return best if best is not None else self.status.get("step")

    @property
    def changed_files(self) -> list[str]:
        """Names of result files that were changed after the run."""
        if self.status.get("state") == RunState.running.name:  # resumed: the hashes are from the earlier attempt
            return []
        recorded = self.manifest.get("files_sha256") or {}
        files = {name: self.folder / name for name in recorded}
        return [name for name, file in files.items() if not file.is_file() or sha256_file(file) != recorded[name]]

    @property
    def first_invalid_step(self) -> int | None:
        """The first step whose loss was not finite."""
        return next((line["step"] for line in self.training if "loss" in line.get(NOT_FINITE, ())), None)

    @property
    def log_every_steps(self) -> int | None:
        """The configured logging interval in steps; None without a configuration."""
        every: int | None = self.config.get("training", {}).get("log_every_steps")
        return every

    def scheduled_losses(self) -> list[tuple[int, float | None]]:
        """(step, loss) at the steps that every run of this configuration logs, whether it was interrupted or not."""
        return by_schedule((line for line in self.training if "loss" in line), self.log_every_steps or 1)

    def points(self, key: str) -> list[tuple[float, float | None]]:
        """(step, value) of one number of the training lines; None if it was not finite."""
        return [(line["step"], line[key]) for line in self.training if key in line]

    def values(self, key: str) -> list[float]:
        """Every finite value of one number of the training lines."""
        return [value for _, value in self.points(key) if value is not None]


def read_run(folder: Path) -> RunRecord:
    """Read a run folder.

    Raises: DataError for a broken file, RequestError if the folder is not a run folder.
    """
    if missing := [name for name in (RUN_FILE, PLAN_FILE, MANIFEST_FILE) if not (folder / name).is_file()]:
        raise RequestError(
            f"{folder} is not a whole run folder: it has no {' and no '.join(missing)}; name one that `tunebook train` "
            "made, such as outputs/quickstart/latest",
            problem_id="unknown-run",
        )
    folder = folder.resolve()
    lines = read_metrics(folder)
    evaluations = folder / "evaluation"
    return RunRecord(
        folder=folder,
        config=_read_config(folder / RUN_FILE),
        plan=read_json(folder / PLAN_FILE),
        manifest=read_manifest(folder),
        training=[line for line in lines if is_training_line(line)],
        validation=[line for line in lines if not is_training_line(line)],
        before=_read_optional(evaluations / "before.json"),
        after=_read_optional(evaluations / "after.json"),
        evaluations=[read_json(file) for file in sorted(evaluations.glob("eval-*.json"))],
        contamination=read_contamination(folder) or {},
        last_logged=datetime.fromtimestamp((folder / METRICS_FILE).stat().st_mtime, UTC) if lines else None,
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.is_file() else {}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return dict(config)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise DataError(
            f"{path} cannot be read: {first_line(error)}. Something else than Tunebook changed it; restore it from a "
            "copy, or remove it to continue without it",
            problem_id="broken-record",
        ) from error
