"""The shipped tasks against the harness' own, whose code is read and never imported, and task files of users."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import PreTrainedTokenizerBase

from tests.evaluate.code.conftest import HARNESS_TASKS, requests_of
from tunebook.errors import RequestError
from tunebook.evaluate.code.code_task import BUILDERS, FOLDER, book_task_files
from tunebook.evaluate.harness import HarnessSettings, LoadedTask, load_tasks
from tunebook.evaluate.task_files import Task, read_task_file

pytestmark = pytest.mark.usefixtures("quiet_harness")
HarnessFunction = Callable[[str, str], Callable[..., Any]]
NOTHING_SCORED = [{"metric": "bypass", "aggregation": "bypass", "higher_is_better": True}]
OF_HARNESS = [
    "humaneval", "humaneval_64", "humaneval_64_instruct", "humaneval_instruct", "mbpp", "mbpp_instruct",
]  # fmt: skip


def local_data(name: str, folder: Path, mbpp: Path) -> dict[str, Any]:
    """What lets a task read problems on this machine in place of the hub's."""
    data = {"data_files": {"test": str(mbpp if "mbpp" in name else FOLDER / "small_python.jsonl")}}
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": data | {"cache_dir": str(folder / "cache")}}


def harness_task(name: str, data: dict[str, Any], harness_function: HarnessFunction) -> LoadedTask:
    """The harness' own task, without its scoring, which is what executes programs."""
    folder = name.partition("_")[0]
    config: dict[str, Any] = load_yaml(HARNESS_TASKS / folder / f"{name}.yaml", resolve_func=False)
    if config.get("fewshot_config"):
        config["fewshot_config"]["samples"] = harness_function(folder, "list_fewshot_samples")
    config.pop("filter_list", None)
    config.pop("unsafe_code")
    spec = config | data | {"metric_list": NOTHING_SCORED}
    return LoadedTask(source=Task(name=name), content=dict(TaskManager(include_defaults=False).load([spec])))


def own_task(name: str, data: dict[str, Any], folder: Path) -> LoadedTask:
    """The shipped task, as a user's file that includes it and names other data."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({"include": str(book_task_files()[name]), **data}))
    [task] = load_tasks([read_task_file(file)], folder)
    return task


@pytest.mark.parametrize("has_template", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("name", OF_HARNESS)
def test_the_model_is_asked_what_the_harness_asks(
    name: str, has_template: bool, tmp_path: Path, mbpp: Path, tokenizer: PreTrainedTokenizerBase,
    harness_function: HarnessFunction, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not has_template:
        monkeypatch.setattr(tokenizer, "chat_template", None)
    settings = HarnessSettings(
        tokenizer=tokenizer, max_length=4096, num_fewshot=None, limit=2, system_prompt="Be brief."
    )
    data = local_data(name, tmp_path, mbpp)
    own, theirs = own_task(name, data, tmp_path), harness_task(name, data, harness_function)
    requests = requests_of(own, settings)
    assert requests == requests_of(theirs, settings)  # prompts, stops, lengths, sampling
    assert len(requests) == 2
    [mine], [other] = own.content["tasks"].values(), theirs.content["tasks"].values()
    for key in ("repeats", "num_fewshot", "doc_to_target"):
        assert mine.get_config(key) == other.get_config(key), key
    assert other.VERSION == mine.VERSION
    problem = mine.eval_docs[0]
    assert mine.doc_to_target(problem) == other.doc_to_target(problem)
    prompt = requests[0][1]
    assert ("<|im_start|>user\n" in prompt) is has_template
    assert prompt.count("[DONE]") == (3 if name == "mbpp" else 0)


def test_no_shipped_task_executes_or_imports_anything() -> None:
    for file in book_task_files().values():
        config = load_yaml(file)
        assert "!function" not in file.read_text()
        assert config["metric_list"] == NOTHING_SCORED
        assert "unsafe_code" not in config
        assert read_task_file(file).code is not None


def test_no_problem_is_passed_by_doing_nothing() -> None:
    lines = (FOLDER / "small_python.jsonl").read_text().splitlines()
    assert len(lines) == 24
    for problem in map(json.loads, lines):
        names: dict[str, Any] = {}
        exec(f"{problem['prompt']}    return None\n{problem['test']}", names)
        with pytest.raises((AssertionError, TypeError)):
            names["check"](names[problem["entry_point"]])


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
        "code: {program: answer, pass_at_k: [1, 10]}",
        "code: {program: answer}\nrepeats: 5",
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
        "task: mine\nrepeats: 3\ngeneration_kwargs: {do_sample: true}\n"
        "metadata: {code: {program: answer, time_limit_s: 1, problems: mine.jsonl}}"
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
