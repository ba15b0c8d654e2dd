"""The main job, from words on a command line to a report: compose, check, plan, prepare, launch, evaluate, record."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tunebook.config.auto import Resolution, resolve_auto
from tunebook.config.choices import LauncherName
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml
from tunebook.config.rules import check, check_environment
from tunebook.config.schema import RunConfig
from tunebook.errors import Problem, RequestError, RulesError, StoppedError, TunebookError
from tunebook.evaluate.command import run_worker
from tunebook.evaluate.task_files import check_tasks
from tunebook.hardware.detect import detect_machine
from tunebook.launch.commands import launch_command
from tunebook.launch.files import PLAN_FILE, PREPARED_FILE, RUN_FILE
from tunebook.launch.local import run_and_wait
from tunebook.launch.resume import newest_checkpoint, unfinished_run
from tunebook.launch.show import show_batch, show_choices, show_command, show_end
from tunebook.model.load import check_model_folder
from tunebook.plan.batch import BatchPlan, solve_batch, world_size
from tunebook.record.atomic_files import atomic_write_json, atomic_write_text
from tunebook.record.manifest import finish_manifest, start_manifest, state_of_exit_code
from tunebook.record.run_folder import Outcome, clear_outcomes, create_run_folder, read_outcomes

if TYPE_CHECKING:
    from tunebook.data.prepared import Prepared


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that has passed every check, and what it will do as far as that is known."""

    resolution: Resolution
    problems: list[Problem]  # warnings; errors have been raised
    plan: BatchPlan

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self.resolution.config


def plan_job(recipe: str | None, overrides: list[str], recipes_dirs: list[Path]) -> Job:
    """Compose, resolve and check a run; nothing is downloaded, written or imported that needs a GPU.

    Raises: RequestError for what does not compose, RulesError with every broken rule at once.
    """
    composition = compose(recipe, overrides, recipes_dirs)
    resolution = resolve_auto(composition.config, detect_machine())
    broken = check(resolution.config)
    if errors := [problem for problem in broken if problem.is_error]:
        raise RulesError(errors)
    plan = solve_batch(resolution.config, None)
    return Job(resolution=resolution, problems=broken, plan=plan)


def show_job(job: Job, console: Console, folder: Path) -> None:
    """Print the resolved choices, the batch arithmetic and the launch command."""
    show_choices(job.resolution.choices, job.problems, console)
    show_batch(job.plan, console)
    show_command(launch_command(job.config, folder), console)


def run_job(job: Job, console: Console, *, folder: Path | None = None) -> int:
    """Prepare, launch, evaluate and report; returns the exit code that the run's outcome asks for."""
    show_choices(job.resolution.choices, job.problems, console)
    require_runnable(job)
    prepared = prepare_data(job.config, console)
    plan = solve_batch(job.config, prepared.train.load_lengths().astype("int64"))
    show_batch(plan, console)
    unfinished = unfinished_run(job.config) if folder is None else None
    folder = _set_up_folder(job, plan, prepared, folder or unfinished)
    going_on = f", going on after {newest_checkpoint(folder)}" if newest_checkpoint(folder) else ""
    console.print(f"run folder: {folder}{going_on}", highlight=False, soft_wrap=True)
    with _recorded_failure(folder):
        outcome = _train_and_evaluate(job.config, folder, console)
    finish_manifest(
        folder,
        state_of_exit_code(outcome.exit_code),
        outcome.exit_code,
        None if outcome.exit_code == 0 else outcome.reason,
        step=outcome.step,
        last_checkpoint=outcome.last_checkpoint,
    )
    report = _report(folder)
    show_end(outcome, folder, report, console)
    return outcome.exit_code


def require_runnable(job: Job) -> None:
    """Refuse what can be planned but not run here. Raises: RequestError or RulesError."""
    problem = job.resolution.problem
    if problem is not None:
        raise RequestError(job.resolution.why_not_runnable, problem_id=problem.id)
    if job.config.launcher.name is not LauncherName.local:
        raise RequestError(
            f"launcher={job.config.launcher.name.name}: this version plans such a run (--dry-run) and starts runs on "
            "this machine only; type launcher=local, or submit the printed command yourself",
            problem_id="launcher-plans-only",
        )
    if missing := check_environment(job.config):
        raise RulesError(missing)
    check_model_folder(job.config.model)
    if job.config.evaluation.tasks:
        check_tasks(job.config.evaluation.tasks)


