"""Real harness runs of every kind of request, against a model whose every probability is known."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.evaluate import worker
from tunebook.evaluate.request_model import RequestModel

pytestmark = pytest.mark.usefixtures("quiet_harness")

TaskFile = Callable[[str], Path]
KnownRun = Callable[..., Path]
# By hand, from the table in conftest.py. What follows a word greedily is its likeliest: a b c d </s>.
BY_HAND = {
    "next_word": ("acc", 0.5),  # b after a, b c after c a; but neither d after b nor a after d
    "choice": ("acc", 2 / 3),  # the third one's right answer has a quarter of the likeliest one's probability
    "continuation": ("exact_match", 0.75),  # after d it ends at once
    "whole_text": ("word_perplexity", 2.0),  # each of the 6 words has 1/2
}


def record(run: Path, when: str = "before") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluation" / f"{when}.json").read_text())
    return found


def evaluate(run: Path, *words: str, when: str = "before") -> int:
    return worker.main(["--run", str(run), "--when", when, *words])


def scores(run: Path, when: str = "before") -> dict[str, tuple[str, float]]:
    return {name: (task["metric"], task["value"]) for name, task in record(run, when)["tasks"].items()}


def answers(run: Path, when: str = "before") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluation" / f"{when}-answers.jsonl").read_text().splitlines()]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tasks whose requests a model has answered."""
    names: list[str] = []
    original = RequestModel._compute

    def compute(self: RequestModel, kind: str, requests: Any) -> list[Any]:
        names.append(requests[0].task_name)
        return original(self, kind, requests)

    monkeypatch.setattr(RequestModel, "_compute", compute)
    return names


def test_every_kind_of_request_is_scored_as_by_hand(task_file: TaskFile, known_run: KnownRun) -> None:
    run = known_run([task_file(name) for name in BY_HAND], batch_size=3)
    assert evaluate(run) == 0
    found = scores(run)
    assert {name: metric for name, (metric, _) in found.items()} == {name: by[0] for name, by in BY_HAND.items()}
    assert [found[name][1] for name in BY_HAND] == pytest.approx([value for _, value in BY_HAND.values()], rel=1e-5)
    # 1 1 0 0: a standard deviation of sqrt(1/3), over sqrt(4)
    assert record(run)["tasks"]["next_word"]["stderr"] == pytest.approx((1 / 3) ** 0.5 / 2)
    by_item = {(answer["task"], answer["item"]): answer for answer in answers(run)}
    assert by_item["continuation", 0]["responses"] == ["bcd"]
    assert by_item["choice", 2]["answer"] == "d"
    # ln 1/2 + ln 1/2 of the two words
    assert by_item["next_word", 1]["responses"] == pytest.approx([-1.386294], rel=1e-5)


def test_kept_answers_are_used_by_the_next_evaluation(
    task_file: TaskFile, known_run: KnownRun, computed: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    files = [task_file(name) for name in BY_HAND]
    assert evaluate(known_run(files[:2])) == 0
    run = known_run(files)
    assert evaluate(run, when="again") == 0
    assert computed == list(BY_HAND)
    assert "kept answers were used for next_word, choice; --fresh" in capfd.readouterr().err
    assert record(run, "again")["reused"] == ["next_word", "choice"]
    assert evaluate(run, when="once_more") == 0
    assert computed == list(BY_HAND)
    assert scores(run, "once_more") == scores(run, "again")
    assert answers(run, "once_more") == answers(run, "again")
    assert evaluate(run, "--fresh", when="fresh") == 0
    assert len(computed) == 8
    assert answers(run, "fresh") == answers(run, "again")


def test_the_size_of_a_batch_decides_no_answer(task_file: TaskFile, known_run: KnownRun, computed: list[str]) -> None:
    run = known_run([task_file("choice")])
    config = load_config(run / "run.yaml")
    counts = []
    for change in ({}, {"batch_size": 1}, {"limit": 2}, {"num_fewshot": 1}):
        changed = replace(config, evaluation=replace(config.evaluation, **change))
        (run / "run.yaml").write_text(config_to_yaml(changed))
        assert evaluate(run) == 0
        counts.append(len(computed))
    assert counts == [1, 1, 2, 3]


def change_data(run: Path) -> None:
    file = run.parent / "tasks" / "choice.jsonl"
    file.write_text(file.read_text().replace('"text": "c"', '"text": "d"'))


def change_task(run: Path) -> None:
    file = run.parent / "tasks" / "choice.yaml"
    file.write_text(file.read_text().replace("{{text}}", "{{text}} a"))


def change_weights(run: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = run.parent / "known" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] += 1
    save_file(weights, file, metadata={"format": "pt"})


def change_settings(run: Path) -> None:
    file = run.parent / "known" / "generation_config.json"
    file.write_text(file.read_text().replace('"eos_token_id": 1', '"eos_token_id": [1, 0]'))


def change_tokenizer(run: Path) -> None:
    file = run.parent / "known" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}))


