"""What `tunebook eval` does: find what to evaluate, run the worker, show the scores as a table."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from tunebook.config.frozen import load_config
from tunebook.config.rules.image import refuse_wrong_image
from tunebook.errors import RequestError, StoppedError, TunebookError
from tunebook.evaluate.finished import checkpoints_of, choose_run
from tunebook.evaluate.suites import suite_settings
from tunebook.evaluate.task_files import check_tasks
from tunebook.launch.local import ProcessEnd, rank_environment, run_and_wait
from tunebook.model.adapters import holds_model
from tunebook.model.hub import WEIGHT_FILES
from tunebook.record.atomic_files import read_json
from tunebook.record.files import RUN_FILE


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """A finished evaluation: its record, where that lies, and the same as a table for the terminal."""

    file: Path
    record: dict[str, Any]
    table: Table


def evaluate_command(
    target: str,
    outputs: Path,
    *,
    suite: str | None = None,
    tasks: list[str] | None = None,
    limit: int | None = None,
) -> EvaluationReport:
    """Evaluate a run, one of its checkpoints, or a model folder inside it, with the run's tokenizer and template.

    `target` is a folder, `<recipe>/<time>`, or for the newest finished run `latest` or a recipe. A `suite` or `tasks`
    take the place of the run's own. Writes `evaluation/eval-<time>.json` in the run's folder, beside `before.json` and
    `after.json`. Raises: RequestError for what cannot be evaluated.
    """
    if suite is not None and tasks is not None:
        raise RequestError(
            f"suite={suite} and tasks={','.join(tasks)} are two answers to the same question; type one of them",
            problem_id="suite-and-tasks",
        )
    refuse_wrong_image()
    run, model = find_model(target, outputs)
    config = load_config(run / RUN_FILE)
    asked = tasks or (suite_settings(suite, config) if suite else config.evaluation).tasks
    if not asked:
        raise RequestError(
            f"{run} names no tasks of its own to evaluate; try suite=leaderboard, or tasks=gsm8k,arc_easy of "
            "lm-evaluation-harness, or the YAML file of a task of yours",
            problem_id="no-tasks",
        )
    check_tasks(asked)
    when = f"eval-{datetime.now(UTC):%Y-%m-%dT%H-%M-%SZ}-{os.getpid()}"
    end = run_worker(run, when, model=model, suite=suite, tasks=tasks, limit=limit)
    if end.exit_code != 0:
        raise worker_error(end, when)
    file = run / "evaluation" / f"{when}.json"
    record = read_json(file)
    return EvaluationReport(file=file, record=record, table=score_table([record]))


class EvaluationFailedError(TunebookError):
    """The worker failed and has said why; ends the command with the worker's own exit code."""

    def __init__(self, exit_code: int, when: str) -> None:
        said = f"ended with exit code {exit_code}" if exit_code > 0 else f"was killed by signal {-exit_code}"
        super().__init__(f"the evaluation {when} {said}; its message is above", problem_id="evaluation-failed")
        self.exit_code = exit_code if exit_code > 0 else 1  # type: ignore[misc]


def worker_error(end: ProcessEnd, when: str) -> TunebookError:
    """The error for a worker that did not end well."""
    if end.stopped_by is not None or end.exit_code == StoppedError.exit_code:
        by = f" by {end.stopped_by}" if end.stopped_by else ""
        return StoppedError(
            f"stopped{by} during the evaluation {when}; nothing of it was written", problem_id="stopped"
        )
    return EvaluationFailedError(end.exit_code, when)


def run_worker(
    run: Path,
    when: str,
    *,
    model: Path | None = None,
    suite: str | None = None,
    tasks: list[str] | None = None,
    limit: int | None = None,
) -> ProcessEnd:
    """Run one evaluation in a process of its own and wait for it."""
    command = worker_command(run, when, model=model, suite=suite, tasks=tasks, limit=limit)
    environment = rank_environment(load_config(run / RUN_FILE), os.environ)
    return run_and_wait(command, environment)


def worker_command(
    run: Path,
    when: str,
    *,
    model: Path | None = None,
    suite: str | None = None,
    tasks: list[str] | None = None,
    limit: int | None = None,
) -> list[str]:
    """The worker's argument list."""
    command = [sys.executable, "-m", "tunebook.evaluate", "--run", str(run), "--when", when]
    if model is not None:
        command += ["--model", str(model)]
    if suite is not None:
        command += ["--suite", suite]
    for task in tasks or []:
        command += ["--task", task]
    if limit is not None:
        command += ["--limit", str(limit)]
    return command


def find_model(target: str, outputs: Path) -> tuple[Path, Path]:
    """The run folder that a target belongs to, and the model folder to evaluate.

    Where the target leaves a choice, the standard error says which run was taken.
    Raises: RequestError when no run has a trained model yet, or a folder holds no weights or belongs to no run.
    """
    named = Path(target).expanduser().absolute()
    if holds_model(named):
        run = next((folder for folder in named.parents if (folder / RUN_FILE).is_file()), None)
        if run is None:
            raise RequestError(
                f"{named} is a model, but lies in no run folder, so its tasks and template are not known; name a run, "
                "or one of its checkpoints",
                problem_id="unknown-run",
            )
        return run, _with_weights(named)
    run = choose_run(target, outputs, lambda line: print(line, file=sys.stderr))
    model = run / "model"
    if not holds_model(model):
        raise RequestError(
            f"{run} has no model/ folder: the run did not finish. Name one of its checkpoints: {checkpoints_of(run)}",
            problem_id="run-without-model",
        )
    return run, _with_weights(model)


def _with_weights(model: Path) -> Path:
    if not any(any(model.glob(pattern)) for pattern in WEIGHT_FILES):
        raise RequestError(
            f"{model} has no weights ({' or '.join(WEIGHT_FILES)}): it is a sharded or unfinished checkpoint; name the "
            "run's model/ folder, or make one with: tunebook export RUN",
            problem_id="model-without-weights",
        )
    return model


def score_table(records: list[dict[str, Any]]) -> Table:
    """Evaluations side by side: a line per task and group, a column per evaluation."""
    table = Table(title="Evaluation", title_justify="left", box=None, pad_edge=False)
    table.add_column("task")
    table.add_column("items", justify="right")
    for record in records:
        table.add_column(record["when"], justify="right")
    last = records[-1]
    for name, task in last["tasks"].items():
        table.add_row(f"{name} ({task['metric']})", str(task["num_items"]), *(_score(r, name) for r in records))
        for group, score in task["groups"].items():
            cells = [_percent(r["tasks"].get(name, {}).get("groups", {}).get(group)) for r in records]
            table.add_row(f"  {group}", str(score["num_items"]), *cells)
    if last["baseline"] is not None:
        cells = ["" for _ in records[:-1]] + [_percent(last["baseline"])]
        table.add_row(f"baseline: {last['baseline']['name']}", "", *cells)
    return table


def _score(record: dict[str, Any], name: str) -> str:
    task = record["tasks"].get(name)
    if task is None:
        return "-"
    if not _is_share(task):
        return f"{task['value']:.4g}"
    return _percent(task) if task["stderr"] is None else f"{_percent(task)} ± {100 * task['stderr']:.1f}"


def _is_share(task: dict[str, Any]) -> bool:
    """Whether a score is a share of right answers, and not a perplexity or the like."""
    return task["higher_is_better"] is not False and 0 <= task["value"] <= 1


def _percent(score: dict[str, Any] | None) -> str:
    return "-" if score is None else f"{100 * score['value']:.1f}%"
