"""`tunebook eval`: find the model, run the worker, show the scores as a table."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.config.book import PlacedPath, resolve_path
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.schema import EvaluationConfig, RunConfig
from tunebook.errors import RequestError, StoppedError, TunebookError
from tunebook.evaluate.code.judging import check_code
from tunebook.evaluate.results import BEFORE
from tunebook.evaluate.target import bare_config, find_target, results_folder
from tunebook.evaluate.task_files import suite_settings
from tunebook.files import atomic_write_text, read_json
from tunebook.launch.supervise import ProcessEnd, StopRequests, run_and_wait
from tunebook.processes import ending
from tunebook.record.answer_faults import fault_warnings
from tunebook.record.contamination import score_lines
from tunebook.record.run_folder import LATEST, RUN_FILE, time_name
from tunebook.record.scores import answers_of, score_rows
from tunebook.terminal import print_text
from tunebook.train.environment import evaluation_environment
from tunebook.train.requirements import refuse_wrong_image


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The arguments of `tunebook eval`; None for the default."""

    run: str | None = None  # a run, a recipe, a checkpoint
    model: str | None = None  # a model folder or a name on the hub; neither: the newest finished run
    suite: str | None = None
    tasks: list[str] | None = None
    limit: int | None = None  # items per task
    num_fewshot: int | None = None  # examples before each item
    batch_size: str | None = None  # of requests, or auto
    processes: int | None = None  # that share the requests


def evaluate_command(request: EvaluationRequest, outputs: Path, console: Console) -> None:
    """Evaluate a run, one of its checkpoints, or a model that belongs to no run.

    A run's model gets the tokenizer, template and system prompt that it was trained with. A `suite` or `tasks` replace
    the run's own. Writes `evaluation/eval-<time>.json` in the run's folder, next to `before.json` and `after.json`, and
    the configuration; for another model in `<outputs>/evaluations/<name>/`.
    Raises: RequestError for what cannot be evaluated; after the results are printed, the worker's error.
    """
    refuse_wrong_image()
    target = find_target(request.model or request.run or LATEST, outputs, is_model=request.model is not None)
    if target.run is not None:
        folder, config = target.run, load_config(target.run / RUN_FILE)
    else:
        folder, config = results_folder(target, outputs), bare_config(target)
        run = (
            f"exported from the run {target.origin.run}"
            if target.origin
            else "its run is unknown, so template and tokenizer are not checked"
        )
        print(f"{target.name}: {run}", file=sys.stderr)
    settings = _settings(request, config)
    if not settings.tasks:
        raise RequestError(
            f"{request.model or target.run or target.name} names no tasks of its own to evaluate; try "
            "suite=leaderboard, or tasks=gsm8k,arc_easy of lm-evaluation-harness, or the YAML file of a task of yours",
            problem_id="no-tasks",
        )
    check_code(settings.tasks)
    when = f"eval-{time_name()}-{os.getpid()}"
    file = folder / "evaluation" / f"{when}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    tasks = [str(resolve_path(task)) if isinstance(task, PlacedPath) else task for task in settings.tasks]
    atomic_write_text(file, config_to_yaml(replace(config, evaluation=replace(settings, tasks=tasks))))
    options = ["--config", str(file), *(["--model", str(target.folder)] if target.folder else [])]
    options += [] if request.processes is None else ["--processes", str(request.processes)]
    end = run_and_wait(worker_command(folder, when, options), evaluation_environment(config, os.environ))
    _report(file.with_suffix(".json"), end, when, console)


def read_batch_size(text: str) -> int | None:
    """Parse `auto` (None) or a number of requests. Raises: RequestError for anything else."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise RequestError(f"--batch-size {text}: type a number from 1, or auto", problem_id="batch-size")
    return int(text)


def _settings(request: EvaluationRequest, config: RunConfig) -> EvaluationConfig:
    """Return the settings of this evaluation. Raises: RequestError for an unknown suite or a wrong batch size."""
    settings = config.evaluation if request.suite is None else suite_settings(request.suite)
    options = {"tasks": request.tasks, "limit": request.limit, "num_fewshot": request.num_fewshot}
    changes: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if request.batch_size is not None:
        changes["batch_size"] = read_batch_size(request.batch_size)
    return replace(settings, **changes)


def _report(file: Path, end: ProcessEnd, when: str, console: Console) -> None:
    """Print the results. Raises: the worker's error, at once if it wrote no record."""
    error = None if end.exit_code == 0 else worker_error(end, when, "the same command")
    if error is not None and not file.is_file():
        raise error
    record = read_json(file)
    show_scores([record], file.parent.parent, console)
    print_text(f"written: {file}", console)
    if error is not None:
        raise error


def show_scores(records: list[dict[str, Any]], folder: Path, console: Console) -> None:
    """Print one or two evaluations of a run in a table, and the warnings of the last one."""
    console.print(score_table(records, folder))
    for line in score_lines(records[-1]):
        print_text(line, console)
    before = folder / "evaluation" / f"{BEFORE}.json"
    for line in fault_warnings(read_json(before) if before.is_file() else None, records[-1]):
        print_text(f"warning: {line}", console, style="yellow")


def worker_error(end: ProcessEnd, when: str, command: str) -> TunebookError:
    """Return the error for a worker that failed or was stopped; `command` resumes its evaluation."""
    if end.stopped_by is not None or end.exit_code == StoppedError.exit_code:
        by = f" by {end.stopped_by}" if end.stopped_by else ""
        return StoppedError(
            f"stopped{by} during the evaluation {when}; its finished tasks are kept, and {command} evaluates the "
            "others",
            problem_id="stopped",
        )
    message = f"the evaluation {when} {ending(end.exit_code)}; its message is above"  # the worker printed it
    return TunebookError(message, problem_id="evaluation-failed", exit_code=max(1, end.exit_code))


def run_worker(run: Path, when: str, requests: StopRequests) -> ProcessEnd:
    """Evaluate a run's configuration in a separate process and wait for it."""
    environment = evaluation_environment(load_config(run / RUN_FILE), os.environ)
    return run_and_wait(worker_command(run, when), environment, requests=requests)


def worker_command(run: Path, when: str, options: Sequence[str] = ()) -> list[str]:
    """Return the worker's argument list, with additional `options`."""
    return [sys.executable, "-m", "tunebook.evaluate", "--run", str(run), "--when", when, *options]


def score_table(records: list[dict[str, Any]], run: Path) -> Table:
    """Show one or two evaluations in a table: a row per task and group, a column per evaluation, and the change."""
    table = Table(title="Evaluation", title_justify="left", box=None, pad_edge=False)
    table.add_column("task")
    table.add_column("items", justify="right")
    for record in records:
        table.add_column(Text(record["when"]), justify="right")
    if len(records) == 2:
        table.add_column("change", justify="right")
    is_pair = len(records) == 2
    answers = [answers_of(run, record) for record in records] if is_pair else []
    last = records[-1]
    for row in score_rows(records[0] if is_pair else {}, last, *answers):
        name = f"  {row.name}" if row.is_group else f"{row.name} ({row.metric})"
        cells = [score.text if score is not None else "-" for score in row.scores[-len(records) :]]
        change = [row.scores[1].change or "-" if row.scores[1] is not None else "-"] if is_pair else []
        table.add_row(Text(name), row.num_items, *cells, *change)  # names may have brackets
    return table
