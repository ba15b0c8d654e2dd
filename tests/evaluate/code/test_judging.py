"""Programs through the real harness and a real sandbox, with scores worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.evaluate.code.code_task import book_task_files
from tunebook.evaluate.code.judging import estimate_pass_at_k, judge_programs
from tunebook.evaluate.results import task_answers, task_scores
from tunebook.evaluate.task_files import Task, read_task_file, resolve_task

pytestmark = pytest.mark.usefixtures("quiet_harness", "bubblewrap")

Generate = Callable[..., dict[str, Any]]
PATIENT_S = 60.0  # a machine that is busy must not make a right program wrong
RIGHT, WRONG, ENDLESS = object(), "    return 'wrong'\n", "    while True:\n        pass\n"


def task_named(name: str, time_limit_s: float = PATIENT_S, **choice: Any) -> Task:
    return with_limit(resolve_task(name), time_limit_s, **choice)


def with_limit(task: Task, time_limit_s: float = PATIENT_S, **choice: Any) -> Task:
    assert task.code is not None
    return replace(task, code=task.code.model_copy(update={"time_limit_s": time_limit_s} | choice))


def judge(results: dict[str, Any], tasks: list[Task], file: Path) -> dict[str, Any]:
    record = judge_programs(results, tasks, file, report=lambda line: None)
    assert record is not None
    return record


def answers_of(table: dict[str, list[Any]]) -> Callable[[dict[str, Any], int], Any]:
    """The answer to each problem's sample, by the name of its function."""

    def answer(problem: dict[str, Any], number: int) -> Any:
        sample = table[problem["entry_point"]][number]
        return problem["canonical_solution"] if sample is RIGHT else sample

    return answer


def test_two_samples_of_five_problems(tmp_path: Path, generate: Generate) -> None:
    table = {
        "count_vowels": [RIGHT, RIGHT],
        "running_total": [RIGHT, WRONG],
        "second_largest": [WRONG, WRONG],
        "is_palindrome": ["  \n", WRONG],
        "chunks": [WRONG, RIGHT],
    }
    sampling = {"do_sample": True, "temperature": 0.8, "max_gen_toks": 384}
    task = task_named("small_python", num_samples=2, generation=sampling, pass_at_k=(1, 2))
    results = generate([task], answers_of(table), limit=5)
    record = judge(results, [task], tmp_path / "programs.jsonl")

    # Right of two samples: 2, 1, 0, 0, 1. pass@1 is 1, .5, 0, 0, .5: the mean is .4, and the sum of squared deviations
    # .36 + .01 + .16 + .16 + .01 = .7. pass@2 is 1, 1, 0, 0, 1: the mean is .6, and the sum 3 * .16 + 2 * .36 = 1.2.
    scores = record["tasks"]["small_python"]["pass_at_k"]
    assert scores["pass@1"] == {"value": pytest.approx(0.4), "stderr": pytest.approx((0.7 / 4 / 5) ** 0.5)}
    assert scores["pass@2"] == {"value": pytest.approx(0.6), "stderr": pytest.approx((1.2 / 4 / 5) ** 0.5)}
    assert record["tasks"]["small_python"]["statuses"] == {"passed": 4, "failed": 6}
    assert record["tasks"]["small_python"]["generation"]["temperature"] == 0.8

    score = task_scores(results)["small_python"]
    assert (score["metric"], score["value"], score["num_items"]) == ("pass@1", pytest.approx(0.4), 5)
    assert score["stderr"] == scores["pass@1"]["stderr"]
    assert score["higher_is_better"] is True
    answers = task_answers("small_python", results)
    assert [answer.value for answer in answers] == [1.0, 0.5, 0.0, 0.0, 0.5]
    assert [answer.correct for answer in answers] == [True, False, False, False, False]
    assert answers[0].answer.startswith("def count_vowels(") and "# " not in answers[0].answer


