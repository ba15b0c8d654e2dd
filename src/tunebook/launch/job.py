"""The main job, from words on a command line to a report: compose, check, plan, prepare, launch, evaluate, record."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from tunebook.checkpoint.newest import newest_checkpoint
from tunebook.config.auto import Resolution, resolve_auto
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml
from tunebook.config.rules import check, check_environment
from tunebook.config.schema import RunConfig
from tunebook.data.view import show_summary
from tunebook.errors import DoesNotFitError, Problem, RequestError, RulesError, StoppedError, TunebookError
from tunebook.evaluate.command import run_worker, score_table, worker_error
from tunebook.evaluate.task_files import check_tasks
from tunebook.hardware.detect import detect_machine
from tunebook.launch.commands import launch_command
from tunebook.launch.local import ProcessEnd, rank_environment, run_and_wait
from tunebook.launch.lock import working_in
from tunebook.launch.plans_only import refuse_plans_only
from tunebook.launch.resume import check_run_folder, is_trained, unfinished_run
from tunebook.launch.show import show_batch, show_choices, show_command, show_end
from tunebook.launch.upload import check_upload
from tunebook.model.load import check_model
from tunebook.plan.batch import BatchPlan, solve_batch, world_size
from tunebook.record.atomic_files import atomic_write_json, atomic_write_text, read_json
from tunebook.record.disk import disk_full
from tunebook.record.files import PLAN_FILE, PREPARED_FILE, RUN_FILE
from tunebook.record.manifest import finish_manifest, start_manifest, state_of_exit_code
from tunebook.record.run_folder import (
    Outcome,
    check_outputs,
    clear_outcomes,
    create_run_folder,
    has_outcome,
    make_run_folder,
    read_outcomes,
)

if TYPE_CHECKING:
    from tunebook.data.prepared import Prepared

REPORT_FILE = "report.html"


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
    broken = check(resolution.config, composition.origins.set_by)
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
    if folder is not None:
        folder = folder.expanduser().absolute()
        check_run_folder(job.config, folder)
    check_outputs(folder or Path(job.config.outputs))
    prepared = prepare_data(job.config, console)
    show_summary(prepared, console)
    plan = solve_batch(job.config, prepared.train.load_lengths().astype("int64"))
    show_batch(plan, console)
    unfinished = unfinished_run(job.config) if folder is None else None
    folder = _new_or_unfinished(job.config, folder or unfinished)
    with working_in(folder) as lock:
        _set_up_folder(job, plan, prepared, folder)
        console.print(f"run folder: {folder}{_going_on(job.config, folder)}", highlight=False, soft_wrap=True)
        try:
            outcome = _train_and_evaluate(job.config, folder, lock, console)
        except BaseException as error:
            _record_end(folder, _outcome_of(error, folder, job.config), console)
            raise
        is_reported = _record_end(folder, outcome, console)
    show_scores(folder, console)
    show_end(outcome, folder, folder / REPORT_FILE if is_reported else None, console)
    return outcome.exit_code


def require_runnable(job: Job) -> None:
    """Refuse what can be planned but not run here. Raises: RequestError or RulesError."""
    problem = job.resolution.problem
    if problem is not None:
        raise RequestError(job.resolution.why_not_runnable, problem_id=problem.id)
    refuse_plans_only(job.config)
    if missing := check_environment(job.config):
        raise RulesError(missing)
    check_model(job.config.model)
    if job.config.evaluation.tasks:
        check_tasks(job.config.evaluation.tasks)
    check_upload(job.config.training.push_to_hub)


def prepare_data(config: RunConfig, console: Console) -> Prepared:
    """Prepare the data with progress, or find it prepared; runs once, before any rank starts."""
    from tunebook.data.prepare import prepare
    from tunebook.launch.show import preparing

    with preparing(console) as progress:
        return prepare(config, progress)


def _new_or_unfinished(config: RunConfig, folder: Path | None) -> Path:
    if folder is None:
        return create_run_folder(Path(config.outputs), config.recipe or "custom")
    return make_run_folder(folder)


def _going_on(config: RunConfig, folder: Path) -> str:
    if is_trained(folder, config):
        return ", trained already: going on with its evaluation"
    checkpoint = newest_checkpoint(folder)
    return f", going on after {checkpoint}" if checkpoint is not None else ""


def _set_up_folder(job: Job, plan: BatchPlan, prepared: Prepared, folder: Path) -> None:
    """Write everything that the ranks read, before any of them starts."""
    config = job.config
    if not is_trained(folder, config):
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


def _train_and_evaluate(config: RunConfig, folder: Path, lock: int, console: Console) -> Outcome:
    evaluation = config.evaluation
    if evaluation.tasks and evaluation.before and not (folder / "evaluation" / "before.json").exists():
        _evaluate(folder, "before", config)
    outcome = _train(config, folder, lock, console)
    if outcome.exit_code == 0 and evaluation.tasks and evaluation.after:
        _evaluate(folder, "after", config)
    return outcome


def _train(config: RunConfig, folder: Path, lock: int, console: Console) -> Outcome:
    """Launch the ranks and wait for them, unless an earlier attempt has trained already."""
    if not is_trained(folder, config):
        command = launch_command(config, folder)
        show_command(command, console)
        end = run_and_wait(command, rank_environment(config, os.environ), keep_open=[lock])
        if not (folder / RUN_FILE).is_file():
            raise TunebookError(f"the run folder {folder} was removed while its run was at work", problem_id="run-lost")
        if not has_outcome(folder):
            raise _without_a_word(end, folder)
        if end.stopped_by is not None and is_trained(folder, config) and config.evaluation.tasks:
            message = f"stopped by {end.stopped_by} after the last step, before the evaluation"
            raise StoppedError(f"{message}; the same command goes on with it", problem_id="stopped")
    return read_outcomes(folder, world_size(config))


def _without_a_word(end: ProcessEnd, folder: Path) -> TunebookError:
    """The error for a training of which no rank could write how it ended."""
    if end.stopped_by is not None:
        return StoppedError(f"stopped by {end.stopped_by} before the first step", problem_id="stopped")
    if end.exit_code == DoesNotFitError.exit_code:
        return disk_full(folder)
    how = f"was killed by signal {-end.exit_code}" if end.exit_code < 0 else f"ended with exit code {end.exit_code}"
    return TunebookError(
        f"the training {how} and could not say why; what it printed is above, and in {folder / 'log.txt'}. A kill by "
        "signal 9 is most often the system's, which ran out of memory",
        problem_id="run-lost",
    )


def _evaluate(folder: Path, when: str, config: RunConfig) -> None:
    end = run_worker(folder, when, limit=config.evaluation.limit)
    if end.exit_code != 0:
        raise worker_error(end, when)


def show_scores(folder: Path, console: Console) -> None:
    """What the evaluations before and after the training came to, side by side; nothing until both are done."""
    files = [folder / "evaluation" / f"{when}.json" for when in ("before", "after")]
    records = [read_json(file) for file in files if file.is_file()]
    if files[-1].is_file():
        console.print(score_table(records))


def _outcome_of(error: BaseException, folder: Path, config: RunConfig) -> Outcome:
    """How a run ended whose launcher itself failed or was interrupted; the ranks' progress is kept."""
    if isinstance(error, KeyboardInterrupt):
        code, reason = StoppedError.exit_code, "interrupted"
    elif isinstance(error, TunebookError):
        code, reason = error.exit_code, error.message
    else:
        code, reason = 1, f"{type(error).__name__}: {error}"
    if has_outcome(folder):
        return replace(read_outcomes(folder, world_size(config)), exit_code=code, reason=reason)
    return Outcome(rank=0, exit_code=code, reason=reason, step=None, last_checkpoint=None)


def _record_end(folder: Path, outcome: Outcome, console: Console) -> bool:
    """Bring manifest and report to the end of the run; whether that went well. A full disk hides no other error."""
    from tunebook.record.report import write_report

    try:
        finish_manifest(
            folder,
            state_of_exit_code(outcome.exit_code),
            outcome.exit_code,
            None if outcome.exit_code == 0 else outcome.reason,
            step=outcome.step,
            last_checkpoint=outcome.last_checkpoint,
        )
        write_report([folder], folder / REPORT_FILE)
    except (OSError, TunebookError) as error:
        console.print(Text(f"warning: the end of this run is not in its records: {error}", style="yellow"))
        return False
    return True
