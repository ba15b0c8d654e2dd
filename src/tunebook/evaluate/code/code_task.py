"""Settings of a code task, under `metadata.code` in its file; and this book's task files.

    program       how an answer becomes a program: a name in `BUILDERS`
    pass_at_k     the ks to report; the first is the task's score
    time_limit_s  for one program with its test
    problems      a JSONL next to the task's file; without it the harness loads the data set

The test of a program is the task's `doc_to_target`. `repeats` and `generation_kwargs` set the number of samples and the
sampling, as in the harness.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, FilePath, PositiveInt, ValidationError, model_validator

from tunebook.errors import RequestError

FOLDER = Path(__file__).parent / "tasks"
FENCE = "```"
_OPENING = re.compile(r"\A\s*(?:```\w*|python)[ \t]*\n")
_BLOCK = re.compile(r"```(?:\w+)?\n?(.*?)\n?```", re.DOTALL)


def _first_block(answer: str) -> str:
    """Return the first code block of an answer that begins inside one; empty if none is closed.

    The harness then searches again without the language name. That search needs two fences and finds nothing more.
    """
    block = _BLOCK.search(FENCE + answer)
    return block[1] if block else ""


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


class CodeTask(BaseModel, frozen=True, extra="forbid"):
    """How one task's programs are sampled, executed and counted."""

    program: Literal["prompt_and_answer", "prompt_and_answer_to_fence", "answer", "answer_to_fence", "first_block"]
    pass_at_k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)
    time_limit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3.0  # as in the harness' own code_eval
    problems: FilePath | None = None
    num_samples: PositiveInt = 1  # of each problem
    generation: dict[str, Any] = {}  # the harness' generation_kwargs
    output_type: Literal["generate_until"] = "generate_until"

    @model_validator(mode="after")
    def _has_samples(self) -> Self:
        if max(self.pass_at_k) > self.num_samples:
            raise ValueError(f"pass@{max(self.pass_at_k)} needs that many samples of each problem: set repeats")
        if self.num_samples > 1 and not self.generation.get("do_sample"):
            raise ValueError("without do_sample in generation_kwargs, all samples of a problem are equal")
        return self

    def harness_keys(self, cache_folder: Path) -> dict[str, Any]:
        """Return the keys that replace those of the task's file; the task's own data bypasses the shared cache."""
        keys: dict[str, Any] = {"repeats": self.num_samples, "generation_kwargs": self.generation}
        if self.problems is None:
            return keys
        data = {"data_files": {"test": str(self.problems)}, "cache_dir": str(cache_folder)}
        return keys | {"dataset_path": "json", "dataset_name": None, "test_split": "test", "dataset_kwargs": data}


def book_task_files() -> dict[str, Path]:
    """Return this book's task files by name; some replace tasks of the harness."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}


def read_code_task(file: Path, config: Mapping[str, Any]) -> CodeTask | None:
    """Read a code task's settings; None for another kind of task. Raises: RequestError for an invalid one."""
    settings = (config.get("metadata") or {}).get("code")
    if settings is None:
        return None
    try:
        if "problems" in settings:
            settings = settings | {"problems": (file.parent / settings["problems"]).resolve()}
        names = {"repeats": "num_samples", "generation_kwargs": "generation", "output_type": "output_type"}
        return CodeTask(**settings, **{names[key]: config[key] for key in names.keys() & config.keys()})
    except (ValidationError, TypeError) as error:
        raise RequestError(
            f"{file}: metadata.code: {error}\nIts keys are program, pass_at_k, time_limit_s and problems (a file)",
            problem_id="task-file",
        ) from error
