"""Second step of a code evaluation: execute the programs in the sandbox and put pass@k into the results.

For each problem, pass@k is the probability that at least one of k samples passes, estimated from n samples of which c
pass. The score is the mean over problems. Its standard error is that of a mean, as for all of the harness' scores.
Source: "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), section 2.1, as in code_eval, which the
harness uses.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from tunebook.errors import counted
from tunebook.evaluate.code.code_task import BUILDERS, CodeTask
from tunebook.evaluate.results import mean_with_error
from tunebook.evaluate.sandbox.run import LIMITS, version
from tunebook.evaluate.sandbox.start import Program, Status, open_sandbox, run_programs
from tunebook.evaluate.task_files import Task, resolve_tasks
from tunebook.files import atomic_write_text


def check_code(tasks: Iterable[str]) -> None:
    """Refuse code tasks that cannot be executed here. Raises: RequestError."""
    require_sandbox(resolve_tasks(tasks))


def require_sandbox(tasks: Iterable[Task]) -> None:
    """Refuse code tasks if no sandbox can execute programs. Raises: RequestError with the reason and the fix."""
    if any(task.code is not None for task in tasks):
        open_sandbox()


@dataclass(kw_only=True)
class Sample:
    """One answer to one problem."""

    task: str
    problem: str
    number: int  # index among this problem's samples, from 0
    answer: str
    program: str
    test: str
    time_limit_s: float
    status: str = ""  # the sandbox's `Status`
    message: str = ""
    last_lines: list[str] = field(default_factory=list)  # of the program's output
    seconds: float = 0.0

    @property
    def is_passed(self) -> bool:
        """Whether the sample counts as right."""
        return self.status == Status.passed


def judge_programs(
    results: dict[str, Any], tasks: Sequence[Task], file: Path, *, report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Execute the generated programs and score them in `results`; return the record, or None without code tasks.

    `file` gets the samples. Raises: RequestError if the sandbox fails.
    """
    codes = {task.name: task.code for task in tasks if task.code is not None}
    if not codes:
        return None
    by_task = {name: collect_samples(name, code, results["samples"][name]) for name, code in codes.items()}
    samples = [sample for problems in by_task.values() for problem in problems for sample in problem]
    execution = _execute(samples, report)
    # JSON in ASCII, because an answer may hold lone surrogates.
    atomic_write_text(file, "".join(f"{json.dumps(asdict(sample))}\n" for sample in samples))
    scores = {name: _score(code, by_task[name]) for name, code in codes.items()}
    for name in codes:
        _put_scores(results, name, scores[name]["pass_at_k"], by_task[name])
    return {"execution": execution, "tasks": scores, "samples": file.name}


def _execute(samples: Sequence[Sample], report: Callable[[str], None]) -> dict[str, Any]:
    """Execute every program; return which sandbox did, its limits and the time."""
    programs = [
        Program(
            id=f"{sample.task}/{sample.problem}/{sample.number}",
            source=sample.program,
            test=sample.test,
            time_limit_s=sample.time_limit_s,
        )
        for sample in samples
    ]
    started, sandbox = time.monotonic(), open_sandbox()
    report(f"executing {counted(len(programs), 'program')} in the sandbox: {sandbox.name}")
    outcomes = track(
        run_programs(programs, sandbox),
        total=len(programs),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    for sample, outcome in zip(samples, outcomes, strict=True):
        sample.status, sample.message = outcome.status.value, outcome.message
        sample.last_lines, sample.seconds = outcome.last_lines, outcome.seconds
    seconds = time.monotonic() - started
    statuses = ", ".join(f"{number} {status}" for status, number in count_statuses(samples).items())
    report(f"of {counted(len(samples), 'sample')}: {statuses}; {seconds:.1f} s")
    return {"backend": sandbox.name, "runner_version": version(), "limits": LIMITS, "seconds": round(seconds, 1)}


def _score(code: CodeTask, problems: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Return a task's pass@k and the status counts of its samples."""
    return {
        "program": code.program,
        "num_samples": code.num_samples,
        "generation": code.generation,
        "time_limit_s": code.time_limit_s,
        "pass_at_k": {
            f"pass@{k}": mean_with_error([_estimate(samples, k) for samples in problems]) for k in code.pass_at_k
        },
        "statuses": count_statuses(sample for problem in problems for sample in problem),
    }


def _estimate(problem: Sequence[Sample], k: int) -> float:
    return estimate_pass_at_k(len(problem), sum(sample.is_passed for sample in problem), k)


def estimate_pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimator 1 - C(n - c, k) / C(n, k) for one problem."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _put_scores(
    results: dict[str, Any], name: str, scores: Mapping[str, Any], problems: Sequence[Sequence[Sample]]
) -> None:
    """Replace the harness' `bypass` metric by pass@k, in the results and in each logged answer."""
    metrics = results["results"][name]
    [filter_name] = {key.partition(",")[2] for key in metrics if key.startswith("bypass,")}
    for key in (f"bypass,{filter_name}", f"bypass_stderr,{filter_name}"):
        metrics.pop(key, None)
    for metric, score in scores.items():
        metrics[f"{metric},{filter_name}"] = score["value"]
        metrics[f"{metric}_stderr,{filter_name}"] = score["stderr"]
    listed = [{"metric": metric, "higher_is_better": True} for metric in scores]
    results["configs"][name] = {**results["configs"][name], "metric_list": listed}
    results["higher_is_better"][name] = dict.fromkeys(scores, True)
    for document, samples in zip(results["samples"][name], problems, strict=True):
        document |= {metric: _estimate(samples, int(metric.partition("@")[2])) for metric in scores}
        first = samples[0]  # shown with its outcome
        document["filtered_resps"] = [
            first.program if first.is_passed else f"{first.program}\n# {first.message or first.status}"
        ]


def collect_samples(task: str, code: CodeTask, documents: Sequence[Mapping[str, Any]]) -> list[list[Sample]]:
    """Collect the samples of each problem from the harness' log of a task, in its order."""
    return [
        [
            Sample(
                task=task,
                problem=str(document["doc"].get("task_id", document["doc_id"])),
                number=number,
                answer=answer,
                program=BUILDERS[code.program](document["doc"], answer),
                test=str(document["target"]),
                time_limit_s=code.time_limit_s,
            )
            for number, answer in enumerate(document["resps"][0])
        ]
        for document in documents
    ]


def count_statuses(samples: Iterable[Sample]) -> dict[str, int]:
    """Count the samples with each status, the most frequent first."""
    return dict(Counter(sample.status for sample in samples).most_common())
