"""The shipped tasks against the harness' own: the same requests. Its code is read, never imported."""

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
from tunebook.evaluate.code.code_task import FOLDER, book_task_files
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
