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
    arguments = [str(study.run_folder(trial.number)), values["optimizer.learning_rate"], values["training.seed"]]
    return [sys.executable, "-S", "-c", FAKE_TRAINING, *arguments]


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


def test_failed_and_killed_trials_stop_no_other_and_the_same_command_tries_them_again(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=13,66,1,0")
    assert sweep(tmp_path, console, *words) == 4
    rows = table_rows(tmp_path)
    assert [(row["rank"], row["training.seed"], row["exit_code"]) for row in rows] == [
        ("1", "0", "0"),
        ("2", "1", "0"),
        ("", "13", "4"),
        ("", "66", "1"),
    ]
    assert rows[2]["how_it_ended"] == "failed (exit code 4): line 17 is broken (more in trial-000.log)"
    assert "killed by signal 9" in rows[3]["how_it_ended"]
    assert "best: trial-003, again: tunebook train quickstart" in console.export_text()
    machine = replace(detect_machine(), host_memory_gib=16.5)  # of another host
    monkeypatch.setattr(module, "detect_machine", lambda: machine)
    assert sweep(tmp_path, console, *words) == 4
    assert started(tmp_path) == [0, 1, 2, 3, 0, 1]
    assert [row["exit_code"] for row in table_rows(tmp_path)] == ["0", "0", "0", "4"]


@pytest.mark.parametrize(
    ("word", "problem_id", "trials"),
    [
        ("optimizer.learning_rat=0.1,0.2", "unknown-key", "2 of 2 trials"),
        ("training.global_samples=0,64", "out-of-range", "1 of 2 trials (training.global_samples=0): "),
    ],
)
def test_a_bad_sweep_is_refused_before_anything_runs(
    tmp_path: Path, console: Console, word: str, problem_id: str, trials: str
) -> None:
    with pytest.raises(RequestError) as raised:
        sweep(tmp_path, console, word)
    assert raised.value.problem_id == problem_id
    assert trials in raised.value.message
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


def test_a_stopped_sweep_writes_its_table_and_the_same_command_resumes_it(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,77,1")
    handler = signal.getsignal(signal.SIGTERM)
    assert sweep(tmp_path, console, *words) == 6
    assert signal.getsignal(signal.SIGTERM) is handler
    assert [(row["exit_code"], row["how_it_ended"]) for row in table_rows(tmp_path)] == [
        ("0", "finished"),
        ("6", "stopped by SIGTERM"),
        ("", ""),
    ]
    with working_in(sweep_folder(tmp_path)), pytest.raises(RequestError) as raised:
        sweep(tmp_path, console, *words)
    assert raised.value.problem_id == "run-is-running"
    assert sweep(tmp_path, console, *words) == 0
    assert started(tmp_path) == [0, 1, 1, 2]
    assert "2 of 3 trials to run" in console.export_text()
    assert sweep(tmp_path, console, *words, metric="seconds") == 0  # the table again
    assert started(tmp_path) == [0, 1, 1, 2]
    assert "ranked by seconds" in console.export_text()


def test_training_resume_never_starts_another_sweep(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=choice(77)", "training.resume=never")
    for num_sweeps in (1, 2):
        assert sweep(tmp_path, console, *words) == 6
        assert len(list((tmp_path / "quickstart").iterdir())) == num_sweeps
    assert sweep(tmp_path, console, *words[:-1]) == 0  # the newer one
    assert sweep(tmp_path, console, words[0], "training.seed=choice(55)") == 0  # another one
    assert len(list((tmp_path / "quickstart").iterdir())) == 3
    assert console.export_text().count("stopped;") == 2, "a request after the end of the last trial stops nothing"


def test_a_killed_sweep_resumes(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,99,1")
    process = multiprocessing.get_context("fork").Process(
        target=sweep, args=(tmp_path, console, *words), kwargs={"jobs": 2}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads: none of them holds a lock
        process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    done = [json.loads(file.read_text())["status"]["state"] for file in sweep_folder(tmp_path).glob("*/manifest.json")]
    assert len(done) < 3
    assert sweep(tmp_path, console, *words, jobs=2) == 0
    assert started(tmp_path).count(1) == 2
    assert len(started(tmp_path)) == 4
    assert [row["exit_code"] for row in table_rows(tmp_path)] == ["0"] * 3


def test_a_search_runs_its_trials_side_by_side_and_gets_more(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=interval(0.01,1.0)", "training.seed=choice(0)")
    assert sweep(tmp_path, console, *words, num_trials=3, jobs=3) == 0
    assert [row["rank"] for row in table_rows(tmp_path)] == list("123")
    losses = [float(row["final_loss"]) for row in table_rows(tmp_path)]
    assert losses == sorted(losses)
    assert sweep(tmp_path, console, *words, num_trials=4) == 0
    assert sorted(started(tmp_path)) == [*range(4)]


RATE = "optimizer.learning_rate=tag(log,interval(1e-5,1e-3))"
PAIRS = ("method=dpo", "dataset=synthetic", "dataset.synthetic.pairs=true", "evaluation=none")


def machine_with(num_gpus: int) -> Machine:
    gpu = {"name": "H200", "memory_gib": 139.8, "compute_capability": (9, 0), "generation": Generation.hopper}
    gpus = [Gpu(**gpu, index=number, uuid=f"GPU-{number}") for number in range(num_gpus)]  # type: ignore[arg-type]
    return Machine(gpus=gpus, driver="580.65", num_cpus=16, host_memory_gib=500.0)


def planned(*words: str, num_gpus: int = 0, **options: Any) -> Any:
    return plan_sweep("quickstart", list(words), [], SweepOptions(**options), machine_with(num_gpus), is_started=False)


@pytest.mark.parametrize(
    ("overrides", "options", "metric"),
    [
        ((), {}, "evaluation_score"),
        (("evaluation=none", "dataset.validation_share=0.05"), {}, "validation_loss"),
        (("evaluation=none",), {"prune": 5}, "final_loss"),
        ((), {"metric": "seconds"}, "seconds"),
        ((*PAIRS, "method.beta=0.1,0.2"), {"metric": "final_loss"}, "final_loss"),
    ],
)
def test_the_metric_is_the_most_telling_that_all_trials_measure(
    overrides: tuple[str, ...], options: dict[str, Any], metric: str
) -> None:
    assert planned("hardware=cpu", RATE, *overrides, num_trials=3, **options)[0].metric == metric


@pytest.mark.parametrize(
    ("overrides", "options", "problem_id"),
    [
        (("evaluation=none,quickstart",), {"metric": "evaluation_score"}, "sweep-metric"),
        ((*PAIRS, "method.beta=0.1,0.2"), {}, "sweep-metric"),
        (("training.seed=0,1",), {"prune": 5}, "sweep-option"),
        (("optimizer.learning_rate=1e-3,2e-3",), {"seed": 1}, "sweep-option"),
        (("training.seed=0,1", "launcher=slurm", "hardware.num_nodes=2", "parallelism=ddp"), {}, "sweep-array"),
        (("training.seed=0,1", "launcher=slurm", "launcher.container_image=a.sqsh"), {}, "sweep-array"),
        (("launcher=slurm", "launcher.partition=a,b"), {}, "sweep-array"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused(
    overrides: tuple[str, ...], options: dict[str, Any], problem_id: str
) -> None:
    with pytest.raises(RequestError) as raised:
        planned("hardware=cpu", "hardware.gpus_per_node=1", *overrides, **options)
    assert raised.value.problem_id == problem_id


def test_a_warning_of_several_trials_is_one() -> None:
    warnings = planned("hardware=cpu", "hardware.gpus_per_node=1", "peft.rank=8,16")[2]
    assert [(warning.id, warning.key) for warning in warnings] == [("setting-ignored", "peft.rank")]


def test_trials_side_by_side_share_the_gpus() -> None:
    words = ["training.seed=choice(0)", "parallelism=ddp", "packing=padded", "model.compile_layers=false"]
    for jobs, share in ((1, 8), (3, 2)):
        assert planned(*words, num_gpus=8, jobs=jobs)[1].hardware.gpus_per_node == share
    words.append("hardware.gpus_per_node=4")
    with pytest.raises(RequestError) as raised:
        plan_sweep("quickstart", words, [], SweepOptions(jobs=3), machine_with(8), is_started=True)
    assert raised.value.problem_id == "sweep-jobs"


def test_a_sweep_of_slurm_trials_is_an_array_unless_each_waits_for_a_job_of_its_own() -> None:
    words = ("hardware=cpu", "hardware.gpus_per_node=1", "training.seed=0,1", "launcher=slurm")
    assert planned(*words)[0].is_array
    assert not planned(*words, "launcher.wait=true", "hardware.num_nodes=2", "parallelism=ddp")[0].is_array
