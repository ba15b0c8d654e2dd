from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.config.compose import compose
from tunebook.errors import RequestError, TunebookError
from tunebook.evaluate import command
from tunebook.evaluate.command import evaluate_command, find_model, score_table, worker_command, worker_error
from tunebook.launch.local import ProcessEnd

MakeRun = Callable[..., Path]


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return folder


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    """A run that says it has finished, without a model."""
    return make_run("tiny", 5)


def test_a_run_is_evaluated_by_its_final_model(run: Path, tmp_path: Path) -> None:
    model = model_folder(run / "model")
    for target in (str(run), "latest", "tiny"):
        assert find_model(target, tmp_path / "outputs") == (run, model)


def test_a_checkpoint_is_evaluated_in_its_run(run: Path, tmp_path: Path) -> None:
    checkpoint = model_folder(run / "checkpoints" / "checkpoint-20")
    assert find_model(str(checkpoint), tmp_path / "outputs") == (run, checkpoint)


def test_a_run_that_trained_an_adapter_is_evaluated_by_it(run: Path, tmp_path: Path) -> None:
    (run / "model").mkdir()
    (run / "model" / "adapter_config.json").write_text("{}")
    (run / "model" / "adapter_model.safetensors").write_text("")
    assert find_model("latest", tmp_path / "outputs") == (run, run / "model")


def test_a_request_to_stop_ends_an_evaluation_with_6() -> None:
    assert worker_error(ProcessEnd(exit_code=-15, stopped_by="SIGTERM"), "after").exit_code == 6
    assert worker_error(ProcessEnd(exit_code=6, stopped_by=None), "after").exit_code == 6
    killed = worker_error(ProcessEnd(exit_code=-9, stopped_by=None), "after")
    assert (killed.exit_code, killed.message) == (
        1,
        "the evaluation after was killed by signal 9; its message is above",
    )


def test_an_unfinished_run_names_its_checkpoints(run: Path, tmp_path: Path) -> None:
    checkpoint = model_folder(run / "checkpoints" / "checkpoint-20")
    with pytest.raises(RequestError, match=f"has no model/ folder.*checkpoints: {checkpoint}"):
        find_model(str(run), tmp_path / "outputs")


def test_a_sharded_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    (model_folder(run / "model") / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"has no weights .*tunebook export RUN"):
        find_model("latest", tmp_path / "outputs")


def test_a_model_outside_of_any_run_is_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "somewhere")
    with pytest.raises(RequestError, match=f"{model} is a model, but lies in no run folder"):
        find_model(str(model), tmp_path / "outputs")


def test_the_workers_arguments() -> None:
    assert worker_command(Path("/run"), "after", model=Path("/m"), tasks=["a", "b.yaml"], limit=7) == [
        *(sys.executable, "-m", "tunebook.evaluate", "--run", "/run", "--when", "after"),
        *("--model", "/m", "--task", "a", "--task", "b.yaml", "--limit", "7"),
    ]


def test_a_suite_is_handed_to_the_worker() -> None:
    assert worker_command(Path("/run"), "after", suite="quick")[-2:] == ["--suite", "quick"]


def test_a_suite_and_tasks_are_one_answer_too_many(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="suite=quick and tasks=a,b are two answers") as raised:
        evaluate_command("latest", tmp_path, suite="quick", tasks=["a", "b"])
    assert raised.value.problem_id == "suite-and-tasks"


def test_a_run_without_tasks_of_its_own_is_told_before_anything_is_loaded(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(run / "model")
    config = compose("zero1_lora", []).config
    monkeypatch.setattr(command, "load_config", lambda _: config)
    with pytest.raises(RequestError, match=r"names no tasks of its own.*suite=leaderboard") as raised:
        evaluate_command("latest", tmp_path / "outputs")
    assert raised.value.problem_id == "no-tasks"


def test_nothing_is_evaluated_in_an_image_that_cannot_run_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBOOK_IMAGE_FILE", str(tmp_path / "image.json"))
    with pytest.raises(RequestError, match="make image"):
        evaluate_command(str(run), tmp_path / "outputs")


def test_what_is_evaluated_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_folder(run / "model")
    find_model("latest", tmp_path / "outputs")
    assert capsys.readouterr() == ("", f"the newest finished run: {run}\n")


def test_a_failed_worker_hands_on_its_exit_code(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(run / "model")
    monkeypatch.setattr(command, "worker_command", lambda *_, **__: [sys.executable, "-c", "raise SystemExit(4)"])
    monkeypatch.setattr(command, "load_config", lambda _: None)  # it has no tasks, and none are looked for
    monkeypatch.setattr(command, "rank_environment", lambda _, inherited: dict(inherited))
    with pytest.raises(TunebookError, match="its message is above") as raised:
        evaluate_command("latest", tmp_path / "outputs", tasks=["book:recipes/quickstart/tasks/quickstart.yaml"])
    assert raised.value.exit_code == 4


def record(when: str, value: float, **more: Any) -> dict[str, Any]:
    task = {
        "metric": "exact_match", "value": value, "stderr": 0.025, "num_items": 8, "higher_is_better": True,
        "groups": {"reverse": {"value": value, "num_items": 4}},
    }  # fmt: skip
    return {"when": when, "tasks": {"words": task | more}, "baseline": {"name": "look-up", "value": 0.08}}


def shown(*records: dict[str, Any]) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(score_table(list(records)))
    return capture.get()


def test_the_table_shows_scores_with_errors_groups_and_the_baseline() -> None:
    text = shown(record("before", 0.0), record("after", 0.9375))
    words = next(line for line in text.splitlines() if "words (exact_match)" in line)
    assert "0.0% ± 2.5" in words
    assert "93.8% ± 2.5" in words
    assert [line for line in text.splitlines() if "reverse" in line and "93.8%" in line]
    assert [line for line in text.splitlines() if "baseline: look-up" in line and "8.0%" in line]


def test_a_perplexity_is_no_percentage() -> None:
    assert "12.35" in shown(record("after", 12.3456, higher_is_better=False, groups={}))
