"""What is refused before a model is asked for anything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from tests.evaluate.conftest import cpu_run
from tunebook.commands import attempt, preflight
from tunebook.config.choices import LauncherName
from tunebook.config.frozen import config_to_yaml
from tunebook.config.launchers import SlurmConfig
from tunebook.config.schema import EvaluationConfig, ModelConfig
from tunebook.errors import RequestError
from tunebook.evaluate import worker
from tunebook.evaluate.code.judging import check_code
from tunebook.launch.supervise import StopRequests


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the service nor bubblewrap."""
    monkeypatch.setenv("TUNEBOOK_HANDOVER", "/nonexistent/handover")
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.mark.usefixtures("no_sandbox", "quiet_harness")
def test_without_a_sandbox_an_evaluation_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    evaluation = EvaluationConfig(tasks=["small_python"])
    with pytest.raises(RequestError) as raised:
        check_code(evaluation.tasks)
    assert raised.value.problem_id == "sandbox-missing"
    config = cpu_run(model=ModelConfig(path="/nowhere"), evaluation=evaluation)
    (tmp_path / "run.yaml").write_text(config_to_yaml(config))
    assert worker.main(["--run", str(tmp_path), "--when", "before"]) == 2


@pytest.mark.usefixtures("no_sandbox")
@pytest.mark.parametrize("when", ["before", "after"])
def test_without_a_sandbox_a_training_is_refused_but_not_a_job_on_its_own_node(when: str, tmp_path: Path) -> None:
    evaluation = EvaluationConfig(tasks=["small_python"], before=when == "before", after=when == "after")
    config = cpu_run(evaluation=evaluation)
    (tmp_path / "run.yaml").write_text(config_to_yaml(config))
    requests = StopRequests()
    begun = attempt.Attempt(config=config, folder=tmp_path, lock=-1, console=Console(), requests=requests)
    for refuse in (begun.carry_out, partial(preflight.check_sandbox, config)):
        with pytest.raises(RequestError) as raised:
            refuse()
        assert raised.value.problem_id == "sandbox-missing"
    assert not (tmp_path / "evaluation").exists()
    preflight.check_sandbox(replace(config, launcher=SlurmConfig(name=LauncherName.slurm, partition="main")))
