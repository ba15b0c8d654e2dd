"""Settings of a code task, under `metadata.code` in its file; and this book's task files.

    program       how an answer becomes a program: a name in `BUILDERS`
    pass_at_k     the ks to report; the first is the task's score
    time_limit_s  for one program with its test
    problems      a JSONL next to the task's file; without it the harness loads the data set. A task that is named as
                  NAME@FILE reads FILE instead

The test of a program is the task's `doc_to_target`. `repeats` and `generation_kwargs` set the number of samples and the
sampling, as in the harness. The settings of `evaluation.code` replace them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunebook.config.schema import CodeConfig
from tunebook.errors import RequestError, did_you_mean

FOLDER = Path(__file__).parent / "tasks"
TIME_LIMIT_S = 3.0  # as in the harness' own code_eval
_KEYS = ("program", "pass_at_k", "time_limit_s", "problems")
FENCE = "```"
_OPENING = re.compile(r"\A\s*(?:```\w*|python)[ \t]*\n")
_BLOCK = re.compile(r"```(?:\w+)?\n?(.*?)\n?```", re.DOTALL)


# Builders: an answer becomes the executed program as in lm-evaluation-harness 0.4.13: `build_predictions` and
# `build_predictions_instruct` of its humaneval, `extract_code_blocks` of its mbpp. A test compares them.


def prompt_and_answer(problem: Mapping[str, Any], answer: str) -> str:
    """Return the problem's prompt, continued by the answer."""
    return str(problem["prompt"]) + answer


def prompt_and_answer_to_fence(problem: Mapping[str, Any], answer: str) -> str:
    """Return the prompt and the answer up to its first fence: the answer begins inside a code block."""
    return str(problem["prompt"]) + answer.partition(FENCE)[0]


def answer_to_fence(problem: Mapping[str, Any], answer: str) -> str:
    """Return the answer, which begins inside a code block, up to the end of the block. It may open the block again.

    Differs from the harness, which takes the answer's first word for a language name even if its line continues.
    """
    return _OPENING.sub("", answer, count=1).partition(FENCE)[0]


def answer_alone(problem: Mapping[str, Any], answer: str) -> str:
    """Return the answer as the program."""
    return answer


def first_block(problem: Mapping[str, Any], answer: str) -> str:
    """Return the first code block of an answer that begins inside one; empty if none is closed.

    The harness then searches again without the language name. That search needs two fences and finds nothing more.
    """
    found = _BLOCK.search(FENCE + answer)
    return found[1] if found else ""


BUILDERS: dict[str, Callable[[Mapping[str, Any], str], str]] = {
    "prompt_and_answer": prompt_and_answer,
    "prompt_and_answer_to_fence": prompt_and_answer_to_fence,
    "answer": answer_alone,
    "answer_to_fence": answer_to_fence,
    "first_block": first_block,
}


@dataclass(frozen=True, kw_only=True)
class CodeTask:
    """How one task's programs are sampled, executed and counted."""

    program: str
    pass_at_k: tuple[int, ...]
    time_limit_s: float
    num_samples: int  # of each problem
    generation: Mapping[str, Any]  # the harness' generation_kwargs
    problems: Path | None

    def harness_keys(self, cache_folder: Path) -> dict[str, Any]:
        """Return the keys that replace those of the task's file; the task's own data bypasses the shared cache."""
        keys: dict[str, Any] = {"repeats": self.num_samples, "generation_kwargs": dict(self.generation)}
        if self.problems is None:
            return keys
        data = {"data_files": {"test": str(self.problems)}, "cache_dir": str(cache_folder)}
        return keys | {"dataset_path": "json", "dataset_name": None, "test_split": "test", "dataset_kwargs": data}


