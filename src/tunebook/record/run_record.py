"""Read a run folder back: everything that is there, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tunebook.errors import DataError, RequestError
from tunebook.files import read_json
from tunebook.record.intact import check_evaluation, check_plan
from tunebook.record.manifest import MANIFEST_FILE, changed_files, read_manifest
from tunebook.record.manifest_schema import check_read_manifest
from tunebook.record.metrics import METRICS_FILE, NOT_FINITE, by_schedule, is_training_line, read_metrics
from tunebook.record.run_folder import is_run

_SECTIONS = ("hardware", "model", "dataset", "parallelism", "peft", "training")  # of run.yaml that are drawn


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What one run folder holds. None, or an empty list, where a file is missing."""

    folder: Path
    config: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    manifest: dict[str, Any] | None = None
    training: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl
    validation: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, Any] | None = None  # evaluation
    after: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # later ones, by `tunebook eval`, oldest first
    last_logged: datetime | None = None

    @property
    def name(self) -> str:
        """`<recipe>/<time>`, which tells runs apart."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def status(self) -> dict[str, Any]:
        """How the run stands, from its manifest; empty without one."""
        status: dict[str, Any] = self.manifest["status"] if self.manifest else {}
        return status

    @property
    def model_step(self) -> int | None:
        """Optimizer steps that the weights in `model/` have seen: fewer than were done where the best were loaded.

        None where nobody noted it: earlier versions did not say which were the best.
        """
        loads_best = ((self.config or {}).get("training") or {}).get("load_best_at_end")
        if loads_best and "best_step" not in self.status:
            return None
        best: int | None = self.status.get("best_step")
        return best if best is not None else self.status.get("step")

    @property
    def changed_files(self) -> list[str]:
        """What was measured and is not as it was when the run ended, by name."""
        return changed_files(self.folder, self.manifest) if self.manifest is not None else []

    @property
    def first_invalid_step(self) -> int | None:
        """The first step whose loss was not finite."""
        return next((line["step"] for line in self.training if "loss" in line.get(NOT_FINITE, ())), None)

    @property
    def log_every_steps(self) -> int | None:
        """How many steps the run was asked to log at a time; None where its configuration is not there."""
        every: int | None = ((self.config or {}).get("training") or {}).get("log_every_steps")
        return every

    def scheduled_losses(self) -> list[tuple[int, float | None]]:
        """(step, loss) at the steps at which every run of this configuration logs, wherever this one was stopped."""
        return by_schedule((line for line in self.training if "loss" in line), self.log_every_steps or 1)

    def points(self, key: str, over: str = "step") -> list[tuple[float, float | None]]:
        """(step, value) of one number of the training lines; None where it was not finite, skipped where not logged."""
        return [(line[over], line[key]) for line in self.training if key in line and line.get(over) is not None]

    def values(self, key: str) -> list[float]:
        """Every finite value of one number of the training lines."""
        return [value for _, value in self.points(key) if value is not None]


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; files that are missing are left out, broken ones raise DataError.

    Raises: RequestError when the folder is none of a run.
    """
    if not is_run(folder):
        raise RequestError(
            f"{folder} is no run folder: it has neither run.yaml nor manifest.json; "
            "name one that `tunebook train` made, such as outputs/quickstart/latest",
            problem_id="unknown-run",
        )
    folder = folder.resolve()
    lines = read_metrics(folder)
    metrics_file = folder / METRICS_FILE
    return RunRecord(
        folder=folder,
        config=_read_config(folder / "run.yaml"),
        plan=_read_optional(folder / "plan.json", check_plan),
        manifest=_read_manifest(folder) if (folder / MANIFEST_FILE).is_file() else None,
        training=[line for line in lines if is_training_line(line)],
        validation=[line for line in lines if not is_training_line(line)],
        before=_read_optional(folder / "evaluation" / "before.json", check_evaluation),
        after=_read_optional(folder / "evaluation" / "after.json", check_evaluation),
        evaluations=[_read(file, check_evaluation) for file in sorted((folder / "evaluation").glob("eval-*.json"))],
        last_logged=datetime.fromtimestamp(metrics_file.stat().st_mtime, UTC) if lines else None,
    )


def _read_optional(path: Path, check: Callable[[Any, Path], None]) -> dict[str, Any] | None:
    return _read(path, check) if path.is_file() else None


def _read(path: Path, check: Callable[[Any, Path], None]) -> dict[str, Any]:
    content: dict[str, Any] = read_json(path)
    check(content, path)
    return content


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    status = manifest.get("status")
    if not isinstance(status, dict) or not isinstance(status.get("state"), str):
        raise DataError(
            f"{folder / MANIFEST_FILE} is no whole manifest: it has no status.state; restore it from a copy, or remove "
            "it to go on without it",
            problem_id="broken-record",
        )
    check_read_manifest(manifest, folder / MANIFEST_FILE, may_lack=True)  # an older version noted less
    return manifest


def _read_config(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise _broken_config(path, str(error).splitlines()[0]) from error
    if not isinstance(config, dict) or not config:
        raise _broken_config(path, "it is empty" if not config else "it is no mapping of keys to values")
    for section in _SECTIONS:
        if not isinstance(config.get(section) or {}, dict):
            raise _broken_config(path, f"{section} is {config[section]!r} and no section")
    return config


def _broken_config(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} cannot be read as a run's configuration: {why}; Tunebook writes it in one step, so something else "
        "changed it: restore it from a copy, or remove it to go on without it",
        problem_id="broken-record",
    )
