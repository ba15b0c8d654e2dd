"""`tunebook eval` up to its worker, which a stand-in replaces; test_worker.py tests the worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.evaluate.conftest import QUICKSTART, cpu_run, model_folder, write_origin
from tunebook.config.book import resolve_path
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.schema import EvaluationConfig, RunConfig
from tunebook.errors import RequestError, TunebookError
from tunebook.evaluate import command
from tunebook.evaluate.command import (
    EvaluationRequest,
    evaluate_command,
    worker_error,
)
from tunebook.launch.supervise import ProcessEnd

MakeRun = Callable[..., Path]
Evaluate = Callable[..., None]


class Worker:
    """Stands in for the worker: notes its arguments and writes a record."""

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self.exit_code = 0
        self.is_written = True

    def __call__(self, command: list[str], environment: dict[str, str]) -> ProcessEnd:
        self.arguments = command[3:]
        if self.is_written:
            folder = Path(self.value("--run")) / "evaluation"
            folder.mkdir(exist_ok=True)
            content = record(self.value("--when"), 0.5)
            (folder / f"{self.value('--when')}.json").write_text(json.dumps(content))
        return ProcessEnd(exit_code=self.exit_code, stopped_by=None)

    def value(self, name: str) -> str:
        return self.arguments[self.arguments.index(name) + 1]

    @property
    def config(self) -> RunConfig:
        return load_config(Path(self.value("--config")))

    @property
    def tasks(self) -> list[str]:
        return self.config.evaluation.tasks


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()
    monkeypatch.setattr(command, "run_and_wait", worker)
    return worker


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    """A finished run of the quickstart, which evaluates its own task."""
    run = make_run("quickstart", 5)
    (run / "run.yaml").write_text(config_to_yaml(cpu_run()))
    model_folder(run / "model")
    return run


@pytest.fixture
def console() -> Console:
    return Console(width=200, record=True, file=StringIO())


@pytest.fixture
def evaluate(outputs: Path, console: Console) -> Evaluate:
    """`evaluate(limit=7)`: the command with this request."""
    return lambda **request: evaluate_command(EvaluationRequest(**request), outputs, console)


def test_a_run_is_evaluated_on_its_own_tasks_with_its_own_model(
    run: Path, evaluate: Evaluate, console: Console, worker: Worker
) -> None:
    evaluate()
    assert (worker.value("--run"), worker.value("--model")) == (str(run), str(run / "model"))
    assert worker.tasks == [str(resolve_path(QUICKSTART))]
    assert worker.value("--when").startswith("eval-20")
    shown = console.export_text()
    assert f"written: {run / 'evaluation' / worker.value('--when')}.json\n" in shown
    assert "words (exact_match)" in shown and "50.0 % ± 2.5" in shown


def test_the_request_reaches_the_worker(run: Path, evaluate: Evaluate, worker: Worker) -> None:
    evaluate(
        suite="quickstart", limit=7, num_fewshot=0, batch_size="auto", processes=2,
    )  # fmt: skip
    options = ["--processes", "2"]
    assert worker.arguments[-len(options) :] == options
    assert worker.config.evaluation == EvaluationConfig(
        tasks=worker.tasks, before=True, limit=7, num_fewshot=0, batch_size=None
    )
    assert [Path(task).name for task in worker.tasks] == ["quickstart.yaml"]


@pytest.mark.parametrize("is_exported", [False, True])
def test_a_model_without_a_run_has_a_folder_of_its_own(
    tmp_path: Path, outputs: Path, evaluate: Evaluate, worker: Worker, is_exported: bool
) -> None:
    model = model_folder(tmp_path / "some model")
    if is_exported:
        write_origin(model)
    evaluate(model=str(model), suite="quickstart")
    assert Path(worker.value("--run")).parent == outputs / "evaluations"
    assert worker.value("--model") == worker.config.model.path == str(model)
    expected = ("Be short.", "tiny") if is_exported else (None, None)
    assert (worker.config.dataset.system_prompt, worker.config.recipe) == expected
    with pytest.raises(RequestError, match=f"^{model} names no tasks"):
        evaluate(run=str(model))


@pytest.mark.parametrize(
    ("request_", "problem_id"),
    [
        ({"tasks": []}, "no-tasks"),
        ({"batch_size": "big"}, "batch-size"),
        ({"suite": "leaderbord"}, "unknown-choice"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_loaded(
    run: Path, evaluate: Evaluate, worker: Worker, request_: dict[str, Any], problem_id: str
) -> None:
    with pytest.raises(RequestError) as raised:
        evaluate(**request_)
    assert raised.value.problem_id == problem_id
    assert worker.arguments == []


def test_a_runs_own_task_file_is_found_from_another_folder(
    run: Path, evaluate: Evaluate, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "typed here"
    own.mkdir()
    (own / "mine.yaml").write_text(json.dumps({"task": "mine", "dataset_path": "json"}))
    monkeypatch.chdir(own)
    (run / "run.yaml").write_text(config_to_yaml(cpu_run(evaluation=EvaluationConfig(tasks=["mine.yaml"]))))
    monkeypatch.chdir(tmp_path)
    evaluate()
    assert worker.tasks == [str(own / "mine.yaml")]


def test_a_failed_worker_hands_on_its_exit_code_and_its_results(
    run: Path, evaluate: Evaluate, console: Console, worker: Worker
) -> None:
    worker.exit_code = 4
    for is_written in (False, True):
        worker.is_written = is_written
        with pytest.raises(TunebookError) as raised:
            evaluate()
        assert (raised.value.problem_id, raised.value.exit_code) == ("evaluation-failed", 4)
        assert ("words (exact_match)" in console.export_text()) is is_written


@pytest.mark.parametrize(("exit_code", "stopped_by", "expected"), [(-15, "SIGTERM", 6), (6, None, 6), (-9, None, 1)])
def test_a_stopped_evaluation_ends_with_6(exit_code: int, stopped_by: str | None, expected: int) -> None:
    end = ProcessEnd(exit_code=exit_code, stopped_by=stopped_by)
    assert worker_error(end, "after", "this command").exit_code == expected


def record(when: str, value: float) -> dict[str, Any]:
    task = {
        "metric": "exact_match", "value": value, "stderr": 0.025, "num_items": 8, "higher_is_better": True,
        "groups": {"reverse": {"value": value, "num_items": 4}},
    }  # fmt: skip
    content = {"when": when, "tasks": {"words": task}}
    return content | {"contamination": None}
