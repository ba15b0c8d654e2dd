"""Whole sweeps, with a small program in the place of `tunebook train`."""

from __future__ import annotations

import csv
import json
import multiprocessing
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from rich.console import Console

from tunebook.commands import sweep as module
from tunebook.commands.sweep import SweepOptions, plan_sweep, sweep_command
from tunebook.config.choices import Generation
from tunebook.errors import RequestError
from tunebook.hardware.detect import Gpu, Machine, detect_machine
from tunebook.record.run_folder import working_in
from tunebook.sweep.study import Study

# Writes what a run leaves: a loss that is best for the learning rate 0.2. Fails where the seed is 13; asks its sweep to
# stop where it is 77, and at its very end where it is 55; kills it where it is 99, once; is killed where it is 66,
# once.
FAKE_TRAINING = """
import json, os, pathlib, signal, sys, time
folder, learning_rate, seed = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
is_first = not folder.exists()
folder.mkdir(exist_ok=True)
with (folder.parent / "started").open("a") as file:
    file.write(folder.name + "\\n")
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": abs(learning_rate - 0.2) + seed / 1000}))
if seed == 77 and is_first:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
if seed == 99 and is_first:
    os.kill(os.getppid(), signal.SIGKILL)
    sys.exit(sys.stdin.read())  # its input ends with the sweep
if seed == 66 and is_first:
    os.kill(os.getpid(), signal.SIGKILL)
if seed == 55:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.5)
state = ("failed", 4, "line 17 is broken") if seed == 13 else ("finished", 0, None)
status = dict(zip(("state", "exit_code", "reason"), state)) | {"seconds": 1.0}
(folder / ".manifest").write_text(json.dumps({"format": 1, "status": status}))
(folder / ".manifest").replace(folder / "manifest.json")  # in one step, as a run does: its sweep may be killed now
sys.exit(status["exit_code"])
"""


def fake_training(study: Study, trial: optuna.Trial) -> list[str]:
    values = dict(word.split("=", 1) for word in study.sweep.space.overrides(trial.params))
    learning_rate, seed = values["optimizer.learning_rate"], values.get("training.seed", "0")
    return [sys.executable, "-c", FAKE_TRAINING, str(study.run_folder(trial.number)), learning_rate, seed]


@pytest.fixture
def console() -> Console:
    return Console(width=160, record=True)


def sweep(tmp_path: Path, console: Console, *words: str, **options: Any) -> int:
    words = (f"outputs={tmp_path}", "hardware=cpu", "evaluation=none", *words)
    return sweep_command(
        "quickstart", list(words), [], console, options=SweepOptions(**options), command_of=fake_training
    )


def sweep_folder(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "quickstart").iterdir()
    assert folder.name.startswith("sweep-")
    return folder


def started(tmp_path: Path) -> list[int]:
    """The trials in the order in which they were started."""
    return [int(name[6:]) for name in (sweep_folder(tmp_path) / "started").read_text().split()]


