"""`tunebook eval` up to its worker, which a stand-in replaces; test_worker.py tests the worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.evaluate.conftest import QUICKSTART, cpu_run
from tunebook.config.book import resolve_path
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.schema import CodeConfig, EvaluationConfig
from tunebook.errors import RequestError, TunebookError
from tunebook.evaluate import command
from tunebook.evaluate.command import (
    EvaluationRequest,
    evaluate_command,
    show_scores,
    worker_error,
)
from tunebook.launch.supervise import ProcessEnd
from tunebook.record.model_origin import ORIGIN_FILE

MakeRun = Callable[..., Path]


class Worker:
    """Stands in for the worker: notes its words and writes a record."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.environment: dict[str, str] = {}
        self.exit_code = 0
        self.is_written = True

    def __call__(self, words: list[str], environment: dict[str, str]) -> ProcessEnd:
        self.words, self.environment = words[3:], environment
        if self.is_written:
            folder = Path(self.value("--run")) / "evaluation"
            folder.mkdir(exist_ok=True)
            written = record(self.value("--when"), 0.5)
            (folder / f"{self.value('--when')}.json").write_text(json.dumps(written))
        return ProcessEnd(exit_code=self.exit_code, stopped_by=None)

    def value(self, name: str) -> str:
        return self.words[self.words.index(name) + 1]

    @property
    def settings(self) -> EvaluationConfig:
        return load_config(Path(self.value("--config"))).evaluation

    @property
    def tasks(self) -> list[str]:
        return self.settings.tasks


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()
    monkeypatch.setattr(command, "run_and_wait", worker)
    return worker


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return folder


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
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


def asked(**settings: Any) -> EvaluationRequest:
    return EvaluationRequest(**settings)


def test_a_run_is_evaluated_on_its_own_tasks_with_its_own_model(
    run: Path, outputs: Path, console: Console, worker: Worker
) -> None:
    evaluate_command(asked(), outputs, console)
    assert (worker.value("--run"), worker.value("--model"), worker.tasks) == (
        str(run), str(run / "model"), [str(resolve_path(QUICKSTART))],
    )  # fmt: skip
    assert worker.value("--when").startswith("eval-20")
    shown = console.export_text()
    assert f"written: {run / 'evaluation' / worker.value('--when')}.json\n" in shown
    assert "words (exact_match)" in shown and "50.0 % ± 2.5" in shown


def test_a_checkpoint_is_evaluated_in_its_run(run: Path, outputs: Path, console: Console, worker: Worker) -> None:
    checkpoint = model_folder(run / "checkpoints" / "checkpoint-20")
    for request in (asked(run=str(checkpoint)), asked(model=str(checkpoint))):
        evaluate_command(request, outputs, console)
        assert (worker.value("--run"), worker.value("--model")) == (str(run), str(checkpoint))


def test_what_was_asked_reaches_the_worker(run: Path, outputs: Path, console: Console, worker: Worker) -> None:
    request = asked(
        suite="quickstart",
        limit=7,
        num_fewshot=0,
        batch_size="auto",
        allow_mismatch="template,tokenizer",
        processes=2,
        code=["evaluation.code.num_samples=3"],
    )
    evaluate_command(request, outputs, console)
    words = ["--allow-mismatch", "template", "--allow-mismatch", "tokenizer", "--processes", "2"]
    assert worker.words[-len(words) :] == words
    expected = EvaluationConfig(
        tasks=worker.tasks, before=True, limit=7, num_fewshot=0, batch_size=None, code=CodeConfig(num_samples=3)
    )
    assert worker.settings == expected
    assert [Path(task).name for task in worker.tasks] == ["quickstart.yaml"]


@pytest.mark.parametrize("is_exported", [False, True])
def test_a_model_without_a_run_has_a_folder_of_its_own(
    tmp_path: Path, outputs: Path, console: Console, worker: Worker, is_exported: bool
) -> None:
    model = model_folder(tmp_path / "some model")
    if is_exported:
        origin = {
            "format": 1, "run": "quickstart/now", "recipe": "quickstart", "config_sha256": "c", "tokenizer_sha256": "t",
            "chat_template_sha256": "t", "system_prompt": "Be short.", "system_prompt_sha256": "s",
        }  # fmt: skip
        (model / ORIGIN_FILE).write_text(json.dumps(origin))
    evaluate_command(asked(model=str(model), suite="quickstart"), outputs, console)
    assert Path(worker.value("--run")).parent == outputs / "evaluations"
    assert worker.value("--model") == str(model)
    config = load_config(Path(worker.value("--config")))
    assert config.model.path == str(model)
    expected = ("Be short.", "quickstart") if is_exported else (None, None)
    assert (config.dataset.system_prompt, config.recipe) == expected
    assert [Path(task).name for task in worker.tasks] == ["quickstart.yaml"]


