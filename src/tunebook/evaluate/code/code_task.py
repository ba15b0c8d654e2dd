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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunebook.config.interpolation import to_object
from tunebook.config.ranges import demand as demand_of
from tunebook.config.schema import CodeConfig, EvaluationConfig
from tunebook.errors import RequestError, did_you_mean, first_line

FOLDER = Path(__file__).parent / "tasks"
PREFIX = "evaluation.code."
TIME_LIMIT_S = 3.0  # as in the harness' own code_eval
_KEYS = ("program", "pass_at_k", "time_limit_s", "problems")
FENCE = "```"
_OPENING = re.compile(r"\A\s*(?:```\w*|python)[ \t]*\n")
_BLOCK = re.compile(r"```(?:\w+)?\n?(.*?)\n?```", re.DOTALL)


def _first_block(answer: str) -> str:
    """Return the first code block of an answer that begins inside one; empty if none is closed.

    The harness then searches again without the language name. That search needs two fences and finds nothing more.
    """
    found = _BLOCK.search(FENCE + answer)
    return found[1] if found else ""


# An answer becomes the executed program as in lm-evaluation-harness 0.4.13: `build_predictions` and
# `build_predictions_instruct` of its humaneval, `extract_code_blocks` of its mbpp. A test compares them.
BUILDERS: dict[str, Callable[[Mapping[str, Any], str], str]] = {
    "prompt_and_answer": lambda problem, answer: str(problem["prompt"]) + answer,
    # The answer begins inside a code block, and may end it.
    "prompt_and_answer_to_fence": lambda problem, answer: str(problem["prompt"]) + answer.partition(FENCE)[0],
    "answer": lambda problem, answer: answer,
    # The same without the prompt. The answer may open the block again. Differs from the harness, which takes the
    # answer's first word for a language name even if its line continues.
    "answer_to_fence": lambda problem, answer: _OPENING.sub("", answer, count=1).partition(FENCE)[0],
    "first_block": lambda problem, answer: _first_block(answer),
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
    """Read a code task's settings; None for another kind of task. Raises: RequestError for an invalid one."""
    metadata = config.get("metadata")
    settings = metadata.get("code") if isinstance(metadata, dict) else None
    if settings is None:
        return None
    if not isinstance(settings, dict) or not settings.keys() <= set(_KEYS):
        raise _wrong(file, "metadata.code", settings, f"a mapping with keys of {', '.join(_KEYS)}")
    program, ks = settings.get("program"), settings.get("pass_at_k", [1])
    time_limit_s = settings.get("time_limit_s", TIME_LIMIT_S)
    repeats, generation = config.get("repeats", 1), config.get("generation_kwargs") or {}
    kind = config.get("output_type", "generate_until")
    problems = (file.parent / str(settings["problems"])).resolve() if "problems" in settings else None
    is_time = type(time_limit_s) in (int, float) and 0 < time_limit_s < float("inf")
    for is_right, key, value, demand in (
        (program in BUILDERS, "metadata.code.program", program, f"one of {', '.join(BUILDERS)}"),
        (_are_counts(ks), "metadata.code.pass_at_k", ks, "a list of whole numbers above 0, such as [1, 10]"),
        (is_time, "metadata.code.time_limit_s", time_limit_s, "a number of seconds above 0, such as 3.0"),
        (problems is None or problems.is_file(), "metadata.code.problems", str(problems), "a file that exists"),
        (_are_counts([repeats]), "repeats", repeats, "the number of samples of each problem, such as 1"),
        (isinstance(generation, dict), "generation_kwargs", generation, "a mapping, such as {max_gen_toks: 512}"),
        (kind == "generate_until", "output_type", kind, "generate_until, because metadata.code asks for programs"),
    ):
        if not is_right:
            raise _wrong(file, key, value, demand)
    return CodeTask(
        program=str(program),
        pass_at_k=tuple(ks),
        time_limit_s=float(time_limit_s),
        num_samples=repeats,
        generation=dict(generation),
        problems=problems,
    )


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is int and value > 0 for value in values)


def _wrong(file: Path, key: str, value: Any, demand: str) -> RequestError:
    return RequestError(f"{file}: {key} is {value!r}; it must be {demand}", problem_id="task-file")


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
    if not task.generation.get("do_sample") and (task.num_samples > 1 or "top_p" in task.generation):
        raise RequestError(
            f"{name}: at temperature 0, all samples of a problem are equal, and evaluation.code.top_p changes nothing; "
            "try evaluation.code.temperature=0.8, or leave out evaluation.code.num_samples and evaluation.code.top_p",
            problem_id="code-sampling",
        )


def apply_overrides(evaluation: EvaluationConfig, overrides: Sequence[str]) -> EvaluationConfig:
    """Apply overrides like `evaluation.code.num_samples=20`. Raises: RequestError for an invalid one."""
    code: Any = evaluation.code
    known = {f"{PREFIX}{setting.name}": setting for setting in fields(CodeConfig)}
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in known:
            raise RequestError(
                f"there is no setting '{key}' here.{did_you_mean(key, known)} About programs: {', '.join(known)}",
                problem_id="unknown-key",
            )
        name = known[key].name
        try:
            code = to_object(OmegaConf.merge(OmegaConf.structured(code), OmegaConf.from_dotlist([f"{name}={text}"])))
        except OmegaConfBaseException as error:
            raise RequestError(f"{override} cannot be read: {first_line(error)}", problem_id="unknown-key") from error
        value = getattr(code, name)
        if isinstance(value, int | float) and (demand := demand_of(known[key], value)):
            raise RequestError(f"{override}: it must be {demand}, or left out", problem_id="unknown-key")
    return replace(evaluation, code=code)


def check_context(name: str, code: CodeTask, *, max_gen_toks: int, max_length: int) -> None:
    """Refuse programs longer than the model's context: the harness would fail an assertion. Raises: RequestError."""
    longest = code.generation.get("max_gen_toks", max_gen_toks)
    if longest >= max_length:
        raise RequestError(
            f"{name} allows a program {longest} tokens, and the whole context of this model, with the problem in it, "
            f"is {max_length}; try {PREFIX}max_new_tokens={max(max_length // 2, 1)}",
            problem_id="code-context",
        )
