"""Evaluation items in training documents: what counts as which kind, and the whole check on files and tasks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Contamination
from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import DatasetConfig, EvaluationConfig, RunConfig
from tunebook.errors import DataError
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
from tunebook.evaluate.harness import LoadedTask
from tunebook.evaluate.results import Answer
from tunebook.evaluate.task_files import Task
from tunebook.record.contamination import KINDS, is_checked, refuse_contaminated

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


def kinds(questions: Sequence[Question], documents: Sequence[Sequence[str]]) -> list[str]:
    """The kind of each item after a search."""
    result = search_in(questions, documents)
    found = {number: kind for kind in KINDS for number in result["items"][kind]}
    return [found.get(number, "clean") for number in range(len(questions))]


def test_a_whole_question_is_found_in_any_template_and_case() -> None:
    document = [f"Q) {words(0, 30).upper().replace(' ', ', ')}!? Say yes."]
    assert kinds([(words(0, 30),)], [["nothing of it"], document]) == ["exact"]


def test_a_part_is_found_with_its_document() -> None:
    result = search_in([(words(0, 30),)], [["x"], ["y"], [words(5, 14) + " and other words"]])
    assert result["items"] == {"exact": [], "overlapping": [0], "shared_passage": []}
    assert [example["document"] for example in result["examples"]] == ["train.jsonl:3"]
    assert kinds([(words(0, 30),)], [[words(5, 12)]]) == ["clean"]


def test_a_shared_passage_is_no_whole_question_but_passage_and_question_are() -> None:
    passage = words(0, 40)
    questions = [(passage, f"is it number {name}") for name in ("one", "two")]
    assert kinds(questions, [[f"Number one: is it number one?\n\n{passage}", "Yes"]]) == ["exact", "shared_passage"]
    apart = kinds(questions, [[passage], ["is it number two"]])
    assert apart == ["shared_passage", "shared_passage"], "both must be in one document"


def test_the_words_of_two_turns_or_two_documents_are_no_run() -> None:
    assert kinds([(words(0, 20),)], [[words(0, 10), words(10, 10)], [words(0, 12)], [words(12, 8)]]) == ["clean"]


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (["What is the capital of France?", "It is Paris."], "exact"),
        (["Tell me: what is the capital of France? It is Paris."], "clean"),
        (["What is the capital of France and why?", "Paris"], "clean"),
    ],
)
def test_a_short_question_needs_a_turn_of_its_own(document: list[str], kind: str) -> None:
    assert kinds([("What is the capital of France?",)], [document]) == [kind]
    longer = "Do Iran and Afghanistan speak the same language?"
    assert kinds([(longer,)], [["x"], [f"Question: {longer.lower()}\nAnswer: no"]]) == ["exact"]


def test_text_of_many_items_is_ignored_and_the_items_are_still_found() -> None:
    """An instruction of 20 words before every question, as a prompt template."""
    questions = [(f"{words(0, 20)} {words(100 * n + 100, 20)}",) for n in range(30)]
    documents = [[words(0, 20)], [f"{words(0, 20)} {words(300, 20)}"]]
    assert kinds(questions, documents) == ["clean"] * 2 + ["exact"] + ["clean"] * 27
    assert kinds(questions[:3], [[words(0, 20)]]) == ["clean"] * 3, "in a small task half of the items is many"


def test_nothing_to_look_for_and_nothing_to_look_in() -> None:
    assert search({}, [("train.jsonl:1", ["a text"])]) == {}
    assert kinds([("",), ()], [["", "a text"], []]) == ["clean", "clean"]
    assert kinds([(words(0, 20),)], []) == ["clean"]


class HarnessTask:
    """A task as far as its items are read; `text` is a template with {field}, or a function."""

    def __init__(self, docs: list[dict[str, Any]], text: Any) -> None:
        self.docs, self.text = docs, text

    def doc_iterator(self, *, rank: int, limit: int | None, world_size: int) -> Any:
        return enumerate(self.docs[:limit])

    def doc_to_text(self, doc: dict[str, Any]) -> Any:
        return self.text.format(**doc) if isinstance(self.text, str) else self.text(doc)


def questions_of(task: Any, limit: int | None = None) -> list[Question]:
    loaded = LoadedTask(source=Task(name="task"), content={"tasks": {"task": task}})
    return loaded_questions([loaded], limit)["task"]


def test_a_passage_and_its_question_are_apart_from_their_template() -> None:
    passage = "A passage about a king of old days"
    docs = [{"passage": passage, "question": text, "idx": 3} for text in ("was the king old", "is it a king")]
    task = HarnessTask(docs, "{passage}\nQuestion: {question}?\nAnswer:")
    assert questions_of(task) == [(passage, "was the king old"), (passage, "is it a king")]
    assert len(questions_of(task, 1)) == 1


def test_choices_are_no_part_of_the_question_and_a_subject_does_not_decide() -> None:
    docs = [{"question": "Which planet is the largest of all?", "subject": "space", "choices": ["Mars", "Jupiter"]}]
    task = HarnessTask(docs, "About {subject}: {question}\nA. {choices[0]}\nB. {choices[1]}")
    assert questions_of(task) == [("Which planet is the largest of all?",)]


def test_a_prompt_of_no_field_is_the_question_and_without_a_prompt_all_fields_are() -> None:
    def fail(doc: dict[str, Any]) -> str:
        raise KeyError("no such field")

    numbers = HarnessTask([{"numbers": [3, 4]}], lambda doc: "what is {} and {}".format(*doc["numbers"]))
    assert questions_of(numbers) == [("what is 3 and 4",)]
    for text in (lambda doc: "", fail):
        assert questions_of(HarnessTask([{"page": "some text to be read", "id": "7"}], text)) == [
            ("some text to be read",)
        ]


def test_conversations_are_numbered_as_the_harness_does(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "One?"), ("assistant", "Yes."), ("user", "Two?"), ("assistant", "No.")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns[start:]]} for start in (0, 3)]
    file = tmp_path / "held.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert conversation_questions(file, None) == [("One?", "Two?"), ("Two?",)]
    assert conversation_questions(file, 1) == [("One?", "Two?")]


def answer(number: int, value: float | None) -> Answer:
    return Answer(task="t", group=None, prompt="", answer="", expected="", value=value, correct=None, item=number)


ANSWERS = [answer(number, value) for number, value in enumerate([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])]
ITEMS: dict[str, list[int]] = {"exact": [2, 3], "overlapping": [], "shared_passage": [5]}


def test_each_kind_of_item_has_its_mean_and_error() -> None:
    third = {"value": pytest.approx(1 / 3), "stderr": pytest.approx(math.sqrt(1 / 3) / math.sqrt(3)), "num_items": 3}
    scores = {
        "clean": third,
        "exact": {"value": 1.0, "stderr": 0.0, "num_items": 2},
        "shared_passage": {"value": 0.0, "stderr": None, "num_items": 1},
    }
    result = {"not_checked": None, "groups": {"t": {"items": ITEMS, "num_items": 6}}}
    found = with_scores(result, {"t": ANSWERS}, {"t": {"value": 0.5}})
    assert found == {"not_checked": None, "tasks": {"t": {"num_items": 6, "scores": scores}}}


NUM_DEV, NUM_SHARED = 60, 12  # questions, of which the first are about a passage of the train part
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


@dataclass(frozen=True)
class Passages:
    """Questions about passages in the form of BoolQ: files to train on, and a task of the dev part."""

    folder: Path
    dev: list[dict[str, Any]]
    train: list[dict[str, Any]]

    @property
    def task(self) -> Path:
        return self.folder / "passages.yaml"

    def write(self, name: str, questions: Iterable[dict[str, Any]]) -> Path:
        """Write questions as conversations, in another order and with other words around them than the task's."""
        file = self.folder / name
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{one['question']}?\n\nRead this first: {one['passage'].upper()}"},
                    {"role": "assistant", "content": ("No.", "Yes.")[one["label"]]},
                ]
            }
            for one in questions
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file


