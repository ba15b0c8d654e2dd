"""Real harness runs on small tasks whose scores are worked out by hand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunebook.errors import DataError, RequestError
from tunebook.evaluate.harness import (
    HarnessSettings,
    LoadedTask,
    load_tasks,
    render_conversations,
    run_task,
)
from tunebook.evaluate.request_model import RequestModel
from tunebook.evaluate.results import task_answers, task_scores
from tunebook.evaluate.task_files import Task, read_task_file
from tunebook.model.tokenizer_files import read_chat_template

pytestmark = pytest.mark.usefixtures("quiet_harness")

EXACT_MATCH = """
task: words
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
generation_kwargs: {until: ["<|im_end|>"], do_sample: false, max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 2.0, conversations: held.jsonl}
"""
BOTH = """
group: both
task: [choice, second]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
metadata: {version: 1.0}
"""
# Prompt, right answer, what the model is made to say, group.
HELD_OUT = [
    ("one", "eins", "eins", "a"),
    ("two", "zwei", "zwei", "a"),
    ("three", "drei", "drei", "b"),
    ("four", "vier", "fünf", "b"),
]


class AnswersByHeart:
    """Stands in for `generate`: writes a known answer, EOS and padding behind each prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answers: dict[str, str]) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.num_batches = 0

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_options: Any) -> torch.Tensor:
        self.num_batches += 1
        rows = []
        for row, mask in zip(input_ids, attention_mask, strict=True):
            prompt = self.tokenizer.decode(row[mask.bool()])
            answer = self.tokenizer(self.answers[prompt] + self.tokenizer.eos_token)["input_ids"]
            rows.append(row.tolist() + answer)
        longest = max(map(len, rows))
        return torch.tensor([row + [self.tokenizer.pad_token_id] * (longest - len(row)) for row in rows])


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def settings(model: RequestModel, limit: int | None = None) -> HarnessSettings:
    return HarnessSettings(
        tokenizer=model.tokenizer, max_length=model.max_length, num_fewshot=None, limit=limit, system_prompt=None
    )


def write_conversations(folder: Path, *records: object) -> Path:
    file = folder / "held.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def sharegpt(*turns: tuple[str, str], **more: str) -> dict[str, object]:
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **more}


def exact_match_task(folder: Path, held_out: list[tuple[str, str, str, str]]) -> Path:
    write_conversations(
        folder, *(sharegpt(("human", prompt), ("gpt", right), task=group) for prompt, right, _, group in held_out)
    )
    file = folder / "words.yaml"
    file.write_text(EXACT_MATCH)
    return file


@pytest.fixture
def run_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> RequestModel:
    return RequestModel(model, tokenizer, batch_size=2, compute_dtype=None, folder=tmp_path / "kept", identity={})


def run_harness(model: RequestModel, file: Path, limit: int | None = None) -> dict[str, Any]:
    cache = Path(tempfile.mkdtemp(dir=file.parent))  # of its own for each evaluation, as in a worker
    (task,) = load_tasks([read_task_file(file)], cache, settings(model, limit))
    return run_task(model, task, settings(model, limit))