def book_task_files() -> dict[str, Path]:
    """Return this book's task files by name; some replace tasks of the harness."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}


def read_code_task(file: Path, config: Mapping[str, Any]) -> CodeTask | None:
    """Read a code task's settings; None for another kind of task. Raises: RequestError for invalid ones."""
    metadata = config.get("metadata")
    settings = metadata.get("code") if isinstance(metadata, dict) else None
    if settings is None:
        return None
    if not isinstance(settings, dict) or not settings.keys() <= set(_KEYS):
        raise _wrong(file, f"is {settings!r}; its keys are {', '.join(_KEYS)}")
    program = settings.get("program")
    if program not in BUILDERS:
        guess = did_you_mean(str(program), BUILDERS)
        raise _wrong(file, f".program is {program!r}.{guess} Programs are made by: {', '.join(BUILDERS)}")
    ks, seconds = settings.get("pass_at_k", [1]), settings.get("time_limit_s", TIME_LIMIT_S)
    if not (isinstance(ks, list) and ks and all(type(k) is int and k > 0 for k in ks)):
        raise _wrong(file, f".pass_at_k is {ks!r}; it is a list of whole numbers above 0, such as [1, 10]")
    if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
        raise _wrong(file, f".time_limit_s is {seconds!r}; it is a number of seconds above 0, such as 3.0")
    return CodeTask(
        program=program,
        pass_at_k=tuple(ks),
        time_limit_s=float(seconds),
        num_samples=_num_samples(file, config),
        generation=_generation(file, config),
        problems=_problems(file, settings),
    )


def with_choice(name: str, task: CodeTask, choice: CodeConfig) -> CodeTask:
    """Apply the configuration's settings to the task. Raises: RequestError for a contradiction."""
    generation = dict(task.generation)
    if choice.max_new_tokens is not None:
        generation["max_gen_toks"] = choice.max_new_tokens
    if choice.temperature is not None:
        generation = {key: value for key, value in generation.items() if key not in ("temperature", "top_p")}
        generation["do_sample"] = choice.temperature > 0
        generation |= {"temperature": choice.temperature} if choice.temperature > 0 else {}
    if choice.top_p is not None:
        generation["top_p"] = choice.top_p
    chosen = replace(
        task,
        num_samples=choice.num_samples or task.num_samples,
        pass_at_k=tuple(choice.pass_at_k or task.pass_at_k),
        generation=generation,
    )
    _check_sampling(name, chosen)
    return chosen


def _check_sampling(name: str, task: CodeTask) -> None:
    impossible = [k for k in task.pass_at_k if not 1 <= k <= task.num_samples]
    if impossible:
        raise RequestError(
            f"{name}: pass@{impossible[-1]} cannot be estimated: it needs that many samples of each problem, and the "
            f"number of samples is {task.num_samples}; try evaluation.code.num_samples={max(1, *impossible)}, or "
            "evaluation.code.pass_at_k=[1]",
            problem_id="too-few-samples",
        )
    if task.generation.get("do_sample"):
        return
    if task.num_samples > 1:
        raise RequestError(
            f"{name}: {task.num_samples} samples of each problem at temperature 0 are {task.num_samples} times the "
            "same; try evaluation.code.temperature=0.8, or evaluation.code.num_samples=1",
            problem_id="code-sampling",
        )
    if "top_p" in task.generation:
        raise RequestError(
            f"{name}: evaluation.code.top_p={task.generation['top_p']:g} says what is sampled from, and nothing is "
            "sampled at temperature 0; try evaluation.code.temperature=0.8 too, or leave it out",
            problem_id="code-sampling",
        )


def _num_samples(file: Path, config: Mapping[str, Any]) -> int:
    repeats = config.get("repeats", 1)
    if type(repeats) is not int or repeats < 1:
        raise RequestError(
            f"{file}: repeats is {repeats!r}; it is the number of samples of each problem, such as 1",
            problem_id="task-file",
        )
    return repeats


def _generation(file: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    generation = config.get("generation_kwargs") or {}
    kind = config.get("output_type", "generate_until")
    if kind != "generate_until" or not isinstance(generation, dict):
        raise RequestError(
            f"{file} asks for programs (metadata.code), so its output_type is generate_until, not {kind}; "
            "generation_kwargs holds keys, such as max_gen_toks: 512",
            problem_id="task-file",
        )
    return dict(generation)


def _problems(file: Path, settings: Mapping[str, Any]) -> Path | None:
    if "problems" not in settings:
        return None
    named = (file.parent / str(settings["problems"])).resolve()
    if not named.is_file():
        raise _wrong(file, f".problems is '{settings['problems']}', but there is no file {named}")
    return named


def _wrong(file: Path, what: str) -> RequestError:
    return RequestError(f"{file}: metadata.code{'' if what.startswith('.') else ' '}{what}", problem_id="task-file")
