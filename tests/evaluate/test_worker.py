"""The process of one evaluation."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.evaluate.conftest import QUICKSTART, cpu_run
from tunebook.config.choices import Contamination, Weights
from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import EvaluationConfig, ModelConfig, RunConfig
from tunebook.evaluate import __main__ as program
from tunebook.evaluate import worker
from tunebook.model.load import load_model
from tunebook.record.manifest import system_prompt_hash

pytestmark = pytest.mark.usefixtures("quiet_harness")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of the quickstart that nothing has been trained in; 8 items are evaluated."""
    evaluation = EvaluationConfig(tasks=[QUICKSTART], limit=8, contamination=Contamination.disabled)
    (tmp_path / "run.yaml").write_text(config_to_yaml(cpu_run(evaluation=evaluation)))
    return tmp_path


def record(run: Path, when: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "evaluation" / f"{when}.json").read_text())
    return content


def write_manifest(run: Path, **changes: Any) -> None:
    manifest = {
        "format": 1, "config_sha256": "c", "tokenizer_sha256": None, "chat_template_sha256": None,
        "system_prompt_sha256": system_prompt_hash(None), "model": {"weights_fingerprint": None},
    }  # fmt: skip
    (run / "manifest.json").write_text(json.dumps(manifest | changes))


def test_the_same_weights_give_the_same_scores_before_and_after(
    run: Path, cpu_config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert worker.main(["--run", str(run), "--when", "before"]) == 0
    before = record(run, "before")
    assert before["model"] == "book:recipes/quickstart/model (random weights)"
    task = before["tasks"]["quickstart"]
    assert (task["metric"], task["num_items"], task["value"]) == ("exact_match", 8, 0.0)
    assert sum(group["num_items"] for group in task["groups"].values()) == 8
    for part in (load_model(cpu_config), tokenizer):
        part.save_pretrained(run / "model")
    assert worker.main(["--run", str(run), "--when", "after"]) == 0
    after = record(run, "after")
    assert after["model"] == "model"
    assert {**after, "when": 0, "model": 0, "seconds": 0} == {**before, "when": 0, "model": 0, "seconds": 0}


def test_a_run_without_a_trained_model_or_with_a_changed_template_is_refused(run: Path) -> None:
    assert worker.main(["--run", str(run), "--when", "after"]) == 2
    write_manifest(run, chat_template_sha256="0" * 64)
    assert worker.main(["--run", str(run), "--when", "before"]) == 4


def test_other_base_weights_are_refused_unless_nothing_of_them_is_left(
    run: Path, known_folder: Path, task_file: Callable[[str], Path]
) -> None:
    evaluation = EvaluationConfig(tasks=[str(task_file("choice"))], contamination=Contamination.disabled)
    model = ModelConfig(path=str(known_folder), weights=Weights.pretrained)
    (run / "run.yaml").write_text(config_to_yaml(cpu_run(model=model, evaluation=evaluation)))
    write_manifest(run, model={"weights_fingerprint": "1" * 64})
    assert worker.main(["--run", str(run), "--when", "before"]) == 4
    shutil.copytree(known_folder, run / "model")  # trained whole: nothing of the base is left in it
    assert worker.main(["--run", str(run), "--when", "after"]) == 0


def test_a_stop_request_ends_it_with_the_code_of_a_stopped_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "evaluate", lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr("sys.argv", ["evaluate", "--run", str(run), "--when", "before"])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert program.main() == 6
    finally:
        signal.signal(signal.SIGTERM, handler)
