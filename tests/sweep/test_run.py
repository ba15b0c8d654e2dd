"""Whole sweeps through Hydra, with a small program in the place of `tunebook train`."""

from __future__ import annotations

import csv
import os
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.errors import RequestError
from tunebook.sweep.run import sweep_command
from tunebook.sweep.trials import Trial

# Writes what a run leaves: a loss that is best for the learning rate 0.2; fails where the seed is 13.
FAKE_TRAINING = """
import json, os, pathlib, signal, sys
folder, learning_rate, seed = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
folder.mkdir()
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": abs(learning_rate - 0.2) + seed / 1000}))
if seed == 77:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
state = ("failed", 4, "line 17 is broken") if seed == 13 else ("finished", 0, None)
status = dict(zip(("state", "exit_code", "reason"), state))
(folder / "manifest.json").write_text(json.dumps({"format": 1, "status": status}))
sys.exit(status["exit_code"])
"""


def fake_training(trial: Trial, run_folder: Path) -> list[str]:
    values = (trial.swept["optimizer.learning_rate"], trial.swept["training.seed"])
    return [sys.executable, "-c", FAKE_TRAINING, str(run_folder), *values]


def never(trial: Trial, run_folder: Path) -> list[str]:
    pytest.fail("nothing may run")


@pytest.fixture
def console() -> Console:
    return Console(width=160, record=True)


def sweep(tmp_path: Path, console: Console, *words: str) -> int:
    return sweep_command("quickstart", [f"outputs={tmp_path}", *words], [], console, command_of=fake_training)


def table_rows(tmp_path: Path) -> list[dict[str, str]]:
    (folder,) = (tmp_path / "quickstart").iterdir()
    assert folder.name.startswith("sweep-")
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_named(tmp_path: Path, console: Console) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RequestError, match=r"no sweep folder can be made in .*: Permission denied"):
        sweep_command("quickstart", [f"outputs={tmp_path}", "training.seed=5,6"], [], console, command_of=never)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path, console: Console) -> None:
    (tmp_path / "quickstart").write_text("")
    with pytest.raises(RequestError, match=r"no sweep folder can be made in .*quickstart: File exists"):
        sweep_command("quickstart", [f"outputs={tmp_path}", "training.seed=5,6"], [], console, command_of=never)
