"""What is refused before a model is asked for anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.evaluate.conftest import cpu_run
from tunebook.commands import attempt, preflight
from tunebook.config.choices import LauncherName
from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import CodeConfig, EvaluationConfig, ModelConfig, SlurmConfig
from tunebook.errors import RequestError
from tunebook.evaluate import worker
from tunebook.evaluate.code.code_task import apply_overrides
from tunebook.evaluate.code.judging import check_code


def settings(*tasks: str, **more: Any) -> EvaluationConfig:
    return EvaluationConfig(tasks=list(tasks), **more)


@pytest.mark.usefixtures("no_sandbox")
def test_programs_are_refused_without_a_sandbox() -> None:
    with pytest.raises(RequestError) as raised:
        check_code(settings("humaneval"))
    assert raised.value.problem_id == "sandbox-missing"


@pytest.mark.usefixtures("no_sandbox", "quiet_harness")
def test_the_worker_refuses_before_it_loads_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = cpu_run(model=ModelConfig(path="/nowhere"), evaluation=settings("small_python"))
    (tmp_path / "run.yaml").write_text(config_to_yaml(config))
    assert worker.main(["--run", str(tmp_path), "--when", "before"]) == 2
    assert "programs that a model wrote are not executed" in capsys.readouterr().err


def test_overrides_of_the_command_line() -> None:
    before = settings("humaneval", code=CodeConfig(temperature=0.2))
    after = apply_overrides(
        before, ["evaluation.code.num_samples=20", "evaluation.code.pass_at_k=[1,10]", "evaluation.code.top_p=0.95"]
    )
    assert after.code == CodeConfig(num_samples=20, temperature=0.2, top_p=0.95, pass_at_k=[1, 10])
    assert replace(after, code=before.code) == before
    assert apply_overrides(after, ["evaluation.code.temperature=null"]).code.temperature is None


@pytest.mark.parametrize("override", ["num_sample=2", "num_samples=many", "top_p=1.5"])
def test_invalid_overrides(override: str) -> None:
    with pytest.raises(RequestError) as raised:
        apply_overrides(settings("humaneval"), [f"evaluation.code.{override}"])
    assert raised.value.problem_id == "unknown-key"


@pytest.mark.usefixtures("no_sandbox")
def test_a_training_is_refused_before_it_starts_but_a_job_on_its_own_node() -> None:
    config = cpu_run(evaluation=settings("small_python"))
    with pytest.raises(RequestError) as raised:
        preflight.check_sandbox(config)
    assert raised.value.problem_id == "sandbox-missing"
    preflight.check_sandbox(replace(config, launcher=SlurmConfig(name=LauncherName.slurm, partition="main")))


@pytest.mark.usefixtures("no_sandbox")
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_attempt_is_refused_before_it_starts_anything(when: str, tmp_path: Path) -> None:
    evaluation = settings("small_python", before=when == "before", after=when == "after")
    (tmp_path / "run.yaml").write_text(config_to_yaml(cpu_run(evaluation=evaluation)))
    begun = attempt.Attempt(config=cpu_run(evaluation=evaluation), folder=tmp_path, lock=-1, console=Console())
    with pytest.raises(RequestError) as raised:
        begun.carry_out()
    assert raised.value.problem_id == "sandbox-missing"
    assert not (tmp_path / "evaluation").exists()