@pytest.mark.parametrize("change", [change_data, change_task, change_weights, change_settings, change_tokenizer])
def test_what_decides_an_answer_has_it_computed_again(
    task_file: TaskFile, known_run: KnownRun, computed: list[str], change: Callable[[Path], None]
) -> None:
    run = known_run([task_file("choice")])
    assert evaluate(run) == 0
    change(run)
    assert evaluate(run) == 0
    assert len(computed) == 2


def test_a_failing_task_costs_no_other(
    task_file: TaskFile, known_run: KnownRun, computed: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    broken = task_file("choice")
    broken.write_text(broken.read_text() + "process_results: !function scoring.score\n")
    scoring = broken.with_name("scoring.py")
    scoring.write_text("def score(doc, results):\n    raise ValueError('no score for this')\n")
    run = known_run([task_file("next_word"), broken, task_file("continuation")])
    assert evaluate(run) == 1
    assert "evaluation: 1 of 3 tasks failed: choice (ValueError: no score for this)" in capfd.readouterr().err
    assert scores(run) == {"next_word": ("acc", 0.5), "continuation": ("exact_match", 0.75)}
    assert list(record(run)["failed"]) == ["choice"]
    scoring.write_text("def score(doc, results):\n    return {'acc': 1}\n")
    assert evaluate(run) == 0
    assert computed == ["next_word", "choice", "continuation"]  # its answers were kept before they were scored
    assert record(run)["failed"] == {}
    assert list(scores(run)) == ["next_word", "choice", "continuation"]


def test_a_single_task_that_fails_ends_with_its_own_error(
    task_file: TaskFile, known_run: KnownRun, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    run = known_run([task_file("whole_text")])
    file = run.parent / "known" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    assert evaluate(run) == 1
    assert "evaluation: the word_perplexity of whole_text is nan: most likely" in capfd.readouterr().err
    assert not (run / "evaluation" / "before.json").exists()


def test_a_full_disk_ends_it_at_once_and_is_no_tasks_fault(
    task_file: TaskFile, known_run: KnownRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = known_run([task_file("next_word"), task_file("choice")])
    for place in ("harness._task_settings", "request_model.atomic_write_text", "evaluation.atomic_write_json"):
        with monkeypatch.context() as full:
            full.setattr(f"tunebook.evaluate.{place}", fill)
            assert evaluate(run) == 3
        assert "evaluation: a disk is full" in capfd.readouterr().err
    assert evaluate(run) == 0


def test_a_task_without_data_is_named_at_the_start_and_the_others_run(
    task_file: TaskFile, known_run: KnownRun, computed: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    missing = task_file("next_word")
    run = known_run([missing, task_file("choice")])
    (missing.parent / "next_word.jsonl").unlink()
    assert evaluate(run) == 2
    assert computed == ["choice"]
    said = capfd.readouterr().err
    named, ended = (said.index(text) for text in ("left out: the data of task", "before: choice: 3 items"))
    assert named < ended
    assert "1 of 2 tasks failed: next_word (the data of task" in said
    assert scores(run) == {"choice": ("acc", pytest.approx(2 / 3))}


def test_a_group_is_what_the_harness_makes_of_it_and_is_resumed_task_by_task(
    task_file: TaskFile, known_run: KnownRun, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = [task_file(name) for name in ("choice", "second", "both")][-1]
    run = known_run([file], batch_size=1)
    counted = RequestModel._compute

    def stop_at_second(self: RequestModel, kind: str, requests: Any) -> list[Any]:
        if requests[0].task_name == "second":
            raise KeyboardInterrupt
        return counted(self, kind, requests)

    with monkeypatch.context() as killed:
        killed.setattr(RequestModel, "_compute", stop_at_second)
        with pytest.raises(KeyboardInterrupt):
            evaluate(run)
    assert not (run / "evaluation" / "before.json").exists()
    assert evaluate(run) == 0
    assert computed == ["choice", "second"]
    found = record(run)["tasks"]
    assert list(found) == ["both", "choice", "second"]
    # 2 of 3 and 5 of 5, each item counting as much as any other
    assert (found["both"]["value"], found["both"]["num_items"]) == (0.875, 8)
    assert found["both"]["subtasks"] == ["choice", "second"]
    expected = of_the_harness_itself(file, run)
    assert found["both"]["value"] == expected["acc,none"]
    assert found["both"]["stderr"] == pytest.approx(expected["acc_stderr,none"], rel=1e-12)


def of_the_harness_itself(file: Path, run: Path) -> dict[str, Any]:
    """What the harness says of a group without any of this."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.parent / "known"
    model = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        batch_size=1,
    )
    manager = TaskManager(include_path=str(file.parent), include_defaults=False)
    results = simple_evaluate(model=model, tasks=["both"], task_manager=manager)
    return dict(results["results"]["both"])
