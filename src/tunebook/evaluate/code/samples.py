"""One program that a model wrote, from its answer to what became of it; a run keeps them as JSONL.

The file is written twice: once everything is generated, and again with the outcomes, so that a sandbox that dies costs
no generation.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tunebook.evaluate.code.code_task import CodeTask
from tunebook.evaluate.code.programs import BUILDERS
from tunebook.evaluate.sandbox.jobs import Outcome, Program, Status
from tunebook.files import atomic_write_text

MAX_PROGRAM_CHARS = 200_000  # a hundred times what the longest answers have


class Refused(StrEnum):
    """Why a sample is wrong without being executed."""

    not_text = "not_text"
    empty = "empty"
    too_long = "too_long"


@dataclass(kw_only=True)
class Sample:
    """One answer to one problem."""

    task: str
    problem: str
    number: int  # of this problem's samples, from 0
    answer: Any  # text, unless something went wrong
    program: str | None  # None: there is none to execute
    test: str
    time_limit_s: float
    status: str | None = None  # of `Refused`, or of the sandbox's `Status`; None: not executed yet
    message: str = ""
    last_lines: list[str] = field(default_factory=list)  # of what it printed
    seconds: float | None = None

    @property
    def is_passed(self) -> bool:
        """Whether it counts as right."""
        return self.status == Status.passed

    def take(self, outcome: Outcome) -> None:
        """What became of it."""
        self.status, self.message = outcome.status.value, outcome.message
        self.last_lines, self.seconds = outcome.last_lines, outcome.seconds

    def as_program(self) -> Program:
        """What the sandbox executes."""
        assert self.program is not None
        name = f"{self.task}/{self.problem}/{self.number}"
        return Program(id=name, source=self.program, test=self.test, time_limit_s=self.time_limit_s)


def collect_samples(task: str, code: CodeTask, documents: Sequence[Mapping[str, Any]]) -> list[list[Sample]]:
    """The samples of each problem, from what the harness logged of a task, in its order."""
    return [
        [_sample(task, code, document, number, answer) for number, answer in enumerate(document["resps"][0])]
        for document in documents
    ]


def write_samples(samples: Iterable[Sample], file: Path) -> None:
    """Write them as JSONL; ASCII, because an answer may hold halves of surrogate pairs, or be no text at all."""
    lines = [json.dumps(asdict(sample), default=repr) for sample in samples]
    atomic_write_text(file, "\n".join([*lines, ""]))


def count_statuses(samples: Iterable[Sample]) -> dict[str, int]:
    """How many samples ended how, the most frequent first."""
    return dict(Counter(str(sample.status) for sample in samples).most_common())


def _sample(task: str, code: CodeTask, document: Mapping[str, Any], number: int, answer: Any) -> Sample:
    problem = document["doc"]
    status, message, program = None, "", None
    if not isinstance(answer, str):
        status, message = Refused.not_text, f"the answer is {type(answer).__name__}, not text"
    else:
        program = BUILDERS[code.program](problem, answer)
        if not answer.strip() or not program.strip():
            status, message = Refused.empty, "the answer holds no program"
        elif len(program) > MAX_PROGRAM_CHARS:
            status, message = Refused.too_long, f"{len(program)} characters, and {MAX_PROGRAM_CHARS} are the most"
    return Sample(
        task=task,
        problem=str(problem.get("task_id", document["doc_id"])),
        number=number,
        answer=answer,
        program=program if status is None else None,
        test=str(document["target"]),
        time_limit_s=code.time_limit_s,
        status=status,
        message=message,
    )
