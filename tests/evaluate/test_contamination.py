"""Evaluation items in training documents: what counts as which kind, and the whole check on files and tasks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.evaluate.conftest import cpu_run
from tunebook.config.choices import Contamination
from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import DatasetConfig, EvaluationConfig, RunConfig
from tunebook.evaluate import worker
from tunebook.evaluate.contamination import (
    Question,
    check_evaluated,
    conversation_questions,
    loaded_questions,
    search,
    with_scores,
    words_of,
)
from tunebook.evaluate.harness import LoadedTask, load_tasks
from tunebook.evaluate.results import Answer
from tunebook.evaluate.task_files import Task, read_task_file
from tunebook.record.contamination import KINDS, is_checked

MakeRun = Callable[..., tuple[Path, RunConfig]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The CAT's  state-of-the-art,\n\thas_close()!", "the cat s state of the art has close"),
        ("\ufb01ne \uff21\uff22\uff23 \u2460 Stra\u00dfe", "fine abc 1 stra\u00dfe"),
        ("\u5317\u4eac\u662f 3.5 ok", "\u5317 \u4eac \u662f 3 5 ok"),
    ],
)  # fmt: skip
def test_words_are_without_case_punctuation_and_white_space(text: str, words: str) -> None:
    assert " ".join(words_of(text)) == words


def words(start: int, number: int) -> str:
    """Words that no other call has, unless it names the same numbers."""
    return " ".join(f"w{place}" for place in range(start, start + number))


def search_in(questions: Sequence[Question], documents: Sequence[Sequence[str]]) -> dict[str, Any]:
    origins = ((f"train.jsonl:{number}", texts) for number, texts in enumerate(documents, 1))
    return search({"task": questions}, origins)["task"]


def kinds(questions: Sequence[Question], *documents: Sequence[str]) -> list[str]:
    """The kind of each item after a search."""
    items = search_in(questions, documents)["items"]
    return [next((kind for kind in KINDS if number in items[kind]), "clean") for number in range(len(questions))]


def test_a_whole_question_or_a_part_is_found_with_its_document() -> None:
    question = (words(0, 30),)
    document = [f"Q) {words(0, 30).upper().replace(' ', ', ')}!? Say yes."]
    assert kinds([question], ["nothing of it"], document) == ["exact"]
    result = search_in([question], [["x"], ["y"], [words(5, 14) + " and other words"]])
    assert result["items"] == {"exact": [], "overlapping": [0], "shared_passage": []}
    assert [example["document"] for example in result["examples"]] == ["train.jsonl:3"]
    assert kinds([question], [words(5, 12)]) == ["clean"]


def test_a_shared_passage_is_no_whole_question_but_passage_and_question_are() -> None:
    passage = words(0, 40)
    questions = [(passage, f"is it number {name}") for name in ("one", "two")]
    assert kinds(questions, [f"Number one: is it number one?\n\n{passage}", "Yes"]) == ["exact", "shared_passage"]
    apart = kinds(questions, [passage], ["is it number two"])
    assert apart == ["shared_passage", "shared_passage"], "both must be in one document"


def test_words_are_not_consecutive_over_turns_or_documents() -> None:
    assert kinds([(words(0, 20),)], [words(0, 10), words(10, 10)], [words(0, 12)], [words(12, 8)]) == ["clean"]


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (["What is the capital of France?", "It is Paris."], "exact"),
        (["Tell me: what is the capital of France? It is Paris."], "clean"),
        (["What is the capital of France and why?", "Paris"], "clean"),
    ],
)
def test_a_short_question_needs_a_turn_of_its_own(document: list[str], kind: str) -> None:
    assert kinds([("What is the capital of France?",)], document) == [kind]
    longer = "Do Iran and Afghanistan speak the same language?"
    assert kinds([(longer,)], ["x"], [f"Question: {longer.lower()}\nAnswer: no"]) == ["exact"]


def test_text_of_many_items_is_ignored_and_the_items_are_still_found() -> None:
    """An instruction of 20 words before every question, as a prompt template."""
    questions = [(f"{words(0, 20)} {words(100 * n + 100, 20)}",) for n in range(30)]
    documents = [words(0, 20)], [f"{words(0, 20)} {words(300, 20)}"]
    assert kinds(questions, *documents) == ["clean"] * 2 + ["exact"] + ["clean"] * 27
    assert kinds(questions[:3], [words(0, 20)]) == ["clean"] * 3, "in a small task half of the items is many"


def test_nothing_to_look_for_and_nothing_to_look_in() -> None:
    assert search({}, [("train.jsonl:1", ["a text"])]) == {}
    assert kinds([("",), ()], ["", "a text"], []) == ["clean", "clean"]
    assert kinds([(words(0, 20),)]) == ["clean"]


class HarnessTask:
    """A task as far as its items are read; `text` is a template with {field}."""

    def __init__(self, docs: list[dict[str, Any]], text: str) -> None:
        self.docs, self.text = docs, text

    def doc_iterator(self, *, rank: int, limit: int | None, world_size: int) -> Any:
        return enumerate(self.docs[:limit])

    def doc_to_text(self, doc: dict[str, Any]) -> str:
        return self.text.format(**doc)


def questions_of(task: Any) -> list[Question]:
    loaded = LoadedTask(source=Task(name="task"), content={"tasks": {"task": task}})
    return loaded_questions([loaded], cpu_run())["task"]


def test_the_fields_of_the_prompt_are_the_question() -> None:
    passage = "A passage about a king of old days"
    docs = [{"passage": passage, "question": text, "idx": 3} for text in ("was the king old", "is it a king")]
    task = HarnessTask(docs, "{passage}\nQuestion: {question}?\nAnswer:")
    assert questions_of(task) == [(passage, "was the king old"), (passage, "is it a king")]
    # Neither the choices nor a short subject belong to it.
    docs = [{"question": "Which planet is the largest of all?", "subject": "space", "choices": ["Mars", "Jupiter"]}]
    task = HarnessTask(docs, "About {subject}: {question}\nA. {choices[0]}\nB. {choices[1]}")
    assert questions_of(task) == [("Which planet is the largest of all?",)]


def test_a_prompt_without_a_field_is_the_question_and_without_a_prompt_all_fields_are() -> None:
    numbers = HarnessTask([{"numbers": [3, 4]}], "what is {numbers[0]} and {numbers[1]}")
    assert questions_of(numbers) == [("what is 3 and 4",)]
    unreadable = HarnessTask([{"page": "some text to be read", "id": "7"}], "{missing}")
    assert questions_of(unreadable) == [("some text to be read",)]


def test_conversations_are_numbered_as_the_harness_does(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "One?"), ("assistant", "Yes."), ("user", "Two?"), ("assistant", "No.")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns[start:]]} for start in (0, 3)]
    file = tmp_path / "held.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert conversation_questions(file, cpu_run()) == [("One?", "Two?"), ("Two?",)]
    assert conversation_questions(file, cpu_run(evaluation=EvaluationConfig(limit=1))) == [("One?", "Two?")]


def test_each_kind_of_item_has_its_mean_and_error() -> None:
    answers = [
        Answer(task="t", group=None, prompt="", answer="", expected="", value=value, correct=None, item=number)
        for number, value in enumerate([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    ]
    third = {"value": pytest.approx(1 / 3), "stderr": pytest.approx(math.sqrt(1 / 3) / math.sqrt(3)), "num_items": 3}
    scores = {
        "clean": third,
        "exact": {"value": 1.0, "stderr": 0.0, "num_items": 2},
        "shared_passage": {"value": 0.0, "stderr": None, "num_items": 1},
    }
    items: dict[str, list[int]] = {"exact": [2, 3], "overlapping": [], "shared_passage": [5]}
    result = {"not_checked": None, "groups": {"t": {"items": items, "num_items": 6}}}
    scored = with_scores(result, {"t": answers}, {"t": {"value": 0.5}})
    assert scored == {"not_checked": None, "tasks": {"t": {"num_items": 6, "scores": scores}}}


TASK = """\
task: passages
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/dev.jsonl}}, cache_dir: {folder}/cache}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{passage}}}}\\nQuestion: {{{{question}}}}?\\nAnswer:"
doc_to_target: label
doc_to_choice: ["no", "yes"]
metric_list:
  - metric: acc
