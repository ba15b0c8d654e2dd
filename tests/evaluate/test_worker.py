"""The process of one evaluation."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tunebook.config.choices import Attention, Compute, Generation, PackingMode, Weights
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import RunConfig
from tunebook.data.template import template_hash
from tunebook.errors import DataError
from tunebook.evaluate import __main__ as program
from tunebook.evaluate import worker
from tunebook.evaluate.evaluation import Evaluation, _bound_tokenizer, score_first_baseline
from tunebook.evaluate.task_files import resolve_task
from tunebook.model.load import load_model
from tunebook.record.contamination import CHECK
from tunebook.record.manifest import system_prompt_hash
from tunebook.record.model_origin import Origin

pytestmark = pytest.mark.usefixtures("quiet_harness")


@pytest.fixture(autouse=True)
def sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """The quickstart, resolved for a CPU."""
    config = compose("quickstart", ["training.seed=3"]).config
    config.attention.implementation = Attention.sdpa
    config.precision.compute = Compute.fp32
    config.packing.mode = PackingMode.isolated
    config.hardware.generation = Generation.cpu
    return config


@pytest.fixture
def run(tmp_path: Path, config: RunConfig) -> Path:
    """A run folder that nothing has been trained in."""
    (tmp_path / "run.yaml").write_text(config_to_yaml(config))
    return tmp_path


def record(run: Path, when: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluation" / f"{when}.json").read_text())
    return found


@pytest.mark.slow
def test_an_untrained_model_is_evaluated_before_and_the_same_weights_give_the_same_after(
    run: Path, config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    limited = replace(config, evaluation=replace(config.evaluation, limit=40))
    (run / "run.yaml").write_text(config_to_yaml(limited))
    assert worker.main(["--run", str(run), "--when", "before"]) == 0
    before = record(run, "before")
    assert {key: before[key] for key in ("when", "model", "limit", "device", "harness_version")} == {
        "when": "before",
        "model": "book:recipes/quickstart/model (random weights)",
        "limit": 40,
        "device": "cpu",
        "harness_version": "0.4.13",
    }
    task = before["tasks"]["quickstart"]
    assert (task["metric"], task["num_items"], task["value"]) == ("exact_match", 40, 0.0)
    assert sum(group["num_items"] for group in task["groups"].values()) == 40
    assert len(before["samples"]) == 5
    assert before["baseline"] is None  # it answers every item, so it is not comparable under a limit
    assert len((run / "evaluation" / "before-answers.jsonl").read_text().splitlines()) == 40

    for part in (load_model(config), tokenizer):
        part.save_pretrained(run / "model")
    assert worker.main(["--run", str(run), "--when", "after"]) == 0
    after = record(run, "after")
    assert after["model"] == "model"
    assert {**after, "when": 0, "model": 0, "seconds": 0} == {**before, "when": 0, "model": 0, "seconds": 0}


def test_the_quickstarts_baseline_is_scored_on_all_items(run: Path, config: RunConfig) -> None:
    task = resolve_task("book:recipes/quickstart/tasks/quickstart.yaml")
    whole = Evaluation(run=run, when="before", config=config, model=None, tasks=[task])
    found = score_first_baseline(whole)
    assert found is not None
    assert found["name"] == "look-up of the nearest training prompt"
    assert 0 < found["value"] < 0.5
    other_data = replace(config.dataset, path=None)
    assert score_first_baseline(replace(whole, config=replace(config, dataset=other_data))) is None
    limited = replace(config, evaluation=replace(config.evaluation, limit=40))
    assert score_first_baseline(replace(whole, config=limited)) is None


def test_a_run_without_a_trained_model_has_no_after(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert worker.main(["--run", str(run), "--when", "after"]) == 2
    assert f"there is no model in {run / 'model'}" in capsys.readouterr().err


def test_a_changed_template_is_an_error(
    run: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = {
        "format": 1, "config_sha256": "c", "tokenizer_sha256": None, "chat_template_sha256": "0" * 64,
        "system_prompt_sha256": system_prompt_hash(None), "model": {"weights_fingerprint": None},
    }  # fmt: skip
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert template_hash(tokenizer) != manifest["chat_template_sha256"]
    assert worker.main(["--run", str(run), "--when", "before"]) == 4
    assert "the chat template is not the one that" in capsys.readouterr().err


def test_ctrl_c_ends_with_the_code_of_a_stopped_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(worker, "evaluate", stop)
    monkeypatch.setattr("sys.argv", ["evaluate", "--run", str(run), "--when", "before"])
    assert program.main() == 6
    assert "stopped" in capsys.readouterr().err
    monkeypatch.setattr(worker, "main", stop)
    monkeypatch.setattr("sys.argv", ["evaluate", "--run", str(run), "--when", CHECK])
    assert program.main() == 6
    assert capsys.readouterr().err == "", "a check that a failed training ends keeps no tasks"


def test_other_weights_than_the_run_started_from_are_an_error_unless_they_are_named(
    run: Path, config: RunConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    tokenizer.save_pretrained(base)
    (base / "pytorch_model.bin").write_bytes(b"other weights")
    model = replace(config.model, path=str(base), weights=Weights.pretrained)
    trained = Origin(
        run="tiny/now", recipe=None, config_sha256="c", tokenizer_sha256=None, chat_template_sha256=None,
        system_prompt=None, system_prompt_sha256=system_prompt_hash(None), weights_fingerprint="1" * 64,
    )  # fmt: skip
    asked = Evaluation(
        run=run, when="before", config=replace(config, model=model), model=None, tasks=["t"],
        trained=trained,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"have the fingerprint .*, and the run started from 111111111111"):
        _bound_tokenizer(asked)
    assert _bound_tokenizer(replace(asked, allowed=("base",)))[1]["mismatches"] == ["base"]
    whole = replace(asked, model=base)  # trained whole: nothing of the base is left in it
    assert _bound_tokenizer(whole)[1]["mismatches"] == []
