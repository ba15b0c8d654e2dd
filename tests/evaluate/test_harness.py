"""Real harness runs on small tasks whose scores are worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunebook.errors import DataError
from tunebook.evaluate.harness import (
    HarnessSettings,
    load_tasks,
    run_task,
)
from tunebook.evaluate.request_model import RequestModel
from tunebook.evaluate.results import task_answers, task_scores
from tunebook.evaluate.task_files import Task, read_task_file

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
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}, cache_dir: CACHE}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["cat", "dog", "fish"]
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
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


def settings(model: RequestModel, folder: Path, limit: int | None = None) -> HarnessSettings:
    return HarnessSettings(
        tokenizer=model.tokenizer, max_length=model.max_length, num_fewshot=None, limit=limit, system_prompt=None,
        items_folder=folder / "items", cache_folder=folder / "cache",
    )  # fmt: skip


def exact_match_task(folder: Path, held_out: list[tuple[str, str, str, str]]) -> Path:
    lines = [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": right}], "task": group}
        for asked, right, _, group in held_out
    ]
    (folder / "held.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = folder / "words.yaml"
    file.write_text(EXACT_MATCH)
    return file


@pytest.fixture
def run_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> RequestModel:
    return RequestModel(
        model, tokenizer, batch_size=2, compute_dtype=None, folder=tmp_path / "kept", identity={}, is_fresh=True
    )


def run_harness(model: RequestModel, tasks: list[Task], settings: HarnessSettings) -> dict[str, Any]:
    (task,), _ = load_tasks(tasks, settings)
    return run_task(model, task, settings)


def refusal(task: Task, settings: HarnessSettings) -> str:
    loaded, missing = load_tasks([task], settings)
    assert not loaded
    return missing[task.name].message


def test_exact_match_by_hand(
    tmp_path: Path, run_model: RequestModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_heart = AnswersByHeart(tokenizer, {chat(asked): said for asked, _, said, _ in HELD_OUT})
    monkeypatch.setattr(run_model.model, "generate", by_heart)
    task = read_task_file(exact_match_task(tmp_path, HELD_OUT))
    results = run_harness(run_model, [task], settings(run_model, tmp_path))
    found = task_scores(results)["words"]
    assert found["value"] == 0.75
    # The sample standard deviation of 1 1 1 0 is 0.5; its error is 0.5 / sqrt(4).
    assert found["stderr"] == pytest.approx(0.25)
    assert found["groups"] == {"a": {"value": 1.0, "num_items": 2}, "b": {"value": 0.5, "num_items": 2}}
    assert (found["version"], found["num_fewshot"], found["higher_is_better"]) == (2.0, 0, True)
    assert by_heart.num_batches == 2
    wrong = [answer for answer in task_answers("words", results) if not answer.correct]
    assert [(answer.prompt, answer.answer, answer.expected) for answer in wrong] == [(chat("four"), "fünf", "vier")]


def test_changed_conversations_are_not_hidden_by_a_cache(
    tmp_path: Path, run_model: RequestModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {chat(asked): said for asked, _, said, _ in HELD_OUT}
    monkeypatch.setattr(run_model.model, "generate", AnswersByHeart(tokenizer, answers))
    file = exact_match_task(tmp_path, HELD_OUT)
    before = task_scores(run_harness(run_model, [read_task_file(file)], settings(run_model, tmp_path)))["words"]
    exact_match_task(tmp_path, HELD_OUT[3:])
    after = task_scores(run_harness(run_model, [read_task_file(file)], settings(run_model, tmp_path)))["words"]
    assert (before["num_items"], before["value"]) == (4, 0.75)
    assert (after["num_items"], after["value"]) == (1, 0.0)
    assert before["items_sha256"] != after["items_sha256"]


def test_the_limit_takes_the_first_items(
    tmp_path: Path, run_model: RequestModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        run_model.model, "generate", AnswersByHeart(tokenizer, {chat("one"): "eins", chat("two"): "falsch"})
    )
    task = read_task_file(exact_match_task(tmp_path, HELD_OUT))
    found = task_scores(run_harness(run_model, [task], settings(run_model, tmp_path, limit=2)))["words"]
    assert (found["num_items"], found["value"]) == (2, 0.5)


def test_multiple_choice_takes_the_likeliest_continuation_of_the_chat_prompt(
    tmp_path: Path, run_model: RequestModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    questions = ["it barks", "it swims", "it purrs"]
    choices = ["cat", "dog", "fish"]
    likeliest = [best_choice(run_model.model, tokenizer, chat(question), choices) for question in questions]
    rights = [likeliest[0], (likeliest[1] + 1) % 3, likeliest[2]]  # so the second one is answered wrongly
    data = tmp_path / "questions.jsonl"
    rows = [{"question": question, "right": right} for question, right in zip(questions, rights, strict=True)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "choices.yaml"
    file.write_text(CHOICES.replace("DATA", str(data)).replace("CACHE", str(tmp_path / "cache")))
    results = run_harness(run_model, [read_task_file(file)], settings(run_model, tmp_path))
    assert task_scores(results)["choices"]["value"] == pytest.approx(2 / 3)
    answers = task_answers("choices", results)
    assert [answer.answer for answer in answers] == [choices[index] for index in likeliest]
    assert [answer.correct for answer in answers] == [True, False, True]


def best_choice(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, choices: list[str]) -> int:
    """Worked out without the harness: the choice with the largest sum of log-probabilities.

    It follows the generation prompt at once: under a chat template the harness puts no blank before it.
    """
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    scores = []
    for choice in choices:
        tokens = tokenizer(prompt + choice, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            log_probabilities = model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
        positions = range(len(start), len(tokens))
        scores.append(sum(log_probabilities[position - 1, tokens[position]].item() for position in positions))
    return scores.index(max(scores))


def test_a_prompt_that_would_be_cut_is_refused(tmp_path: Path, run_model: RequestModel) -> None:
    long = [("word " * 200, "x", "x", "a")]
    with pytest.raises(DataError, match=r"leaves 120 for prompts"):  # 128 of context - 8 of answer
        run_harness(run_model, [read_task_file(exact_match_task(tmp_path, long))], settings(run_model, tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("generate_until", "generate_unti", "Got invalid output_type 'generate_unti'"),
        ("task: words", "process_docs: !function gone.docs\ntask: words", "gone"),
    ],
)
def test_a_task_the_harness_refuses_is_named(
    old: str, new: str, says: str, tmp_path: Path, run_model: RequestModel
) -> None:
    file = exact_match_task(tmp_path, HELD_OUT)
    file.write_text(file.read_text().replace(old, new))
    message = refusal(read_task_file(file), settings(run_model, tmp_path))
    assert message.startswith(f"lm-evaluation-harness refuses task {file}: ")
    assert says in message


def test_missing_data_is_named_before_anything_runs(tmp_path: Path, run_model: RequestModel) -> None:
    file = tmp_path / "choices.yaml"
    file.write_text(CHOICES.replace("DATA", str(tmp_path / "gone.jsonl")).replace("CACHE", str(tmp_path / "cache")))
    message = refusal(read_task_file(file), settings(run_model, tmp_path))
    assert message.startswith(f"the data of task {file} is not on this machine")


@pytest.mark.slow
def test_names_are_checked_and_tasks_that_execute_programs_are_refused(tmp_path: Path, run_model: RequestModel) -> None:
    names = ["helaswag", "humaneval_plus", "mbpp_plus"]
    loaded, missing = load_tasks([Task(name=name) for name in names], settings(run_model, tmp_path))
    assert not loaded
    assert [missing[name].problem_id for name in names] == ["unknown-task", "task-runs-code", "task-runs-code"]
    assert "Did you mean 'hellaswag'?" in missing["helaswag"].message