metadata: {{version: 1.0}}
"""


def question(passage: int, number: int) -> dict[str, Any]:
    """A question about a passage, in the form of BoolQ."""
    return {"passage": words(100 * passage, 60), "question": f"is {words(10**6 + 10 * number, 5)}", "label": 0}


TRAIN = [question(number, number) for number in range(50)]
DEV = [question(number if number < 4 else 100 + number, 1000 + number) for number in range(20)]  # 4 passages of TRAIN


@pytest.fixture
def task(tmp_path: Path, quiet_harness: None) -> Path:
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DEV))
    (tmp_path / "passages.yaml").write_text(TASK.format(folder=tmp_path))
    return tmp_path / "passages.yaml"


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """`make_run(TRAIN, [task], limit=3)`: a run folder that trains on these questions, and its configuration."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))

    def make(
        questions: Iterable[dict[str, Any]], tasks: Iterable[Path] = (), share: float = 0.0, **settings: Any
    ) -> tuple[Path, RunConfig]:
        # In another order and with other words around them than the task's.
        texts = [f"{row['question']}?\n\nRead this first: {row['passage'].upper()}" for row in questions]
        file = tmp_path / "train.jsonl"
        turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "No."}] for text in texts]
        file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
        evaluation = EvaluationConfig(tasks=[str(task) for task in tasks], **settings)
        config = cpu_run(dataset=DatasetConfig(path=str(file), validation_share=share), evaluation=evaluation)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run.yaml").write_text(config_to_yaml(config))
        return tmp_path / "run", config

    return make