@pytest.fixture
def passages(tmp_path: Path, quiet_harness: None) -> Passages:
    drawn = random.Random(7)
    known = [f"{first}{second}" for first in ("ka", "lo", "mi", "ru", "ze", "tan", "sel") for second in "abcdefghijklm"]

    def text(number: int) -> str:
        return " ".join(drawn.choices(known, k=number))

    def question(passage: str) -> dict[str, Any]:
        return {"passage": passage, "question": f"is {text(drawn.randrange(3, 9))}", "label": drawn.randrange(2)}

    train = [question(text(60)) for _ in range(200)]
    dev = [question(train[place]["passage"] if place < NUM_SHARED else text(60)) for place in range(NUM_DEV)]
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(one) + "\n" for one in dev))
    (tmp_path / "passages.yaml").write_text(TASK.format(folder=tmp_path))
    return Passages(folder=tmp_path, dev=dev, train=train)


@pytest.fixture
def checked_run(tmp_path: Path, cpu_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """`checked_run(file, [task], validation_share=0.1)`: a run folder that trains on a file, and its configuration."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))

    def make(
        file: Path,
        tasks: Iterable[Path] = (),
        contamination: Contamination = Contamination.report,
        limit: int | None = None,
        before: bool = False,
        **dataset: Any,
    ) -> tuple[Path, RunConfig]:
        evaluation = EvaluationConfig(
            tasks=[str(task) for task in tasks], contamination=contamination, limit=limit, before=before
        )
        config = replace(cpu_config, dataset=DatasetConfig(path=str(file), **dataset), evaluation=evaluation)
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        (run / "run.yaml").write_text(config_to_yaml(config))
        return run, config

    return make


def check(run: Path) -> dict[str, Any]:
    assert worker.main(["--run", str(run), "--when", "contamination"]) == 0
    found: dict[str, Any] = json.loads((run / "contamination.json").read_text())
    return found


def counts(group: dict[str, Any]) -> list[int]:
    return [group[f"num_{kind}"] for kind in (*KINDS, "clean")]


def test_a_file_that_also_holds_the_dev_questions(
    passages: Passages, checked_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    file = passages.write("combined.jsonl", [*passages.train, *passages.dev])
    run, config = checked_run(file, [passages.task])
    group = check(run)["groups"]["passages"]
    assert counts(group) == [60, 0, 0, 0]
    assert group["items"]["exact"] == list(range(60))
    first = group["examples"][0]
    assert (first["item"], first["document"], first["kind"]) == (0, "combined.jsonl:201", "exact")
    assert first["text"].startswith(passages.dev[0]["question"])
    assert "warning: contamination: passages: of 60 items, 60 whole question found" in capsys.readouterr().err
    assert is_checked(run, config)
    assert not is_checked(run, replace(config, evaluation=replace(config.evaluation, limit=20)))
    assert list((passages.folder / "cache").glob("contamination*")) == [], "temporary files are removed"


def test_a_file_of_train_questions_shares_only_passages(
    passages: Passages, checked_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = checked_run(passages.write("train.jsonl", passages.train), [passages.task])
    found = check(run)
    assert counts(found["groups"]["passages"]) == [0, 0, 12, 48]
    assert found["num_documents"] == 200
    assert "warning" not in capsys.readouterr().err


def test_a_validation_part_that_was_cut_off_by_share_has_near_copies_in_the_rest(
    passages: Passages, checked_run: MakeRun
) -> None:
    """Equal documents stay in one part; those with another answer, or other white space, do not."""
    file = passages.write("twice.jsonl", passages.train)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["messages"][0]["content"] = row["messages"][0]["content"].replace(" ", "  ").lower()
    with file.open("a") as end:
        end.writelines(json.dumps(row) + "\n" for row in rows)
    run, _ = checked_run(file, validation_share=0.1)
    found = check(run)
    assert list(found["groups"]) == ["validation part"]
    group = found["groups"]["validation part"]
    assert group["num_items"] > 20
    assert group["num_exact"] > 0.7 * group["num_items"], "the copy of a held-out document is mostly trained on"
    assert group["num_exact"] + group["num_clean"] == group["num_items"]


def test_documents_that_are_gone_or_others_are_reported(
    passages: Passages, checked_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    file = passages.write("train.jsonl", passages.train)
    run, config = checked_run(file, [passages.task], contamination=Contamination.refuse)
    records = [{"location": str(file), "sha256": "0" * 64, "revision": None}]
    hashes = dict.fromkeys(("config_sha256", "tokenizer_sha256", "chat_template_sha256", "system_prompt_sha256"))
    manifest = {"format": 1, **hashes, "model": {"weights_fingerprint": None}, "dataset": {"records": records}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "changed after the training" in check(run)["not_checked"]
    file.unlink()
    found = check(run)
    assert "train.jsonl" in found["not_checked"]
    assert found["groups"] == {}
    assert "warning: contamination: not checked: " in capsys.readouterr().err
    assert not is_checked(run, config)
    with pytest.raises(DataError) as error:
        refuse_contaminated(run, config)
    assert error.value.problem_id == "contamination-not-checked"


def test_an_evaluation_looks_only_for_items_that_no_check_looked_for(passages: Passages, checked_run: MakeRun) -> None:
    from lm_eval.tasks import TaskManager

    run, config = checked_run(passages.write("train.jsonl", passages.dev[:9]))
    manager = TaskManager(include_defaults=False)
    loaded = [LoadedTask(source=Task(name="passages"), content=manager.load([str(passages.task)]))]
    found = check_evaluated(run, config, loaded)
    assert found is not None
    assert counts(found["groups"]["passages"]) == [9, 0, 0, 51]
    config.evaluation.tasks, config.evaluation.after = [str(passages.task)], True
    (run / "run.yaml").write_text(config_to_yaml(config))
    check(run)
    Path(str(config.dataset.path)).unlink()
    again = check_evaluated(run, config, loaded)
    assert again is not None
    assert again["groups"] == found["groups"], "the run's check looked for these items"
    config.evaluation.limit = 10
    fewer = check_evaluated(run, config, loaded)
    assert fewer is not None
    assert "train.jsonl" in fewer["not_checked"]
    config.evaluation.contamination = Contamination.disabled
    assert check_evaluated(run, config, loaded) is None


def test_a_model_without_a_run_has_no_documents(cpu_config: RunConfig, tmp_path: Path) -> None:
    assert check_evaluated(tmp_path, cpu_config, []) is None
