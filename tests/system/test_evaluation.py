"""An evaluation that is killed, or that several processes share: the real worker on a small random model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import Running
from tunebook.config.choices import Attention, Compute, Generation, PackingMode
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml

TASKS = Path(__file__).parents[1] / "evaluate" / "tasks"
KINDS = ("choice", "next_word", "continuation", "whole_text")
# A task's function that does not come to an end before a file is there.
WAITING = """
import time
from pathlib import Path

def score(doc, results):
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.05)
    return {"exact_match": float(results[0] == doc["rest"])}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of the quickstart in which nothing has been trained, to be evaluated on one task of each kind."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for file in TASKS.iterdir():
        text = file.read_text().replace("FOLDER", str(folder)).replace("CACHE", str(tmp_path / "cache"))
        (folder / file.name).write_text(text)
    config = compose("quickstart", ["training.seed=3"]).config
    config.attention.implementation = Attention.sdpa
    config.precision.compute = Compute.fp32
    config.packing.mode = PackingMode.isolated
    config.hardware.generation = Generation.cpu
    config.evaluation.tasks = [str(folder / f"{kind}.yaml") for kind in KINDS]
    made = tmp_path / "run"
    made.mkdir()
    (made / "run.yaml").write_text(config_to_yaml(config))
    return made


@pytest.fixture
def worker(run: Path, project_root: Path, tmp_path: Path) -> Callable[..., Running]:
    """`worker("name", "--processes", "2")`: start an evaluation of that name."""

    def start(when: str, *words: str) -> Running:
        command = [sys.executable, "-m", "tunebook.evaluate", "--run", str(run), "--when", when, *words]
        return Running(command, dict(os.environ), project_root, tmp_path / f"{when}-{time.monotonic_ns()}.log")

    return start


def record(run: Path, when: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluation" / f"{when}.json").read_text())
    return found


def answers(run: Path, when: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluation" / f"{when}-answers.jsonl").read_text().splitlines()]


def test_after_a_kill_or_by_two_processes_it_comes_to_the_same(run: Path, worker: Callable[..., Running]) -> None:
    folder = run.parent / "tasks"
    (folder / "waiting.py").write_text(WAITING)
    task = folder / "continuation.yaml"
    task.write_text(task.read_text() + "process_results: !function waiting.score\n")
    parts = run / "evaluation" / "parts"

    killed = worker("before")
    killed.wait_for(lambda: len(list(parts.glob("*.json"))) == 3, timeout_s=600)
    killed.process.send_signal(signal.SIGKILL)
    assert killed.wait(timeout_s=300).exit_code == -signal.SIGKILL
    assert not (run / "evaluation" / "before.json").exists()
    kept = {file: file.stat().st_mtime_ns for file in parts.iterdir()}

    (folder / "go").touch()
    ended = worker("before").wait(timeout_s=600)
    assert ended.exit_code == 0, ended.output
    assert "kept answers were used for choice, next_word, continuation" in ended.output
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert record(run, "before")["reused"] == ["choice", "next_word", "continuation"]

    shutil.rmtree(parts)
    whole = worker("whole").wait(timeout_s=600)
    assert whole.exit_code == 0, whole.output
    require_same(run, "before", "whole")

    shutil.rmtree(parts)
    ended = worker("two", "--processes", "2").wait(timeout_s=600)
    assert ended.exit_code == 0, ended.output
    assert "is loaded on the CPU, 2 processes" in ended.output
    require_same(run, "whole", "two")


def require_same(run: Path, one: str, two: str) -> None:
    """Two evaluations agree: in numbers that are computed anew up to the order of their sums, 1e-5."""
    first, second = record(run, one)["tasks"], record(run, two)["tasks"]
    assert list(first) == list(second)
    for name in ("choice", "next_word", "continuation"):
        assert second[name] == first[name]
    assert second["whole_text"]["value"] == pytest.approx(first["whole_text"]["value"], rel=1e-5)
    for single, shared in zip(answers(run, one), answers(run, two), strict=True):
        if single["task"] == "continuation":
            assert shared == single
        assert (shared["answer"], shared["correct"]) == (single["answer"], single["correct"]) or not single["correct"]
        if single["task"] != "continuation":
            assert shared["responses"] == pytest.approx(single["responses"], rel=1e-5)


def test_a_process_that_is_killed_ends_the_evaluation_and_finished_tasks_are_kept(
    run: Path, worker: Callable[..., Running]
) -> None:
    folder = run.parent / "tasks"
    (folder / "waiting.py").write_text(WAITING)
    task = folder / "continuation.yaml"  # the third
    task.write_text(task.read_text() + "process_results: !function waiting.score\n")
    running = worker("before", "--processes", "2")
    running.wait_for(lambda: "continuation (task 3 of 4)" in running.output, timeout_s=600)
    os.kill(processes_of(running)[1], signal.SIGKILL)
    ended = running.wait(timeout_s=600)
    assert ended.exit_code == 1, ended.output
    assert "one of its processes was killed by signal 9" in ended.output
    (folder / "go").touch()
    again = worker("before").wait(timeout_s=600)
    assert again.exit_code == 0, again.output
    assert "kept answers were used for choice, next_word" in again.output


def processes_of(running: Running) -> list[int]:
    """The processes that a worker has started."""
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    found = []
    for child in children:
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if b"--multiprocessing-fork" in words:
            found.append(int(child))
    return found