def check(run: Path) -> dict[str, Any]:
    assert worker.main(["--run", str(run), "--when", "contamination"]) == 0
    content: dict[str, Any] = json.loads((run / "contamination.json").read_text())
    return content


def counts(group: dict[str, Any]) -> list[int]:
    return [group[f"num_{kind}"] for kind in (*KINDS, "clean")]


def test_documents_that_hold_the_questions(task: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run, config = make_run([*TRAIN, *DEV], [task])
    group = check(run)["groups"]["passages"]
    assert counts(group) == [20, 0, 0, 0]
    assert group["items"]["exact"] == list(range(20))
    first = group["examples"][0]
    assert (first["item"], first["document"], first["kind"]) == (0, "train.jsonl:51", "exact")
    assert first["text"].startswith(DEV[0]["question"])
    assert "warning: contamination: passages: " in capsys.readouterr().err
    assert is_checked(run, config)
    assert not is_checked(run, replace(config, evaluation=replace(config.evaluation, limit=20)))
    assert list((run.parent / "cache").glob("contamination*")) == [], "temporary files are removed"


def test_documents_that_share_only_passages(task: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    content = check(make_run(TRAIN, [task])[0])
    assert counts(content["groups"]["passages"]) == [0, 0, 4, 16]
    assert content["num_documents"] == 50
    assert "warning" not in capsys.readouterr().err


def test_a_validation_part_by_share_is_compared_with_the_training_part(make_run: MakeRun) -> None:
    """Equal documents are in one part; documents that differ in white space may be in both."""
    spaced = [{**row, "passage": row["passage"].replace(" ", "  ")} for row in TRAIN]
    group = check(make_run([*TRAIN, *spaced], share=0.1)[0])["groups"]["validation part"]
    assert group["num_items"] > 4
    assert group["num_exact"] > 0.6 * group["num_items"]
    assert group["num_exact"] + group["num_clean"] == group["num_items"]


def test_missing_or_changed_documents_are_reported(task: Path, make_run: MakeRun) -> None:
    run, config = make_run(TRAIN, [task])
    file = Path(str(config.dataset.path))
    records = [{"location": str(file), "sha256": "0" * 64, "revision": None}]
    hashes = dict.fromkeys(("config_sha256", "tokenizer_sha256", "chat_template_sha256", "system_prompt_sha256"))
    manifest = {"format": 1, **hashes, "model": {"weights_fingerprint": None}, "dataset": {"records": records}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "changed after the training" in check(run)["not_checked"]
    file.unlink()
    content = check(run)
    assert "train.jsonl" in content["not_checked"]
    assert content["groups"] == {}
    assert not is_checked(run, config)


def test_an_evaluation_searches_only_for_items_that_no_check_searched_for(task: Path, make_run: MakeRun) -> None:
    run, config = make_run(DEV[:9])
    loaded = load_tasks([read_task_file(task)], run)
    searched = check_evaluated(run, config, loaded)
    assert searched is not None and counts(searched["groups"]["passages"]) == [9, 0, 0, 11]
    config.evaluation.tasks, config.evaluation.after = [str(task)], True
    (run / "run.yaml").write_text(config_to_yaml(config))
    check(run)
    Path(str(config.dataset.path)).unlink()
    known = check_evaluated(run, config, loaded)
    assert known is not None and known["groups"] == searched["groups"]
    config.evaluation.limit = 10
    fewer = check_evaluated(run, config, loaded)
    assert fewer is not None and "train.jsonl" in fewer["not_checked"]
    config.evaluation.contamination = Contamination.disabled
    assert check_evaluated(run, config, loaded) is None
