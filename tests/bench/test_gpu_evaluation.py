"""What is started after what, what is compared with what, and the hook that notes what an evaluation takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH))

import gpu_evaluation  # noqa: E402
from gpu_evaluation_results import differences  # noqa: E402
from gpu_evaluation_subjects import write_tasks  # noqa: E402
from gpu_evaluation_tries import Try, tries  # noqa: E402


@pytest.mark.parametrize("is_cpu", [False, True])
def test_what_a_try_needs_is_there(is_cpu):
    everything = tries(Path("/models"), is_cpu=is_cpu)
    names = [one.name for one in everything]
    assert len(set(names)) == len(names)
    for one in everything:
        assert {*one.after, one.compare_with or names[0]} <= set(names), one.name
        assert one.gpu_gib is None or one.needs_gpus, one.name


def test_what_is_named_brings_what_it_needs_and_is_compared_with():
    chosen = gpu_evaluation._chosen(tries(Path("/models"), is_cpu=False), ["format_bf16"])
    assert [one.name for one in chosen] == ["train", "subjects", "subjects_trained", "format_fp32", "format_bf16"]


def queue(tmp_path, waiting, **options):
    for name in ("output", "logs", "models"):
        (tmp_path / name).mkdir()
    return gpu_evaluation.Queue(
        waiting=waiting, folder=tmp_path / "models", logs=tmp_path / "logs", output=tmp_path / "output", is_cpu=True,
        **{"deadline_s": 60, "timeout_s": 60} | options,
    )  # fmt: skip


def python(name, program, **options):
    return Try(name=name, words=["-c", program], is_tunebook=False, **{"after": ()} | options)


def test_one_that_fails_takes_what_needs_it_along_and_nothing_else(tmp_path):
    waiting = [
        python("good", "print('{\"seconds\": 1}')"),
        python("bad", "raise SystemExit(3)"),
        python("refused", "raise SystemExit(3)", expected_exit=3),
        python("needs", "", after=("bad",)),
        python("later", "", after=("good", "refused")),
    ]
    lines = queue(tmp_path, waiting).run()
    assert {name: line["as_expected"] for name, line in lines.items()} == {
        "good": True, "bad": False, "refused": True, "needs": False, "later": True,
    }  # fmt: skip
    assert lines["good"]["printed"] == [{"seconds": 1}]
    assert lines["needs"]["not_run"] == "bad failed"
    written = [json.loads(line) for line in (tmp_path / "output/evaluation.jsonl").read_text().splitlines()]
    assert {line["name"] for line in written} == set(lines)


def test_one_that_takes_too_long_is_ended(tmp_path):
    endless = "import time\nwhile True: time.sleep(1)"
    line = queue(tmp_path, [python("endless", endless, gpus=(0,))], timeout_s=0.5).run()["endless"]
    assert (line["exit_code"], line["as_expected"]) == ("stopped after 0.5 s", False)


def test_at_the_deadline_everything_is_ended_and_named(tmp_path):
    lines = queue(tmp_path, [python("one", "", gpus=(0,))], deadline_s=-1).run()
    assert lines == {"one": {"name": "one", "as_expected": False, "not_run": "the time was up"}}


def test_scores_texts_and_likelihoods_are_compared(tmp_path):
    def answers(name, *lines):
        (tmp_path / name).mkdir()
        (tmp_path / name / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        scores = {"t": {"value": len(lines) / 4}}
        return {"scores": scores, "seconds": 2.0, "task_seconds": {"t": 1.0}}

    text = {"task": "t", "item": 0, "answer": "a", "responses": ["a b"]}
    number = {"task": "t", "item": 1, "answer": "c", "responses": [-1.0, -2.0]}
    lines = {
        "one": answers("one", text, number, {**number, "item": 2}),
        "two": answers("two", text | {"responses": ["a"]}, number | {"answer": "d", "responses": [-1.0, -2.5]}),
    }
    line = differences("two", "one", tmp_path, lines)
    assert (line["scores"], line["is_same_score"]) == ({"t": [0.75, 0.5]}, False)
    assert line["answers"] == {
        "t": {"items": 3, "missing": 1, "answers_differ": 1, "largest_difference": 0.5, "texts_differ": 1}
    }
    assert differences("two", "none", tmp_path, lines)["compared"] is False


def test_tasks_are_the_same_each_time_and_long_ones_are_long(tmp_path):
    for name in ("one", "two"):
        write_tasks(tmp_path / name, long_words=200)
    long, again = ((tmp_path / name / "long.jsonl").read_text() for name in ("one", "two"))
    assert long == again
    counts = [len(json.loads(line)["text"].split()) for line in long.splitlines()]
    assert (len(counts), max(counts), min(counts)) == (64, 200, 151)  # 200 - 63 x 200 // 256


EVALUATION = """
from tunebook.evaluate.request_model import RequestModel
from tunebook.hardware.detect import detect_machine
import tunebook.evaluate.evaluation as evaluation
print(RequestModel().answer_alone("k", [1, 2]), detect_machine().gpus[0].memory_gib, evaluation._load(5))
"""
TORCH = """
device, dtype = "cpu", "float32"
class cuda:
    is_available = staticmethod(lambda: False)
"""
MODULES = {
    "request_model": """
import torch
class RequestModel:
    batch_size_per_gpu = 8
    class model:
        parameters = lambda: [torch]
    def answer_alone(self, kind, requests):
        return [kind] * len(requests)
""",
    "worker": """
from dataclasses import dataclass, field
@dataclass
class Gpu:
    memory_gib: float = 80.0
@dataclass
class Machine:
    gpus: list = field(default_factory=lambda: [Gpu()])
def detect_machine():
    return Machine()
""",
    "evaluation": "def _load(number):\n    return number\n",
}


def test_calls_are_noted_and_gpus_look_as_small_as_was_asked_for(tmp_path):
    package = tmp_path / "site/tunebook/evaluate"
    package.mkdir(parents=True)
    for file, text in {"__init__": "", "../__init__": "", **MODULES}.items():
        (package / f"{file}.py").write_text(text)
    (tmp_path / "site/torch.py").write_text(TORCH)
    path = os.pathsep.join([str(BENCH / "gpu_calls"), str(tmp_path / "site")])
    environment = {"TUNEBOOK_BENCH_CALLS": str(tmp_path / "calls.jsonl"), "TUNEBOOK_BENCH_GPU_GIB": "2.5"}
    command = [sys.executable, "-c", EVALUATION]
    done = subprocess.run(
        command, env=os.environ | environment | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == "['k', 'k'] 2.5 5"
    line = json.loads((tmp_path / "calls.jsonl").read_text())
    assert (line["kind"], line["requests"], line["batch_size"], line["formats"]) == ("k", 2, 8, {"float32": 1})