def test_the_samples_are_written_and_an_endless_program_is_ended(tmp_path: Path, generate: Generate) -> None:
    loud = "    print('one')\n    print('two')\n    raise OSError('three')\n"
    endless, patient = task_named("small_python", time_limit_s=0.5), task_named("small_python_instruct")
    results = generate([endless], lambda problem, number: ENDLESS, limit=1)
    table = {"count_vowels": [RIGHT], "running_total": [loud]}
    for key, value in generate([patient], answers_of(table), limit=2).items():
        results[key] |= value
    file = tmp_path / "programs.jsonl"
    record = judge(results, [endless, patient], file)
    assert record["tasks"]["small_python"]["statuses"] == {"timed_out": 1}
    assert record["tasks"]["small_python"]["pass_at_k"] == {"pass@1": {"value": 0.0, "stderr": None}}
    assert task_scores(results)["small_python"]["stderr"] is None  # of one problem there is none

    _, right, wrong = map(json.loads, file.read_text().splitlines())
    assert (right["status"], right["message"], right["number"]) == ("passed", "", 0)
    assert right["program"].endswith('return sum(letter in "aeiou" for letter in text.lower())\n')
    assert right["test"].endswith("check(count_vowels)")
    assert (wrong["status"], wrong["last_lines"]) == ("failed", ["one", "two"])
    assert wrong["message"].startswith("OSError: three (program, line 8)")
    assert [line["problem"] for line in (right, wrong)] == ["small_python/0", "small_python/1"]
    assert record["samples"] == "programs.jsonl"
    assert record["execution"]["limits"]["memory_bytes"] == 512 << 20


def test_every_shipped_problem_accepts_its_own_solution(tmp_path: Path, generate: Generate) -> None:
    task = task_named("small_python_instruct")
    results = generate([task], lambda problem, number: problem["canonical_solution"] + "```\nThat is it.")
    record = judge(results, [task], tmp_path / "programs.jsonl")
    assert record["tasks"]["small_python_instruct"]["statuses"] == {"passed": 24}
    assert task_scores(results)["small_python_instruct"]["value"] == 1.0


def test_mbpp_on_local_data(tmp_path: Path, generate: Generate, mbpp: Path) -> None:
    answers = {
        11: "def double(n):\n  return n + n\n```\nThis doubles.",
        12: "\ndef join(words, sign):\n  return sign.join(words)",  # the block does not end
    }
    in_harness = {"mbpp": {"failed": 1, "passed": 1}, "mbpp_instruct": {"failed": 2}}  # it drops a `def`
    for name, expected in {**in_harness, "mbpp_fenced": {"passed": 2}}.items():
        file = tmp_path / f"{name}.yaml"
        local = {"dataset_path": "json", "dataset_name": None, "test_split": "test"}
        local |= {"dataset_kwargs": {"data_files": {"test": str(mbpp)}, "cache_dir": str(tmp_path / "cache")}}
        file.write_text(json.dumps({"include": str(book_task_files()[name]), **local}))
        task = with_limit(read_task_file(file))
        results = generate([task], lambda problem, number: answers[problem["task_id"]])
        record = judge(results, [task], tmp_path / "programs.jsonl")
        assert record["tasks"][name]["statuses"] == expected
        assert task_scores(results)[name]["value"] == expected.get("passed", 0) / 2


@pytest.mark.parametrize(
    ("num_samples", "num_right", "k", "by_hand"),
    [
        (1, 0, 1, 0.0),
        (2, 1, 1, 1 / 2),
        (5, 2, 2, 1 - (3 * 2) / (5 * 4)),  # no right one among two: C(3,2)/C(5,2) = 3/10
        (5, 2, 3, 1 - 1 / 10),  # C(3,3)/C(5,3)
        (5, 2, 4, 1.0),  # four of five cannot all be among the three wrong ones
    ],
)
def test_pass_at_k_of_one_problem(num_samples: int, num_right: int, k: int, by_hand: float) -> None:
    assert estimate_pass_at_k(num_samples, num_right, k) == pytest.approx(by_hand, abs=1e-15)