@pytest.mark.parametrize(
    ("request_", "problem_id"),
    [
        (asked(tasks=[]), "no-tasks"),
        (asked(batch_size="big"), "batch-size"),
        (asked(allow_mismatch="prompt"), "unknown-mismatch"),
        (asked(suite="leaderbord"), "unknown-suite"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_loaded(
    run: Path, outputs: Path, console: Console, worker: Worker, request_: EvaluationRequest, problem_id: str
) -> None:
    with pytest.raises(RequestError) as raised:
        evaluate_command(request_, outputs, console)
    assert raised.value.problem_id == problem_id
    assert worker.words == []


def test_a_runs_own_task_file_is_found_from_another_folder(
    run: Path, outputs: Path, console: Console, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "typed here"
    own.mkdir()
    config = load_config(run / "run.yaml")
    task = {"task": "mine", "dataset_path": "json", "output_type": "generate_until"}
    (own / "mine.yaml").write_text(json.dumps(task))
    config.evaluation.tasks = ["mine.yaml"]
    monkeypatch.chdir(own)
    (run / "run.yaml").write_text(config_to_yaml(config))
    monkeypatch.chdir(tmp_path)
    evaluate_command(asked(), outputs, console)
    assert worker.tasks == [str(own / "mine.yaml")]


def test_a_failed_worker_hands_on_its_exit_code_and_what_it_wrote(
    run: Path, outputs: Path, console: Console, worker: Worker
) -> None:
    worker.exit_code = 4
    for shows in (True, False):
        with pytest.raises(TunebookError, match="its message is above") as raised:
            evaluate_command(asked(), outputs, console)
        assert raised.value.exit_code == 4
        assert ("words (exact_match)" in console.export_text()) is shows
        for file in (run / "evaluation").iterdir():
            file.unlink()
        worker.is_written = False


def test_a_request_to_stop_ends_an_evaluation_with_6() -> None:
    stopped = worker_error(ProcessEnd(exit_code=-15, stopped_by="SIGTERM"), "after", "this command")
    assert stopped.exit_code == 6
    assert worker_error(ProcessEnd(exit_code=6, stopped_by=None), "after", "this command").exit_code == 6
    killed = worker_error(ProcessEnd(exit_code=-9, stopped_by=None), "after", "this command")
    assert killed.exit_code == 1


def record(when: str, value: float) -> dict[str, Any]:
    task = {
        "metric": "exact_match", "value": value, "stderr": 0.025, "num_items": 8, "higher_is_better": True,
        "groups": {"reverse": {"value": value, "num_items": 4}},
    }  # fmt: skip
    baseline = {"name": "look-up", "value": 0.08}
    content = {"when": when, "tasks": {"words": task}, "baseline": baseline, "contamination": None}
    return content | {"bound": {"mismatches": []}}


def test_two_evaluations_are_shown_with_their_difference_and_its_error(console: Console, tmp_path: Path) -> None:
    show_scores([record("before", 0.0), record("after", 0.9375)], tmp_path, console)
    lines = console.export_text().splitlines()
    assert [line for line in lines if "words (exact_match)" in line and "+93.8 ± 3.5 points" in line]
    # the group's own error: sqrt(0.9375 x 0.0625 / 3), and none at 0
    assert [line for line in lines if "reverse" in line and "+93.8 ± 14.0 points" in line]


def test_more_faulty_answers_than_before_the_training_are_a_warning(console: Console, tmp_path: Path) -> None:
    counts = {"num_answers": 100, "empty": 0, "looping": 0, "endless": 0, "examples": {}}
    (tmp_path / "evaluation").mkdir()
    before = record("before", 0.5) | {"answer_faults": {"words": counts}}
    (tmp_path / "evaluation" / "before.json").write_text(json.dumps(before))
    faulty = {**counts, "empty": 50, "examples": {"empty": {"item": 1, "end": ""}}}
    show_scores([record("after", 0.5) | {"answer_faults": {"words": faulty}}], tmp_path, console)
    assert "warning: words: 50.0% (50 of 100) of the answers after training are empty" in console.export_text()