def table_rows(tmp_path: Path) -> list[dict[str, str]]:
    with (sweep_folder(tmp_path) / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_runs_every_trial_and_ranks_them(tmp_path: Path, console: Console) -> None:
    assert sweep(tmp_path, console, "optimizer.learning_rate=0.4,0.2", "training.seed=1,0") == 0
    rows = table_rows(tmp_path)
    assert [(row["optimizer.learning_rate"], row["training.seed"]) for row in rows] == [
        ("0.2", "0"), ("0.2", "1"), ("0.4", "0"), ("0.4", "1"),
    ]  # fmt: skip
    assert [row["rank"] for row in rows] == list("1234")
    text = console.export_text()
    assert "ranked by final loss" in text
    assert "best: trial-003, again: tunebook train quickstart" in text


def test_a_failed_trial_does_not_stop_the_others_and_the_same_command_tries_it_again(
    tmp_path: Path, console: Console
) -> None:
    words = ("optimizer.learning_rate=0.1,0.2", "training.seed=13,0")
    assert sweep(tmp_path, console, *words) == 4
    rows = table_rows(tmp_path)
    assert [(row["rank"], row["exit_code"]) for row in rows] == [("1", "0"), ("2", "0"), ("", "4"), ("", "4")]
    assert rows[2]["how_it_ended"] == "failed (exit code 4): line 17 is broken (more in trial-000.log)"
    assert "the same command tries 2 of 4 trials again" in console.export_text()
    assert sweep(tmp_path, console, *words) == 4
    assert started(tmp_path) == [0, 1, 2, 3, 0, 2]


def test_sigterm_stops_the_trial_and_still_writes_the_table(tmp_path: Path, console: Console) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert sweep(tmp_path, console, "optimizer.learning_rate=0.1,0.2", "training.seed=0,77") == 6
    assert [(row["exit_code"], row["how_it_ended"]) for row in table_rows(tmp_path)] == [
        ("0", "finished"),
        ("6", "stopped by SIGTERM"),
        ("", ""),
        ("", ""),
    ]
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(
    ("word", "problem_id", "named"),
    [
        ("optimizer.learning_rat=0.1,0.2", "unknown-key", "2 of 2 trials"),
        ("training.global_samples=0,64", "out-of-range", "1 of 2 trials (training.global_samples=0): "),
        ("training.seed=1", "sweep-without-values", ""),
        ("optimizer.learning_rate=interval(0,1)", "sweep-range", ""),
    ],
)
def test_a_bad_sweep_is_refused_before_anything_runs(
    tmp_path: Path, console: Console, word: str, problem_id: str, named: str
) -> None:
    with pytest.raises(RequestError) as raised:
        sweep(tmp_path, console, word)
    assert raised.value.problem_id == problem_id
    assert named in raised.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_lists_the_trials_and_makes_nothing(tmp_path: Path, console: Console) -> None:
    words = [f"outputs={tmp_path}", "training.seed=5,6"]
    assert sweep_command("quickstart", words, [], console, dry_run=True) == 0
    words = [f"outputs={tmp_path}", "schedule=cosine,linear"]
    options = SweepOptions(num_trials=3, seed=4)
    assert sweep_command("quickstart", words, [], console, options=options, dry_run=True) == 0
    text = console.export_text()
    for expected in ("2 trials", "training.seed", "3 trials, 1 at a time, over schedule", "evaluation_score, seed 4"):
        assert expected in text
    assert list(tmp_path.iterdir()) == []


def test_the_same_command_resumes_and_repeats_nothing(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.2,0.1", "training.seed=0,77,13")
    assert sweep(tmp_path, console, *words) == 6  # in its second trial
    assert sweep(tmp_path, console, *words) == 6  # in its fifth
    assert sweep(tmp_path, console, *words) == 4
    assert started(tmp_path) == [0, 1, 1, 2, 3, 4, 2, 4, 5]  # the third, whose data is wrong, is tried each time
    assert [row["exit_code"] for row in table_rows(tmp_path)] == ["0", "0", "0", "0", "4", "4"]
    assert "5 of 6 trials to run" in console.export_text(clear=False)
    assert sweep(tmp_path, console, *words[:1], "training.seed=0,13") == 4  # another sweep, in a folder of its own
    assert len(list((tmp_path / "quickstart").iterdir())) == 2


def test_a_sweep_whose_trials_have_all_finished_prints_its_table_again(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,1")
    assert sweep(tmp_path, console, *words) == 0
    assert sweep(tmp_path, console, *words, metric="seconds") == 0
    assert started(tmp_path) == [0, 1]
    assert "ranked by seconds" in console.export_text()


def test_training_resume_never_starts_another_sweep(tmp_path: Path, console: Console) -> None:
    for num_sweeps in (1, 2):
        words = ("optimizer.learning_rate=0.2", "training.seed=77,0", "training.resume=never")
        assert sweep(tmp_path, console, *words) == 6
        assert len(list((tmp_path / "quickstart").iterdir())) == num_sweeps
    hint = "stopped; the same command without training.resume=never resumes it"
    assert hint in console.export_text().replace("\n", " ")
    assert sweep(tmp_path, console, *words[:-1]) == 0  # the newer one
    assert len(list((tmp_path / "quickstart").iterdir())) == 2


def test_a_host_with_other_memory_resumes_the_same_sweep(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,13")
    for memory_gib in (8.0, 16.0):
        machine = replace(detect_machine(), host_memory_gib=memory_gib)
        monkeypatch.setattr(module, "detect_machine", lambda machine=machine: machine)
        assert sweep(tmp_path, console, *words) == 4
    assert started(tmp_path) == [0, 1, 1]


def test_a_request_to_stop_that_comes_when_all_have_finished_stops_nothing(tmp_path: Path, console: Console) -> None:
    assert sweep(tmp_path, console, "optimizer.learning_rate=0.2", "training.seed=0,55") == 0
    assert "stopped" not in console.export_text()


def test_a_killed_trial_is_a_row_and_the_same_command_runs_it_again(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.1,0.2", "training.seed=66,0")
    assert sweep(tmp_path, console, *words) == 1
    assert all("killed by signal 9" in row["how_it_ended"] for row in table_rows(tmp_path)[2:])
    assert sweep(tmp_path, console, *words) == 0
    assert started(tmp_path)[4:] == [0, 2]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_sweep_resumes(tmp_path: Path, console: Console, jobs: int) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,99,1,2")
    process = multiprocessing.get_context("fork").Process(
        target=sweep, args=(tmp_path, console, *words), kwargs={"jobs": jobs}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads: none of them holds a lock
        process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    done = [json.loads(file.read_text())["status"]["state"] for file in sweep_folder(tmp_path).glob("*/manifest.json")]
    assert len(done) < 4
    assert sweep(tmp_path, console, *words, jobs=jobs) == 0
    assert started(tmp_path).count(1) == 2
    assert len(started(tmp_path)) == 5
    assert [row["exit_code"] for row in table_rows(tmp_path)] == ["0"] * 4


def test_a_search_runs_its_trials_and_gets_more(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=interval(0.01,1.0)", "training.seed=0,13")
    assert sweep(tmp_path, console, *words, num_trials=12) == 4
    rows = table_rows(tmp_path)
    losses = [float(row["final_loss"]) for row in rows if row["exit_code"] == "0"]
    assert losses == sorted(losses)
    assert 0 < len(losses) < len(rows) == 12  # some failed for their data, and the search continued
    assert sweep(tmp_path, console, *words, num_trials=14) == 4
    assert sorted(set(started(tmp_path))) == [*range(14)]
    assert len(started(tmp_path)) == 14 + 12 - len(losses)  # those that had failed were tried again


def test_parallel_trials_of_a_search_all_count(tmp_path: Path, console: Console) -> None:
    assert sweep(tmp_path, console, "optimizer.learning_rate=interval(0.01,1.0)", num_trials=6, jobs=3) == 0
    assert sorted(started(tmp_path)) == [*range(6)]
    assert [row["rank"] for row in table_rows(tmp_path)] == list("123456")


def test_a_sweep_in_the_folder_of_one_at_work_is_refused(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,77")
    assert sweep(tmp_path, console, *words) == 6
    with working_in(sweep_folder(tmp_path)), pytest.raises(RequestError) as raised:
        sweep(tmp_path, console, *words)
    assert raised.value.problem_id == "run-is-running"


RATE = "optimizer.learning_rate=tag(log,interval(1e-5,1e-3))"
SMALL = ("model=qwen25_05b", "model.weights=random", "dataset=synthetic", "training.global_samples=64")


def machine_with(num_gpus: int) -> Machine:
    gpu = {"name": "H200", "memory_gib": 139.8, "compute_capability": (9, 0), "generation": Generation.hopper}
    gpus = [Gpu(**gpu, index=number, uuid=f"GPU-{number}") for number in range(num_gpus)]  # type: ignore[arg-type]
    return Machine(gpus=gpus, driver="580.65", num_cpus=16, host_memory_gib=500.0)


def planned(*words: str, num_gpus: int = 0, recipe: str | None = "quickstart", **options: Any) -> Any:
    return plan_sweep(recipe, list(words), [], SweepOptions(**options), machine_with(num_gpus), is_started=False)


@pytest.mark.parametrize(
    ("words", "options", "metric"),
    [
        ((), {}, "evaluation_score"),
        (("evaluation=none", "dataset.validation_share=0.05"), {}, "validation_loss"),
        (("evaluation=none",), {"prune": 5}, "final_loss"),
        ((), {"metric": "seconds"}, "seconds"),
    ],
)
def test_the_metric_is_the_most_telling_that_all_trials_measure(
    words: tuple[str, ...], options: dict[str, Any], metric: str
) -> None:
    assert planned("hardware=cpu", RATE, *words, num_trials=3, **options)[0].metric == metric


@pytest.mark.parametrize(
    ("words", "options", "problem_id"),
    [
        (("evaluation=none,quickstart",), {"metric": "evaluation_score"}, "sweep-metric"),
        (("training.seed=0,1",), {"metric": "los"}, "sweep-metric"),
        (("training.seed=0,1",), {"prune": 5}, "sweep-option"),
        (("training.seed=0,1", "launcher=slurm", "hardware.num_nodes=2", "parallelism=ddp"), {}, "sweep-array"),
        (("training.seed=0,1", "launcher=slurm", "launcher.container_image=a.sqsh"), {}, "sweep-array"),
        (("launcher=slurm", "launcher.partition=a,b"), {}, "sweep-array"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused(words: tuple[str, ...], options: dict[str, Any], problem_id: str) -> None:
    with pytest.raises(RequestError) as raised:
        planned("hardware=cpu", "hardware.gpus_per_node=1", *words, **options)
    assert raised.value.problem_id == problem_id


@pytest.mark.parametrize(("jobs", "each"), [(1, 8), (2, 4), (3, 2), (8, 1)])
def test_trials_side_by_side_are_planned_for_their_share_of_the_gpus(jobs: int, each: int) -> None:
    _, config = planned(*SMALL, "training.seed=0,1", recipe=None, num_gpus=8, jobs=jobs)
    assert config.hardware.gpus_per_node == each


@pytest.mark.parametrize(("num_gpus", "each", "jobs"), [(1, 1, 2), (8, 4, 3)])
def test_more_trials_than_the_gpus_hold_are_refused(num_gpus: int, each: int, jobs: int) -> None:
    words = [*SMALL, "training.seed=0,1", "parallelism=ddp", f"hardware.gpus_per_node={each}"]
    with pytest.raises(RequestError) as raised:
        plan_sweep(None, words, [], SweepOptions(jobs=jobs), machine_with(num_gpus), is_started=True)
    assert raised.value.problem_id == "sweep-jobs"


def test_a_sweep_of_slurm_trials_is_an_array_unless_each_waits_for_a_job_of_its_own() -> None:
    words = ("hardware=cpu", "hardware.gpus_per_node=1", "training.seed=0,1", "launcher=slurm")
    assert planned(*words)[0].is_array
    assert not planned(*words, "launcher.wait=true", "hardware.num_nodes=2", "parallelism=ddp")[0].is_array
