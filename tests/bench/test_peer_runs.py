"""What a peer's program printed and how it ended, whatever it did; nothing of it is left running."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH))

from peer_runs import Attempt, Ended, last_error, medians, peer_environment, run, run_all  # noqa: E402


def attempt(code, name="one", **keys):
    return Attempt(name=name, command=[sys.executable, "-c", code], environment=dict(os.environ), line=keys)


def test_one_failure_is_a_line_and_does_not_end_the_rest(tmp_path, capsys):
    results = tmp_path / "peer.jsonl"
    attempts = [attempt("raise ValueError('no GPU here')", gpus=4), attempt("print('tps: 7')", name="two")]
    run_all(attempts, results, 60, lambda made, ended: {"said": ended.text.count("tps: 7")})
    first, second = map(json.loads, results.read_text().splitlines())
    assert (first["name"], first["gpus"], first["exit_code"], first["error"]) == (
        "one", 4, 1, "ValueError: no GPU here",
    )  # fmt: skip
    assert (second["name"], second["exit_code"], second["said"]) == ("two", 0, 1)
    assert "error" not in second
    assert "no GPU here" in results.with_suffix(".log.txt").read_text()
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_when_the_time_is_up_the_launched_processes_end_too(tmp_path):
    file = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    code = (
        f"import pathlib, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"while not pathlib.Path({str(file)!r}).exists(): time.sleep(0.01)\nprint('started', flush=True)\n"
        "time.sleep(600)"
    )
    ended = run(attempt(code), 3)
    assert ended.exit_code is None
    assert last_error(ended, 3) == "its 3 s were up"
    if file.exists():  # else the machine was too busy to start it at all
        pid = int(file.read_text() or 0)
        deadline = time.monotonic() + 20
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_running(pid)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory.\ntorch.distributed.X.ChildFailedError: \nbye",
         "torch.OutOfMemoryError: CUDA out of memory."),
        ("one\nSegmentation fault\n", "Segmentation fault"),
        ("", "it printed nothing"),
    ],
)  # fmt: skip
def test_the_error_is_what_the_rank_said_not_what_the_launcher_says_of_it(text, error):
    assert last_error(Ended(1, 1.0, text), 60) == error


def test_the_speed_is_the_median_after_ten_steps():
    assert medians([1.0] * 10 + [3.0, 5.0, 100.0]) == {"timed_steps": 3, "tokens_per_second_per_gpu": 5.0}
    assert medians([1.0] * 10) == {"timed_steps": 0}


def test_a_peer_imports_its_own_packages_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    places = peer_environment(tmp_path, {"HF_DATASETS_CACHE": "/cache"})["PYTHONPATH"].split(os.pathsep)
    assert places == [str(tmp_path), str(BENCH), "/ours"]
    assert peer_environment(None, {})["PYTHONPATH"].split(os.pathsep) == [str(BENCH), "/ours"]