def test_exact_match_by_hand(
    tmp_path: Path, run_model: RequestModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_heart = AnswersByHeart(tokenizer, {chat(prompt): answer for prompt, _, answer, _ in HELD_OUT})
    monkeypatch.setattr(run_model.model, "generate", by_heart)
    file = exact_match_task(tmp_path, HELD_OUT)
    results = run_harness(run_model, file)
    score = task_scores(results)["words"]
    assert score["value"] == 0.75
    # The sample standard deviation of 1 1 1 0 is 0.5; its error is 0.5 / sqrt(4).
    assert score["stderr"] == pytest.approx(0.25)
    assert score["groups"] == {"a": {"value": 1.0, "num_items": 2}, "b": {"value": 0.5, "num_items": 2}}
    assert (score["version"], score["num_fewshot"], score["higher_is_better"]) == (2.0, 0, True)
    assert by_heart.num_batches == 2
    wrong = [answer for answer in task_answers("words", results) if not answer.correct]
    assert [(answer.prompt, answer.answer, answer.expected) for answer in wrong] == [(chat("four"), "fünf", "vier")]

    limited = task_scores(run_harness(run_model, file, limit=2))["words"]
    assert (limited["num_items"], limited["value"]) == (2, 1.0)
    exact_match_task(tmp_path, HELD_OUT[3:])  # no cache may hide other conversations
    changed = task_scores(run_harness(run_model, file))["words"]
    assert (changed["num_items"], changed["value"]) == (1, 0.0)
    assert changed["items_sha256"] != score["items_sha256"]


def test_a_group_has_the_score_of_all_its_items(
    task_file: Callable[[str], Path], known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase
) -> None:
    file = task_file("both")
    file.write_text(BOTH)
    model = RequestModel(
        known_model, known_tokenizer, batch_size=1, compute_dtype=None, folder=file.parent / "kept", identity={}
    )
    manager = TaskManager(include_path=str(file.parent), include_defaults=False)
    scores = task_scores(
        run_task(model, LoadedTask(source=Task(name="both"), content=manager.load(["both"])), settings(model))
    )
    assert list(scores) == ["both", "choice", "second"]
    # 2 of 3 and 5 of 5, each item counting as much as any other
    assert (scores["both"]["value"], scores["both"]["num_items"]) == (0.875, 8)
    assert scores["both"]["subtasks"] == ["choice", "second"]


def test_a_prompt_that_would_be_truncated_is_refused(tmp_path: Path, run_model: RequestModel) -> None:
    file = exact_match_task(tmp_path, [("word " * 200, "x", "x", "a")])
    with pytest.raises(DataError) as raised:
        run_harness(run_model, file)
    assert raised.value.problem_id == "heldout-too-long"


@pytest.mark.parametrize(
    ("word", "typed", "problem_id"),
    [
        ("generate_until", "generate_unti", "task-file"),
        ("exact_match", "exactmatch", "unknown-metric"),
        ("exact_match, aggregation: mean, higher_is_better: true", "exactmatch", "unknown-metric"),
    ],
)
def test_a_task_that_the_harness_cannot_run(
    word: str, typed: str, problem_id: str, tmp_path: Path, run_model: RequestModel
) -> None:
    file = exact_match_task(tmp_path, HELD_OUT)
    file.write_text(file.read_text().replace(word, typed))
    with pytest.raises(RequestError) as raised:
        load_tasks([read_task_file(file)], tmp_path, settings(run_model))
    assert raised.value.problem_id == problem_id


def test_data_files_are_taken_from_beside_the_task_wherever_the_command_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for file in (tmp_path / "rows.jsonl", Path("here.jsonl")):
        file.write_text(json.dumps({"question": file.name, "right": 0}) + "\n")
    task = {"output_type": "multiple_choice", "doc_to_text": "question", "doc_to_target": "right"}
    task |= {"task": "rows", "dataset_path": "json", "test_split": "test", "doc_to_choice": ["a", "b"]}

    def load(files: object) -> list[str]:
        own = {"dataset_kwargs": {"data_files": {"test": files}, "cache_dir": str(tmp_path / "cache")}}
        (tmp_path / "task.yaml").write_text(json.dumps(task | own))
        (loaded,) = load_tasks([read_task_file(tmp_path / "task.yaml")], tmp_path)
        return [row["question"] for row in loaded.content["tasks"]["rows"].test_docs()]

    assert load("rows.jsonl") == ["rows.jsonl"]
    assert load("row*.jsonl") == ["rows.jsonl"]
    assert load(["rows.jsonl", "here.jsonl"]) == ["rows.jsonl", "here.jsonl"]
    with pytest.raises(RequestError, match=r"no file .*missing\.jsonl; type a path from the task's folder"):
        load("missing.jsonl")


def test_only_the_last_turn_is_the_answer(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = ("human", "Reverse: a b"), ("gpt", "b a"), ("human", "And: c d"), ("gpt", "d c")
    items, _ = render_conversations(write_conversations(tmp_path, sharegpt(*turns, task="again")), None, tokenizer)
    prompt = (
        "<|im_start|>user\nReverse: a b<|im_end|>\n<|im_start|>assistant\nb a<|im_end|>\n"
        "<|im_start|>user\nAnd: c d<|im_end|>\n<|im_start|>assistant\n"
    )
    assert items == [{"prompt": prompt, "answer": "d c", "task": "again"}]


def test_the_runs_system_prompt_goes_before_conversations_without_one(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    own = sharegpt(("system", "Shout."), ("human", "hi"), ("gpt", "HI"))
    none = sharegpt(("human", "hi"), ("gpt", "hi"))
    (first, second), _ = render_conversations(write_conversations(tmp_path, own, none), "Be brief.", tokenizer)
    assert first["prompt"].startswith("<|im_start|>system\nShout.<|im_end|>\n<|im_start|>user\nhi")
    assert second["prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert (first["task"], second["answer"]) == (None, "hi")


def test_every_bad_line_is_reported(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    good = sharegpt(("human", "hi"), ("gpt", "hello"))
    unanswered = sharegpt(("human", "hi"), ("gpt", "hello"), ("human", "and?"))
    with pytest.raises(DataError) as raised:
        render_conversations(
            write_conversations(tmp_path, good, unanswered, {"text": "no conversation"}), None, tokenizer
        )
    assert "line 2: " in raised.value.message and "line 3: " in raised.value.message


def test_a_call_of_a_tool_is_expected_as_json(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = read_chat_template("trl:qwen2_5_training")
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    tools = '[{"name": "weather", "description": "of a city", "parameters": {}}]'
    record = sharegpt(("human", "Rain in Rome?"), ("function_call", call), tools=tools)
    (item,), _ = render_conversations(write_conversations(tmp_path, record), None, tokenizer)
    assert json.loads(item["answer"]) == [json.loads(call)]
    assert item["prompt"].endswith("Rain in Rome?<|im_end|>\n<|im_start|>assistant\n")
    assert "of a city" in item["prompt"]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "problem_id"), [("helaswag", "unknown-task"), ("mbpp_plus", "task-runs-code")])
def test_names_are_checked_and_tasks_that_execute_programs_are_refused(
    name: str, problem_id: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as raised:
        load_tasks([Task(name=name)], tmp_path)
    assert raised.value.problem_id == problem_id
