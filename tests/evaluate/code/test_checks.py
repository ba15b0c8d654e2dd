"""What is refused before a model is asked for anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands import attempt, preflight
from tunebook.commands.train import plan_job
from tunebook.config.choices import Generation
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.schema import CodeConfig, EvaluationConfig
from tunebook.errors import RequestError
from tunebook.evaluate import evaluation, worker
from tunebook.evaluate.code.code_task import apply_overrides
from tunebook.evaluate.code.judging import check_code
from tunebook.evaluate.task_files import resolve_task, suite_settings


def settings(*tasks: str, **more: Any) -> EvaluationConfig:
    return EvaluationConfig(tasks=list(tasks), **more)


@pytest.mark.usefixtures("no_sandbox")
def test_programs_are_refused_without_a_sandbox() -> None:
    with pytest.raises(RequestError) as raised:
        check_code(settings("humaneval"), ["humaneval"])
    assert raised.value.problem_id == "sandbox-missing"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of the quickstart, in which nothing has been trained."""
    config = compose("quickstart", []).config
    config.hardware.generation = Generation.cpu
    (tmp_path / "run.yaml").write_text(config_to_yaml(config))
    return tmp_path


@pytest.mark.usefixtures("no_sandbox", "quiet_harness")
def test_the_worker_refuses_before_it_loads_a_model(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*words: Any, **more: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(evaluation, "load_to_answer", load)
    monkeypatch.setattr(evaluation, "load_padded_tokenizer", load)
    config = load_config(run / "run.yaml")
    (run / "run.yaml").write_text(config_to_yaml(replace(config, evaluation=settings("small_python"))))
    assert worker.main(["--run", str(run), "--when", "before"]) == 2
    assert "programs that a model wrote are not executed" in capsys.readouterr().err
    assert not (run / "evaluation").exists()


def test_words_of_the_command_line() -> None:
    before = settings("humaneval", code=CodeConfig(temperature=0.2))
    after = apply_overrides(
        before, ["evaluation.code.num_samples=20", "evaluation.code.pass_at_k=[1,10]", "evaluation.code.top_p=0.95"]
    )
    assert after.code == CodeConfig(num_samples=20, temperature=0.2, top_p=0.95, pass_at_k=[1, 10])
    assert replace(after, code=before.code) == before
    assert apply_overrides(after, ["evaluation.code.temperature=null"]).code.temperature is None


@pytest.mark.parametrize("word", ["num_sample=2", "num_samples=many", "num_samples=0", "top_p=1.5", "pass_at_k=1"])
def test_words_that_cannot_be_meant(word: str) -> None:
    with pytest.raises(RequestError) as raised:
        apply_overrides(settings("humaneval"), [f"evaluation.code.{word}"])
    assert raised.value.problem_id == "unknown-key"


@pytest.mark.parametrize(
    ("suite", "tasks"),
    [
        ("code", ["humaneval_instruct", "mbpp_fenced", "small_python_instruct"]),
        ("code_completion", ["humaneval", "mbpp", "small_python"]),
    ],
)
def test_the_suites(suite: str, tasks: list[str]) -> None:
    found = suite_settings(suite)
    assert found.tasks == tasks
    assert [resolve_task(task).name for task in tasks] == tasks


@pytest.mark.usefixtures("no_sandbox")
@pytest.mark.parametrize("launcher", [[], ["launcher=slurm", "launcher.partition=main"]], ids=["here", "slurm"])
def test_a_training_is_refused_before_it_starts(launcher: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_launcher", lambda config: None)  # no sbatch is needed to see this
    planned = plan_job("quickstart", ["evaluation=code", "evaluation.tasks=[small_python]", *launcher], [])
    if launcher:  # looked for on the job's own node
        preflight.require_runnable(planned)
        return
    with pytest.raises(RequestError, match="programs that a model wrote are not executed"):
        preflight.require_runnable(planned)


@pytest.mark.usefixtures("no_sandbox")
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_attempt_is_refused_where_it_runs(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*words: Any, **more: Any) -> Any:
        raise AssertionError("something was started")

    monkeypatch.setattr(attempt, "run_worker", start)
    monkeypatch.setattr(attempt, "run_and_wait", start)
    config = compose("quickstart", ["evaluation.tasks=[small_python]"]).config
    config.evaluation.before, config.evaluation.after = when == "before", when == "after"
    begun = attempt.Attempt(config=config, folder=tmp_path, lock=-1, console=Console())
    with pytest.raises(RequestError, match="programs that a model wrote are not executed"):
        begun._train_and_evaluate()
