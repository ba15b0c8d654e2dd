"""What task files say about programs, and what `evaluation.code` changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.schema import CodeConfig
from tunebook.errors import RequestError
from tunebook.evaluate.code.code_task import BUILDERS, CodeTask, book_task_files, with_choice
from tunebook.evaluate.task_files import read_task_file, resolve_task


def code_of(name: str) -> CodeTask:
    task = resolve_task(name)
    assert task.code is not None and task.name == name
    return task.code


def test_every_task_of_this_book_has_enough_samples_for_its_score() -> None:
    for name in book_task_files():
        code = code_of(name)
        assert max(code.pass_at_k) == code.num_samples == (64 if "_64" in name else 1)
        assert code.generation["do_sample"] is ("_64" in name)


def test_samples_are_chosen() -> None:
    choice = CodeConfig(num_samples=20, temperature=0.8, top_p=0.95, max_new_tokens=300, pass_at_k=[1, 10])
    code = with_choice("humaneval", code_of("humaneval"), choice)
    assert (code.num_samples, code.pass_at_k) == (20, (1, 10))
    sampling = {"max_gen_toks": 300, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    assert code.generation == {"until": ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]} | sampling
    choice = CodeConfig(num_samples=1, temperature=0.0, pass_at_k=[1])  # takes the likeliest token
    code = with_choice("t", code_of("humaneval_64"), choice)
    assert code.generation["do_sample"] is False
    assert "temperature" not in code.generation and "top_p" not in code.generation


@pytest.mark.parametrize(
    ("choice", "problem_id"),
    [
        (CodeConfig(pass_at_k=[1, 10]), "too-few-samples"),
        (CodeConfig(num_samples=5), "code-sampling"),
        (CodeConfig(top_p=0.9), "code-sampling"),
    ],
)
def test_contradictions(choice: CodeConfig, problem_id: str) -> None:
    with pytest.raises(RequestError) as raised:
        with_choice("humaneval", code_of("humaneval"), choice)
    assert raised.value.problem_id == problem_id


@pytest.mark.parametrize(
    "lines",
    [
        "code: {program: first_bloc}",
        "code: {program: answer, pass_at_k: []}",
        "code: {program: answer, time_limit_s: 0}",
        "code: {program: answer, problems: gone.jsonl}",
        "code: {programm: answer}",
        "code: []",
        "code: {program: answer}\nrepeats: many",
        "code: {program: answer}\noutput_type: multiple_choice",
    ],
)
def test_invalid_task_files(tmp_path: Path, lines: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"task: mine\nmetadata:\n  {lines}\n")
    with pytest.raises(RequestError) as raised:
        read_task_file(file)
    assert raised.value.problem_id == "task-file"


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "task: mine\nrepeats: 3\nmetadata: {code: {program: answer, time_limit_s: 1, problems: mine.jsonl}}"
    )
    code = read_task_file(file).code
    assert code is not None
    assert (code.num_samples, code.pass_at_k, code.time_limit_s) == (3, (1,), 1.0)
    assert code.problems == tmp_path / "mine.jsonl"
    file.write_text("task: mine\n")
    assert read_task_file(file).code is None


PROBLEM = {"prompt": "def f(x):\n"}
ANSWERS = [
    "    return x\n",
    "",
    "    return x\n```",
    "    return x\n```\nIt returns x. ```python\nf(1)\n```",
    "```",
    "```python\nreturn\n```",
    "python\ndef f(x):\n    return x\n```\nDone.",
    "def f(x):\n    return x\n",
    "def f(x): return x```",
    "\n\n```\n",
    "``` x ```python\ny\n``` ```z```",
    "one `two` ``three``",
    "```py\nx = '```'\n```",
]


@pytest.mark.parametrize(
    ("kind", "task", "function"),
    [
        ("prompt_and_answer", "humaneval", "build_predictions"),
        ("prompt_and_answer_to_fence", "humaneval", "build_predictions_instruct"),
        ("first_block", "mbpp", "build_predictions"),
    ],
)
def test_the_program_is_the_harness_own(
    kind: str, task: str, function: str, harness_function: Callable[[str, str], Callable[..., Any]]
) -> None:
    for answer in ANSWERS:
        [[program]] = harness_function(task, function)([[answer]], [PROBLEM])
        assert BUILDERS[kind](PROBLEM, answer) == program, answer


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("def f(x):\n    return x\n```\nIt returns x.", "def f(x):\n    return x\n"),
        ("def f(x): return x", "def f(x): return x"),  # cut before the block's end
        ("\n\nimport re\n```\n```python\nno\n```", "\n\nimport re\n"),
        ("```python\nx = 1\n```", "x = 1\n"),
        (" \n``` \nx = 1\n```", "x = 1\n"),
        ("python\nx = 1\n```", "x = 1\n"),
        ("python = 1\n```", "python = 1\n"),
        ("```", ""),
    ],
)
def test_up_to_the_end_of_the_block(answer: str, program: str) -> None:
    assert BUILDERS["answer_to_fence"](PROBLEM, answer) == program
