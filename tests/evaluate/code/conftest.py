"""Local problems in the formats of HumanEval and MBPP, and a stand-in for a model, which gives known answers."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from transformers import PreTrainedTokenizerBase

from tunebook.evaluate.harness import HarnessSettings, LoadedTask, load_tasks, run_task
from tunebook.evaluate.task_files import Task

Answer = Callable[[dict[str, Any], int], Any]  # of a problem and the number of its sample

MBPP = [
    {
        "task_id": 11,
        "text": "Write a function to double a number.",
        "code": "def double(n):\r\n  return 2 * n",
        "test_list": ["assert double(2) == 4", "assert double(0) == 0", "assert double(-1) == -2"],
    },
    {
        "task_id": 12,
        "text": "Write a function to join words by a sign.",
        "code": "def join(words, sign):\r\n  return sign.join(words)",
        "test_list": ["assert join('ab', '-') == 'a-b'", "assert join([], '-') == ''", "assert join('a', '') == 'a'"],
    },
]


@pytest.fixture(scope="session")
def harness_function() -> Callable[[str, str], Callable[..., Any]]:
    """One function of a task folder of the harness, by its name, without the import that executes programs."""

    def read(folder: str, name: str) -> Callable[..., Any]:
        source = (HARNESS_TASKS / folder / "utils.py").read_text()
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        names: dict[str, Any] = {"re": re}
        exec(compile(ast.Module(body=functions, type_ignores=[]), folder, "exec"), names)
        function: Callable[..., Any] = names[name]
        return function

    return read


@pytest.fixture
def bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """No `sandbox` service, whatever runs here; skips a test on a machine without bubblewrap; CI has it."""
    monkeypatch.setenv("TUNEBOOK_HANDOVER", "/nonexistent/handover")
    if shutil.which("bwrap") is None and not os.environ.get("CI"):
        pytest.skip("no bubblewrap on this machine: apt install bubblewrap")


@pytest.fixture
def mbpp(tmp_path: Path) -> Path:
    file = tmp_path / "mbpp.jsonl"
    unused = {"test_setup_code": "", "challenge_test_list": []}
    file.write_text("".join(json.dumps(problem | unused) + "\n" for problem in MBPP))
    return file


HARNESS_TASKS = Path(str(lm_eval.__file__)).parent / "tasks"


class KnownAnswers(LM):  # type: ignore[misc]  # the harness has no type marker
    """Gives the answers that a function says, as often as it is asked for each problem."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answer: Answer) -> None:
        super().__init__()
        self.tokenizer, self.answer = tokenizer, answer
        self.requests: list[Instance] = []

    @property
    def tokenizer_name(self) -> str:
        return "known answers"

    def apply_chat_template(self, history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip
        return text

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Any]:
        numbers: dict[int, int] = {}
        answers = []
        for request in requests:
            numbers[request.doc_id] = numbers.get(request.doc_id, -1) + 1
            answers.append(self.answer(request.doc, numbers[request.doc_id]))
        self.requests += requests
        return answers

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Any]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Any]:
        raise NotImplementedError


def requests_of(task: LoadedTask, settings: HarnessSettings) -> list[list[Any]]:
    """What a model is asked: the number of each problem, the prompt, and how to generate."""
    model = KnownAnswers(settings.tokenizer, lambda problem, number: "")
    run_task(model, task, settings)
    texts = [json.dumps([request.doc_id, *request.args]) for request in model.requests]
    return [json.loads(text) for text in dict.fromkeys(texts)]


@pytest.fixture
def generate(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> Callable[[list[Task], Answer, int | None], dict[str, Any]]:
    """Have the harness ask for tasks' programs, and return its results as they are before anything is executed."""

    def run(tasks: list[Task], answer: Answer, limit: int | None = None) -> dict[str, Any]:
        settings = HarnessSettings(
            tokenizer=tokenizer, max_length=4096, num_fewshot=None, limit=limit, system_prompt=None
        )
        results: dict[str, Any] = {}
        for task in load_tasks(tasks, tmp_path, settings):
            for key, value in run_task(KnownAnswers(tokenizer, answer), task, settings).items():
                if isinstance(value, dict):
                    results.setdefault(key, {}).update(value)
        return results

    return run
