"""Whole sweeps through Hydra, with a small program in the place of `tunebook train`."""

from __future__ import annotations

import csv
import multiprocessing
import os
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands import sweep_planning as planning
from tunebook.commands.sweep import sweep_command
from tunebook.errors import RequestError
from tunebook.hardware.detect import detect_machine
from tunebook.sweep.folder import SweepFolder, working_on
from tunebook.sweep.options import SweepOptions
from tunebook.sweep.trials import Trial

NUM_CORES = len(os.sched_getaffinity(0))
# Writes what a run leaves: a loss that is best for the learning rate 0.2. Fails where the seed is 13; asks its sweep to
# stop where it is 77, and at its very end where it is 55; kills it where it is 99, once; is killed where it is 66, and
# has no room on its disk where it is 31, once each.
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
    signal.pause()
if seed == 66 and is_first:
    os.kill(os.getpid(), signal.SIGKILL)
if seed == 55:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.5)
state = ("failed", 4, "line 17 is broken") if seed == 13 else ("finished", 0, None)
if seed == 31 and is_first:
    state = ("failed", 3, "the disk of /runs is full; free some space")
status = dict(zip(("state", "exit_code", "reason"), state)) | {"seconds": 1.0}
(folder / ".manifest").write_text(json.dumps({"format": 1, "status": status}))
(folder / ".manifest").replace(folder / "manifest.json")  # in one step, as a run does: its sweep may be killed now
sys.exit(status["exit_code"])
"""


def fake_training(trial: Trial, run_folder: Path) -> list[str]:
    values = dict(word.split("=", 1) for word in trial.overrides)
    learning_rate, seed = values["optimizer.learning_rate"], values.get("training.seed", "0")
    return [sys.executable, "-c", FAKE_TRAINING, str(run_folder), learning_rate, seed]


def never(trial: Trial, run_folder: Path) -> list[str]:
    pytest.fail("nothing may run")


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


def started(tmp_path: Path) -> list[str]:
    """The trials in the order in which they were started."""
    return (sweep_folder(tmp_path) / "started").read_text().split()


def table_rows(tmp_path: Path) -> list[dict[str, str]]:
    folder = sweep_folder(tmp_path)
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_runs_every_trial_and_ranks_them(tmp_path: Path, console: Console) -> None:
    assert sweep(tmp_path, console, "optimizer.learning_rate=0.4,0.2", "training.seed=1,0") == 0
    rows = table_rows(tmp_path)
    assert [(row["optimizer.learning_rate"], row["training.seed"]) for row in rows] == [
        ("0.2", "0"), ("0.2", "1"), ("0.4", "0"), ("0.4", "1"),
    ]  # fmt: skip
    assert [row["rank"] for row in rows] == list("1234")
    assert "ranked by final loss" in console.export_text()


def test_a_failed_trial_does_not_stop_the_others(tmp_path: Path, console: Console) -> None:
    assert sweep(tmp_path, console, "optimizer.learning_rate=0.1,0.2", "training.seed=13,0") == 4
    rows = table_rows(tmp_path)
    assert [(row["rank"], row["exit_code"]) for row in rows] == [("1", "0"), ("2", "0"), ("", "4"), ("", "4")]
    assert rows[2]["how_it_ended"] == "failed: line 17 is broken"


def test_sigterm_stops_the_trial_and_still_writes_the_table(tmp_path: Path, console: Console) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert sweep(tmp_path, console, "optimizer.learning_rate=0.1,0.2", "training.seed=0,77") == 6
    rows = table_rows(tmp_path)
    assert [(row["exit_code"], row["how_it_ended"]) for row in rows] == [
        ("0", "finished"),
        ("6", "stopped with the sweep"),
        ("", "not started: the sweep was stopped"),
        ("", "not started: the sweep was stopped"),
    ]
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optimizer.learning_rat=0.1,0.2", r"all 2 trials: .*Did you mean 'optimizer.learning_rate'\?"),
        ("training.global_samples=0,64", r"1 of 2 trials \(training.global_samples=0\): "),
        ("training.seed=1", r"no override lists several values"),
    ],
)
def test_a_bad_sweep_is_refused_before_anything_runs(tmp_path: Path, console: Console, word: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sweep_command("quickstart", [f"outputs={tmp_path}", word], [], console, command_of=never)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_lists_the_trials_and_makes_nothing(tmp_path: Path, console: Console) -> None:
    words = [f"outputs={tmp_path}", "training.seed=5,6"]
    assert sweep_command("quickstart", words, [], console, dry_run=True, command_of=never) == 0
    text = console.export_text()
    assert "2 trials" in text
    assert "training.seed" in text
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_which_trials_do_not_fit(tmp_path: Path, console: Console) -> None:
    words = [f"outputs={tmp_path}", "hardware=volta", "hardware.gpus_per_node=2", "parallelism=ddp,fsdp_offload"]
    assert sweep_command("qwen3b_zero2", words, [], console, dry_run=True, command_of=never) == 0
    (warning,) = [line for line in console.export_text().splitlines() if line.startswith("warning: ")]
    assert warning.startswith("warning: trial-000: by estimate this plan does not fit: ")


def test_parallel_trials_are_ranked_like_others_and_print_to_files(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.4,0.2,0.1", "training.seed=13,0")
    assert sweep(tmp_path, console, *words, launcher="joblib", jobs=NUM_CORES) == 4
    rows = table_rows(tmp_path)
    assert [(row["optimizer.learning_rate"], row["exit_code"]) for row in rows] == [
        ("0.2", "0"), ("0.1", "0"), ("0.4", "0"), ("0.4", "4"), ("0.2", "4"), ("0.1", "4"),
    ]  # fmt: skip
    assert sorted(started(tmp_path)) == [f"trial-{number:03d}" for number in range(6)]
    if NUM_CORES > 1:
        assert (sweep_folder(tmp_path) / "trial-000.log").exists()


def test_parallel_trials_run_at_the_same_time_on_cores_of_their_own(tmp_path: Path, console: Console) -> None:
    # Each waits until all are there: one at a time they would wait for ever.
    meets = (
        "import os, pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[1]); time.sleep(0.5)\n"
        "(folder.parent / f'{folder.name}.cores').write_text(' '.join(map(str, sorted(os.sched_getaffinity(0)))))\n"
        f"while len(list(folder.parent.glob('*.cores'))) < {NUM_CORES}: time.sleep(0.05)\n"
    )
    seeds = ",".join(map(str, range(NUM_CORES + 1)))
    words = [f"outputs={tmp_path}", "hardware=cpu", f"training.seed={seeds}"]
    options = SweepOptions(launcher="joblib")
    code = sweep_command(
        "quickstart",
        words,
        [],
        console,
        options=options,
        command_of=lambda _trial, folder: [sys.executable, "-c", meets, str(folder)],
    )
    assert code == 0
    cores = [file.read_text() for file in sorted(sweep_folder(tmp_path).glob("*.cores"))]
    if NUM_CORES > 1:
        assert sorted(cores[:NUM_CORES]) == sorted(map(str, os.sched_getaffinity(0)))


def test_the_same_command_goes_on_and_repeats_nothing(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.2,0.1", "training.seed=0,77,13")
    assert sweep(tmp_path, console, *words) == 6  # in its second trial
    assert sweep(tmp_path, console, *words) == 6  # in its fifth
    assert started(tmp_path)[3:] == ["trial-002", "trial-003", "trial-004"]
    assert sweep(tmp_path, console, *words) == 4
    # The third, whose data was wrong, is tried again each time: nobody here knows whether it has been put right.
    assert started(tmp_path) == [f"trial-{number:03d}" for number in (0, 1, 1, 2, 3, 4, 2, 4, 5)]
    assert [row["exit_code"] for row in table_rows(tmp_path)] == ["0", "0", "0", "0", "4", "4"]
    assert "1 of 6 trials are done" in console.export_text(clear=False)
    assert console.export_text(clear=False).count("\none at a time\n") == 3  # how it runs is said each time
    assert sweep(tmp_path, console, *words[:1], "training.seed=0,13") == 4  # another sweep, in a folder of its own
    assert len(list((tmp_path / "quickstart").iterdir())) == 2


def test_a_sweep_whose_trials_have_all_finished_starts_anew(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,1")
    for _ in range(2):
        assert sweep(tmp_path, console, *words) == 0
    assert len(list((tmp_path / "quickstart").iterdir())) == 2


def test_trials_that_failed_are_tried_again_and_what_finished_is_not(tmp_path: Path, console: Console) -> None:
    """A file that was away, or a full disk, costs the trials that it met and no others."""
    words = ("optimizer.learning_rate=0.2", "training.seed=0,13,1")
    assert sweep(tmp_path, console, *words) == 4
    assert "the same command tries 1 of 3 trials again" in console.export_text()
    assert sweep(tmp_path, console, *words) == 4
    assert started(tmp_path) == [f"trial-{number:03d}" for number in (0, 1, 2, 1)]


def test_after_a_full_disk_no_further_trial_is_started(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,31,1,2")
    assert sweep(tmp_path, console, *words) == 3
    assert started(tmp_path) == ["trial-000", "trial-001"]
    assert "no further trials were started, since the disk is full; free some space; the same command resumes it" in (
        console.export_text().replace("\n", " ")
    )
    assert sweep(tmp_path, console, *words) == 0  # there is room again
    assert started(tmp_path) == [f"trial-{number:03d}" for number in (0, 1, 1, 2, 3)]


def test_a_host_with_other_memory_goes_on_with_the_same_sweep(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,13")
    for memory_gib in (8.0, 16.0):
        machine = replace(detect_machine(), host_memory_gib=memory_gib)
        monkeypatch.setattr(planning, "detect_machine", lambda machine=machine: machine)
        assert sweep(tmp_path, console, *words) == 4
    assert started(tmp_path) == [f"trial-{number:03d}" for number in (0, 1, 1)]
    assert sweep(tmp_path, console, "hardware.memory_gib=9", *words) == 4  # which was typed
    assert len(list((tmp_path / "quickstart").iterdir())) == 2


def test_training_resume_never_starts_anew(tmp_path: Path, console: Console) -> None:
    for num_sweeps in (1, 2):
        words = ("optimizer.learning_rate=0.2", "training.seed=77,0", "training.resume=never")
        assert sweep(tmp_path, console, *words) == 6
        assert len(list((tmp_path / "quickstart").iterdir())) == num_sweeps
    told = "stopped; the same command without training.resume=never resumes it"
    assert told in console.export_text().replace("\n", " ")
    assert sweep(tmp_path, console, *words[:-1]) == 0  # and does
    assert len(list((tmp_path / "quickstart").iterdir())) == 2


def test_a_request_to_stop_that_comes_when_all_have_finished_stops_nothing(tmp_path: Path, console: Console) -> None:
    assert sweep(tmp_path, console, "optimizer.learning_rate=0.2", "training.seed=0,55") == 0
    assert "stopped" not in console.export_text()


def test_a_killed_trial_is_a_row_and_the_same_command_runs_it_again(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.1,0.2", "training.seed=66,0")
    assert sweep(tmp_path, console, *words) == 1
    rows = table_rows(tmp_path)
    assert [row["how_it_ended"] for row in rows[2:]] == ["failed: its process was killed by signal 9"] * 2
    assert sweep(tmp_path, console, *words) == 0
    assert started(tmp_path)[4:] == ["trial-000", "trial-002"]


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_killed_sweep_goes_on(tmp_path: Path, console: Console, launcher: str) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,99,1,2")
    process = multiprocessing.get_context("fork").Process(
        target=sweep, args=(tmp_path, console, *words), kwargs={"launcher": launcher}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: none of them holds a lock
        process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    done = [file.stem for file in sweep_folder(tmp_path).glob("trial-*.json")]
    assert "trial-001" not in done
    assert sweep(tmp_path, console, *words, launcher=launcher) == 0
    again = started(tmp_path)
    assert all(again.count(name) == 1 for name in done)
    assert again.count("trial-001") == 2
    assert [row["exit_code"] for row in table_rows(tmp_path)] == ["0"] * 4


def test_a_search_runs_its_trials_and_goes_on_after_an_interruption(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=interval(0.01,1.0)", "training.seed=0,13")
    search = {"search": "optuna", "num_trials": 12, "metric": "final_loss"}
    assert sweep(tmp_path, console, *words, **search) == 4
    rows = table_rows(tmp_path)
    losses = [float(row["final_loss"]) for row in rows if row["exit_code"] == "0"]
    assert losses == sorted(losses)
    assert 0 < len(losses) < 12  # some were refused for their data, and the search went on
    assert {row["exit_code"] for row in rows} == {"0", "4"}
    assert len(rows) == 12
    assert sweep(tmp_path, console, *words, **search | {"num_trials": 14}) == 4
    assert sorted(set(started(tmp_path))) == [f"trial-{number:03d}" for number in range(14)]
    assert len(started(tmp_path)) == 14 + 12 - len(losses)  # those that had failed were tried again
    assert "best: trial" in console.export_text()


def test_parallel_trials_of_a_search_are_all_told(tmp_path: Path, console: Console) -> None:
    options = {"search": "optuna", "num_trials": 6, "metric": "final_loss", "launcher": "joblib"}
    assert sweep(tmp_path, console, "optimizer.learning_rate=interval(0.01,1.0)", **options) == 0
    assert sorted(started(tmp_path)) == [f"trial-{number:03d}" for number in range(6)]
    assert [row["rank"] for row in table_rows(tmp_path)] == list("123456")
    journal = (sweep_folder(tmp_path) / "study.jsonl").read_text()
    assert journal.count('"state":1') == 6


def test_a_search_without_any_measurement_says_which_there_are(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=interval(0.01,1.0)", "dataset.validation_share=0.05")
    with pytest.raises(RequestError, match=r"--metric=validation_loss: no trial has it; type --metric=final_loss"):
        sweep(tmp_path, console, *words, search="optuna", num_trials=2)
    assert len(table_rows(tmp_path)) == 2


def test_a_sweep_that_is_at_work_is_not_started_twice(tmp_path: Path, console: Console) -> None:
    words = ("optimizer.learning_rate=0.2", "training.seed=0,77")
    assert sweep(tmp_path, console, *words) == 6
    with (
        working_on(SweepFolder(path=sweep_folder(tmp_path))),
        pytest.raises(RequestError, match=r"this sweep is at work in .*started by another process"),
    ):
        sweep(tmp_path, console, *words)


def test_a_dry_run_of_a_search_shows_what_it_chooses_from(tmp_path: Path, console: Console) -> None:
    words = [f"outputs={tmp_path}", "hardware=cpu", "schedule=cosine,linear"]
    options = SweepOptions(search="optuna", num_trials=3, seed=4)
    code = sweep_command("quickstart", words, [], console, options=options, dry_run=True, command_of=never)
    text = console.export_text()
    assert code == 0
    assert "CategoricalDistribution" not in text
    assert "cosine, linear" in text
    assert "maximize evaluation_score, seed 4" in text
    assert list(tmp_path.iterdir()) == []
