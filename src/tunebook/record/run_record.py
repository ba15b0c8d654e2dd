"""Read a run folder: its configuration, plan, manifest, metrics and evaluations, each checked.

JSON may be valid and still not be a record. The most used parts are checked when a file is read, so that the message
names the file and the key. `broken_records_named` catches the rest where it is used, and can only name the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tunebook.errors import DataError, RequestError, first_line
from tunebook.files import read_json
from tunebook.record.contamination import read_contamination
from tunebook.record.manifest import MANIFEST_FILE, changed_files, read_manifest
from tunebook.record.manifest_schema import check_read_manifest
from tunebook.record.metrics import METRICS_FILE, NOT_FINITE, by_schedule, is_number, is_training_line, read_metrics
from tunebook.record.run_folder import PLAN_FILE, RUN_FILE, is_run

_CONFIG_SECTIONS = ("hardware", "model", "dataset", "parallelism", "peft", "training")  # that reports show
_PLAN_SECTIONS = ("hardware", "batch", "memory_gib", "time")
_PLAN_LISTS = ("choices", "problems")
_COUNTED = ("total_steps", "world_size", "accumulation", "micro", "row_length", "documents_per_step", "tokens_per_step")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of one run folder. None, or an empty list, for a missing file."""

    folder: Path
    config: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    manifest: dict[str, Any] | None = None
    training: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl
    validation: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, Any] | None = None  # evaluation
    after: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # later ones, by `tunebook eval`, oldest first
    contamination: dict[str, Any] | None = None  # items that are in the training documents
    last_logged: datetime | None = None

    @property
    def name(self) -> str:
        """`<recipe>/<time>`, which is unique among runs."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def status(self) -> dict[str, Any]:
        """The manifest's `status`; empty without a manifest."""
        status: dict[str, Any] = self.manifest["status"] if self.manifest else {}
        return status

    @property
    def model_step(self) -> int | None:
        """Optimizer steps behind the weights in `model/`: fewer than were trained if the best were loaded."""
        best: int | None = self.status.get("best_step")
        return best if best is not None else self.status.get("step")

    @property
    def changed_files(self) -> list[str]:
        """Names of result files that were changed after the run."""
        return changed_files(self.folder, self.manifest) if self.manifest is not None else []

    @property
    def first_invalid_step(self) -> int | None:
        """The first step whose loss was not finite."""
        return next((line["step"] for line in self.training if "loss" in line.get(NOT_FINITE, ())), None)

    @property
    def log_every_steps(self) -> int | None:
        """The configured logging interval in steps; None without a configuration."""
        every: int | None = ((self.config or {}).get("training") or {}).get("log_every_steps")
        return every

    def scheduled_losses(self) -> list[tuple[int, float | None]]:
        """(step, loss) at the steps that every run of this configuration logs, whether it was interrupted or not."""
        return by_schedule((line for line in self.training if "loss" in line), self.log_every_steps or 1)

    def points(self, key: str, over: str = "step") -> list[tuple[float, float | None]]:
        """(step, value) of one number of the training lines; None if it was not finite."""
        return [(line[over], line[key]) for line in self.training if key in line and line.get(over) is not None]

    def values(self, key: str) -> list[float]:
        """Every finite value of one number of the training lines."""
        return [value for _, value in self.points(key) if value is not None]


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. Missing files are None.

    Raises: DataError for a broken file, RequestError if the folder is not a run folder.
    """
    if not is_run(folder):
        raise RequestError(
            f"{folder} is not a run folder: it has neither {RUN_FILE} nor {MANIFEST_FILE}; "
            "name one that `tunebook train` made, such as outputs/quickstart/latest",
            problem_id="unknown-run",
        )
    folder = folder.resolve()
    lines = read_metrics(folder)
    evaluations = folder / "evaluation"
    return RunRecord(
        folder=folder,
        config=_read_config(folder / RUN_FILE),
        plan=_read_optional(folder / PLAN_FILE, check_plan),
        manifest=_read_manifest(folder) if (folder / MANIFEST_FILE).is_file() else None,
        training=[line for line in lines if is_training_line(line)],
        validation=[line for line in lines if not is_training_line(line)],
        before=_read_optional(evaluations / "before.json", check_evaluation),
        after=_read_optional(evaluations / "after.json", check_evaluation),
        evaluations=[_read(file, check_evaluation) for file in sorted(evaluations.glob("eval-*.json"))],
        contamination=read_contamination(folder),
        last_logged=datetime.fromtimestamp((folder / METRICS_FILE).stat().st_mtime, UTC) if lines else None,
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
        raise _broken(folder / MANIFEST_FILE, "it has no status.state")
    check_read_manifest(manifest, folder / MANIFEST_FILE, may_lack=True)  # older versions recorded less
    return manifest


def _read_config(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise _broken(path, f"it cannot be read: {first_line(error)}") from error
    if not isinstance(config, dict) or not config:
        raise _broken(path, "it is empty" if not config else "it is not a mapping of keys to values")
    for section in _CONFIG_SECTIONS:
        if not isinstance(config.get(section) or {}, dict):
            raise _broken(path, f"{section} is {config[section]!r}, not a section")
    return config


def check_plan(plan: Any, file: Path) -> None:
    """Raises: DataError for an invalid `plan.json`."""
    if not isinstance(plan, dict):
        raise _broken(file, "it is not an object")
    for key in _PLAN_SECTIONS:
        if not isinstance(plan.get(key) or {}, dict):
            raise _broken(file, f"{key} is {plan[key]!r}, not a section")
    for key in _PLAN_LISTS:
        if not _is_list_of_sections(plan.get(key) or []):
            raise _broken(file, f"{key} is not a list of sections")
    for section, keys in (("batch", _COUNTED), ("memory_gib", tuple(plan.get("memory_gib") or ()))):
        for key in keys:
            if not is_number(value := (plan.get(section) or {}).get(key)):
                raise _broken(file, f"{section}.{key} is {value!r}, not a number")


def check_evaluation(evaluation: Any, file: Path) -> None:
    """Raises: DataError for an invalid record of an evaluation."""
    if not isinstance(evaluation, dict):
        raise _broken(file, "it is not an object")
    tasks = evaluation.get("tasks")
    if not isinstance(tasks, dict):
        raise _broken(file, f"tasks is {tasks!r}, not a section")
    if not _is_list_of_sections(evaluation.get("samples") or []):
        raise _broken(file, "samples is not a list of sections")
    for name, task in tasks.items():
        if not isinstance(task, dict):
            raise _broken(file, f"tasks.{name} is {task!r}, not a section")
        for key in ("value", "stderr", "num_items"):
            # A score may be infinite or NaN, as a perplexity is. Evidence refuses those.
            if not isinstance(task.get(key), int | float | None):
                raise _broken(file, f"tasks.{name}.{key} is {task[key]!r}, not a number")


@contextmanager
def broken_records_named(*folders: Path) -> Iterator[None]:
    """Turn an error in the use of these folders' records into a DataError that names the folders.

    A bug in Tunebook would look the same, so the error keeps its cause.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        named = " or ".join(str(folder) for folder in folders)
        raise DataError(
            f"{named}: its run.yaml, plan.json, manifest.json, metrics.jsonl or evaluation/ holds what Tunebook does "
            f"not write there ({type(error).__name__}: {error}), so something else changed it; restore the files from "
            "a copy, or name another run. If nobody changed them, this is a bug in Tunebook",
            problem_id="broken-record",
        ) from error


def _is_list_of_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _broken(file: Path, why: str) -> DataError:
    return DataError(
        f"{file}: {why}. Tunebook does not write this, so something else changed the file; restore it from a copy, or "
        "remove it to continue without it",
        problem_id="broken-record",
    )