def prepare_data(config: RunConfig, console: Console) -> Prepared:
    """Prepare the data with progress, or find it prepared; runs once, before any rank starts."""
    from tunebook.data.prepare import prepare
    from tunebook.launch.show import preparing

    with preparing(console) as progress:
        return prepare(config, progress)


def _set_up_folder(job: Job, plan: BatchPlan, prepared: Prepared, folder: Path | None) -> Path:
    """The run folder with everything that the ranks read; written before any of them starts."""
    config = job.config
    if folder is None:
        folder = create_run_folder(Path(config.outputs), config.recipe or "custom")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        clear_outcomes(folder)
    atomic_write_text(folder / RUN_FILE, config_to_yaml(config))
    atomic_write_json(folder / PLAN_FILE, plan_json(job, plan))
    atomic_write_json(folder / PREPARED_FILE, {"folder": str(prepared.folder)})
    start_manifest(
        folder,
        config,
        world_size=world_size(config),
        command=["tunebook", *sys.argv[1:]],
        tokenizer_sha256=prepared.tokenizer_sha256,
        chat_template_sha256=prepared.chat_template_sha256,
        dataset={
            "records": [asdict(record) for record in prepared.records],
            "fingerprint": prepared.fingerprint,
            "counts": {name: part.counts.to_json() for name, part in prepared.parts().items()},
        },
    )
    return folder


def plan_json(job: Job, plan: BatchPlan) -> dict[str, Any]:
    """The content of plan.json."""
    config = job.config
    hardware = config.hardware
    return {
        "recipe": config.recipe,
        "hardware": {
            "generation": hardware.generation.name,
            "num_nodes": hardware.num_nodes,
            "gpus_per_node": hardware.gpus_per_node,
            "memory_gib": hardware.memory_gib,
        },
        "precision": config.precision.compute.name,
        "attention": config.attention.implementation.name,
        "packing": config.packing.mode.name,
        "batch": plan.to_json(),
        "choices": [{"key": c.key, "value": c.value, "why": c.why} for c in job.resolution.choices],
        "problems": [{"id": p.id, "key": p.key, "message": p.message, "fix": p.fix} for p in job.problems],
    }


@contextmanager
def _recorded_failure(folder: Path) -> Iterator[None]:
    """Record in the manifest how a run ended whose launcher itself fails or is interrupted."""
    try:
        yield
    except BaseException as error:
        code = error.exit_code if isinstance(error, TunebookError) else 1
        finish_manifest(folder, state_of_exit_code(code), code, str(error) or type(error).__name__)
        raise


def _train_and_evaluate(config: RunConfig, folder: Path, console: Console) -> Outcome:
    evaluation = config.evaluation
    if evaluation.tasks and evaluation.before and not (folder / "evaluation" / "before.json").exists():
        _evaluate(folder, "before", config)
    command = launch_command(config, folder)
    show_command(command, console)
    run_and_wait(command)
    outcome = read_outcomes(folder, world_size(config))
    if outcome.exit_code == 0 and evaluation.tasks and evaluation.after:
        _evaluate(folder, "after", config)
    return outcome


def _evaluate(folder: Path, when: str, config: RunConfig) -> None:
    code = run_worker(folder, when, limit=config.evaluation.limit)
    if code == StoppedError.exit_code:
        raise StoppedError(f"stopped during the evaluation {when}; train again, or run tunebook eval")
    if code != 0:
        raise EvaluationFailedError(
            f"the evaluation {when} ended with exit code {code}; its message is above. The run folder is {folder}",
            problem_id="evaluation-failed",
        )


class EvaluationFailedError(TunebookError):
    """An evaluation did not end well; the training before it is untouched."""


def _report(folder: Path) -> Path:
    from tunebook.record.report import write_report

    file = folder / "report.html"
    write_report([folder], file)
    return file
