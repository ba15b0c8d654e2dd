from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tunebook.config.choices import Generation
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.sweep.folder import SweepFolder
from tunebook.sweep.launching import RunLocally, TrialList, run_trials
from tunebook.sweep.shares import Shares
from tunebook.sweep.trial_process import Stopping, TrialEnd, Watch, write_trial_end
from tunebook.sweep.trials import Trial

TRIALS = [Trial(number=number, overrides=(), swept={"a": str(number)}) for number in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return SweepFolder(path=tmp_path)


def test_a_list_leaves_out_what_is_done(folder: SweepFolder) -> None:
    for number, exit_code in ((0, 0), (1, 1), (2, 7)):
        end = TrialEnd(exit_code=exit_code, seconds=1.0, was_interrupted=False)
        write_trial_end(end, folder.end_file(TRIALS[number]))
    source = TrialList(TRIALS[:4], folder)
    assert [source.next_trial(), source.next_trial(), source.next_trial()] == [TRIALS[1], TRIALS[3], None]
    assert source.trials == TRIALS[:4]


@pytest.mark.parametrize("num_at_once", [1, 3])
def test_every_trial_runs_once_and_so_many_at_a_time(folder: SweepFolder, num_at_once: int) -> None:
    ran: list[int] = []
    most, at_work = 0, 0
    lock, together = threading.Lock(), threading.Barrier(num_at_once)

    def run_one(trial: Trial, watch: Watch | None) -> None:
        nonlocal most, at_work
        with lock:
            at_work += 1
            most = max(most, at_work)
        together.wait(10)  # breaks unless as many as that are here
        with lock:
            at_work -= 1
            ran.append(trial.number)

    run_trials(TrialList(TRIALS, folder), run_one, Stopping(), num_at_once)
    assert sorted(ran) == list(range(6))
    assert most == num_at_once


@pytest.mark.parametrize("num_at_once", [1, 2])
def test_no_trial_starts_after_a_request_to_stop(folder: SweepFolder, num_at_once: int) -> None:
    stopping = Stopping()
    ran: list[int] = []

    def run_one(trial: Trial, watch: Watch | None) -> None:
        ran.append(trial.number)
        stopping.request()

    run_trials(TrialList(TRIALS, folder), run_one, stopping, num_at_once)
    assert 1 <= len(ran) <= num_at_once


@pytest.mark.parametrize("num_at_once", [1, 2])
def test_an_error_of_the_sweep_itself_lets_the_others_save_and_is_raised(folder: SweepFolder, num_at_once: int) -> None:
    stopping = Stopping()

    def run_one(trial: Trial, watch: Watch | None) -> None:
        raise RequestError("the disk is gone")

    with pytest.raises(RequestError, match="the disk is gone"):
        run_trials(TrialList(TRIALS, folder), run_one, stopping, num_at_once)
    assert stopping.num_requests >= 1


def test_values_that_break_a_rule_together_are_a_row_and_no_process(folder: SweepFolder) -> None:
    def config_of(_trial: Trial) -> RunConfig:
        raise RequestError("7 does not divide 16")

    run = runner(folder, "raise SystemExit('it ran')", config_of=config_of)
    run(TRIALS[0], None)
    end = folder.end_of(TRIALS[0])
    assert end == TrialEnd(exit_code=2, seconds=0.0, was_interrupted=False, reason="7 does not divide 16")


def test_a_trial_side_by_side_prints_to_its_file_and_sees_its_share(
    folder: SweepFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(folder, "import os; print('threads', os.environ['OMP_NUM_THREADS'])", Shares([], [0], 2))
    run(TRIALS[0], None)
    assert folder.output(TRIALS[0]).read_text() == "threads 1\n"
    assert "trial 1 of 6: a=0" in capsys.readouterr().out


def test_the_seconds_of_a_trial_that_went_on_are_those_of_all_its_turns(folder: SweepFolder) -> None:
    earlier = TrialEnd(exit_code=6, seconds=1000.0, was_interrupted=True)
    write_trial_end(earlier, folder.end_file(TRIALS[0]))
    runner(folder, "pass")(TRIALS[0], None)
    end = folder.end_of(TRIALS[0])
    assert end is not None
    assert (end.exit_code, end.was_interrupted, end.seconds // 100) == (0, False, 10)
    assert earlier.after(0.26).seconds == 1000.3


# Says what it sees, and stays until as many trials as run at a time are there.
SEES = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder.parent / f"{folder.name}.sees").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
while len(list(folder.parent.glob("*.sees"))) < 2: time.sleep(0.02)
"""


def test_trials_that_run_together_see_gpus_of_their_own(folder: SweepFolder) -> None:
    run = runner(folder, SEES, Shares(["GPU-a", "GPU-b", "GPU-c", "GPU-d"], [0, 1], 2), num_gpus=2)
    run_trials(TrialList(TRIALS[:2], folder), run, run.stopping, 2)
    seen = [file.read_text() for file in sorted(folder.path.glob("*.sees"))]
    assert sorted(",".join(seen).split(",")) == ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    assert [text.count("GPU") for text in seen] == [2, 2]


def runner(
    folder: SweepFolder,
    program: str,
    shares: Shares | None = None,
    *,
    config_of: Callable[[Trial], RunConfig] | None = None,
    num_gpus: int = 0,
) -> RunLocally:
    """What runs a program in the place of each trial, on a CPU or so many GPUs."""
    config = compose("quickstart", ["hardware=cpu"]).config
    config.hardware.generation = Generation.hopper if num_gpus else Generation.cpu
    config.hardware.gpus_per_node = num_gpus or 1
    return RunLocally(
        folder=folder,
        command_of=lambda _trial, run_folder: [sys.executable, "-c", program, str(run_folder)],
        config_of=config_of or (lambda _trial: config),
        shares=shares or Shares([], [0], 1),
        stopping=Stopping(),
        num_trials=6,
        prints_to_files=shares is not None,
    )
