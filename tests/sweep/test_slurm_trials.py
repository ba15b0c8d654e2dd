"""Trials as Slurm jobs, with answers in the place of Slurm; tests/system/cluster has a real one."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import submitit
from submitit.core.utils import FailedJobError

from tunebook.config.choices import LauncherName
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.errors import RequestError, TunebookError
from tunebook.launch.slurm import client
from tunebook.launch.slurm.client import JobState
from tunebook.sweep import slurm_trials as module
from tunebook.sweep.folder import SweepFolder
from tunebook.sweep.slurm_job import TrialJob
from tunebook.sweep.slurm_trials import RunInSlurm, _Executor, _minutes
from tunebook.sweep.stopping import Stopping
from tunebook.sweep.trial_process import TrialEnd, write_trial_end
from tunebook.sweep.trials import Trial

TRIAL = Trial(number=2, overrides=("training.seed=0",), swept={"training.seed": "0"})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    monkeypatch.setattr(client, "SILENT_POLL_S", 0.001)
    monkeypatch.setattr(module, "_RECORD_WITHIN_S", 0.05)
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda _cls: 2))


def config() -> RunConfig:
    return compose("quickstart", ["hardware=cpu", "hardware.gpus_per_node=1", "launcher=slurm"]).config


def settings() -> SlurmConfig:
    return SlurmConfig(name=LauncherName.slurm, time_limit="1-0", stop_timeout_s=300)


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return SweepFolder(path=tmp_path)


class Slurm:
    """Answers with one state after the other, and remembers what was cancelled and submitted."""

    def __init__(self, states: Iterator[str | Callable[[], str]]) -> None:
        self.states, self.cancelled, self.submitted = states, list[str](), 0

    def job_state(self, job_id: str) -> JobState:
        state = next(self.states)
        name, _, reason = (state if isinstance(state, str) else state()).partition(": ")
        return JobState(name=name, reason=reason or "None", nodes="node1", exit_code=0, signal=0)

    def slurm(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.cancelled.append(" ".join(words))
        return subprocess.CompletedProcess(words, 0, stdout="", stderr="")


def in_slurm(folder: SweepFolder) -> RunInSlurm:
    """Runs trials of a sweep that are told one word."""
    return RunInSlurm(
        folder=folder,
        command_of=lambda _trial, _folder: ["train"],
        config_of=lambda _trial: config(),
        stopping=Stopping(),
        num_trials=4,
    )


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch, folder: SweepFolder) -> Callable[..., tuple[RunInSlurm, Slurm]]:
    def begin(*states: str | Callable[[], str]) -> tuple[RunInSlurm, Slurm]:
        answers = Slurm(iter(states))
        monkeypatch.setattr(client, "job_state", answers.job_state)
        monkeypatch.setattr(module, "slurm", answers.slurm)
        monkeypatch.setattr(client, "slurm", answers.slurm)
        run = in_slurm(folder)

        def submit(_trial: Trial, _config: RunConfig) -> str:
            answers.submitted += 1
            return "17"

        monkeypatch.setattr(run, "_submit", submit)
        return run, answers

    return begin


def test_the_script_has_the_launchers_options_and_no_limit_of_submitits_own(tmp_path: Path) -> None:
    executor = _Executor(
        tmp_path, ["--partition=gpus", "--time=1-0", "--signal=B:USR1@300", "--constraint=a100"], settings()
    )
    lines = executor._make_submission_file_text("python job", "uid").splitlines()
    options = [line.removeprefix("#SBATCH ").partition("=")[0] for line in lines if line.startswith("#SBATCH ")]
    assert sorted(options) == [
        *("--constraint", "--error", "--open-mode", "--output", "--partition", "--signal", "--time")
    ]
    assert "#SBATCH --time=1-0" in lines
    assert "#SBATCH --signal=USR2@300" in lines
    assert lines[-2] == "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE"
    assert lines[-1].startswith("srun ")


def test_a_script_is_read_as_it_is_meant_whatever_the_folder_and_the_options_hold(tmp_path: Path) -> None:
    folder = tmp_path / "50% #1 'q'"
    folder.mkdir()
    lines = (
        _Executor(folder, ["--comment=a # b"], settings())._make_submission_file_text("python job", "x").splitlines()
    )
    escaped = str(folder).replace("%", "%%")
    assert '#SBATCH --comment="a # b"' in lines
    assert f'#SBATCH --output="{escaped}/%j_0_log.out"' in lines
    assert f'#SBATCH --error="{escaped}/%j_0_log.err"' in lines
    assert len([line for line in lines if line.startswith(("#SBATCH --output", "#SBATCH --error"))]) == 2
    srun = shlex.split(lines[-1])
    assert srun[-4:] == [f"--output={escaped}/%j_%t_log.out", f"--error={escaped}/%j_%t_log.err", "python", "job"]


def test_no_sign_of_a_folder_cuts_a_line_in_two(tmp_path: Path) -> None:
    """Python takes more signs for line breaks than the shell, which would run what follows them as a command."""
    with pytest.raises(RequestError, match="the sweep's command="):
        _Executor(tmp_path, [], settings())._make_submission_file_text("python 'a\u2028touch x'", "uid")
    with pytest.raises(RequestError, match="an option of sbatch="):
        _Executor(tmp_path, ["--partition=a\u2028b"], settings())._make_submission_file_text("python", "uid")
    with pytest.raises(RequestError, match="the sweep's folder="):
        _Executor(tmp_path / "a\u2028b", [], settings())


@pytest.mark.parametrize(
    ("said", "exit_code"),
    [
        ("sbatch: error: Required partition not available (inactive or drain)", 1),
        ("sbatch: error: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", 1),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", 1),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", 1),
        ("sbatch: error: Invalid account or account/partition combination specified", 2),
        ("sbatch: error: invalid partition specified: gpus", 2),
        ("sbatch: error: Invalid node name specified", 2),
        ("sbatch: error: Requested node configuration is not available", 2),
    ],
)
def test_a_trial_that_slurm_does_not_take_is_taken_up_by_the_same_command(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, said: str, exit_code: int
) -> None:
    def refuse(_self: _Executor, _job: object) -> None:
        raise FailedJobError(said)

    monkeypatch.setattr(_Executor, "submit", refuse)
    monkeypatch.setattr(client, "slurm", lambda *words: subprocess.CompletedProcess(words, 1, stdout="", stderr=""))
    run = in_slurm(folder)
    run(TRIAL, None)
    end = folder.end_of(TRIAL)
    assert end is not None
    assert end.exit_code == exit_code  # refused for good, as things are: an account can be opened
    assert not folder.is_done(TRIAL)


def test_a_trial_whose_values_break_a_rule_is_no_job(folder: SweepFolder) -> None:
    def refuse(_trial: Trial) -> RunConfig:
        raise RequestError("no", problem_id="out-of-range")

    run = RunInSlurm(
        folder=folder,
        command_of=lambda _trial, _folder: ["train"],
        config_of=refuse,
        stopping=Stopping(),
        num_trials=4,
    )
    run(TRIAL, None)
    end = folder.end_of(TRIAL)
    assert end is not None
    assert (end.exit_code, end.reason) == (2, "no")


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [
        ("90", 90),
        ("90:30", 90),
        ("1:30:00", 90),
        ("2-12", 2 * 1440 + 720),
        ("2-12:30", 2 * 1440 + 750),
        ("2-12:30:15", 2 * 1440 + 750),
        (None, 10**7),
        ("UNLIMITED", 10**7),
    ],
)
def test_a_time_limit_in_minutes(limit: str | None, minutes: int) -> None:
    assert _minutes(limit) == minutes


def test_a_job_is_followed_to_the_end_that_it_wrote(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder
) -> None:
    end = TrialEnd(exit_code=7, seconds=9.0, was_interrupted=False)

    def write() -> str:
        write_trial_end(end, folder.end_file(TRIAL))
        return "COMPLETING"

    run, answers = following("PENDING", "RUNNING", write)
    run(TRIAL, None)
    assert folder.end_of(TRIAL) == end
    assert answers.cancelled == []


def test_a_controller_that_is_silent_for_a_while_ends_nothing(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent() -> str:
        raise TunebookError("no answer", problem_id="slurm-out-of-reach")

    def end() -> str:
        write_trial_end(TrialEnd(exit_code=0, seconds=1.0, was_interrupted=False), folder.end_file(TRIAL))
        return "COMPLETED"

    run, _ = following("RUNNING", silent, silent, end)
    run(TRIAL, None)
    assert folder.is_done(TRIAL)
    monkeypatch.setattr(client, "SILENT_WITHIN_S", 0.01)
    run, _ = following("RUNNING", *[silent] * 1000)
    folder.begin(TRIAL)
    run(TRIAL, None)
    left = folder.end_of(TRIAL)
    assert left is not None
    assert (left.exit_code, left.reason) == (1, "no answer; job 17 goes on, and the same command finds it")
    never = run.config_of(TRIAL)
    never.training.resume = "never"
    run, _ = following("RUNNING", *[silent] * 1000)
    run.config_of = lambda _: never
    folder.begin(TRIAL)
    run(TRIAL, None)
    assert "the same command without training.resume=never finds it" in (folder.end_of(TRIAL) or left).reason
    (folder.path / "trial-002.slurm.json").write_text('{"job_id": "17"}')
    run, answers = following(*[silent] * 1000)  # nor is another job submitted beside one that may be there
    run(TRIAL, None)
    left = folder.end_of(TRIAL)
    assert left is not None
    assert (left.exit_code, left.reason, answers.submitted) == (1, "no answer", 0)
    run, answers = following("RUNNING", "RUNNING", "RUNNING", end)  # and it is followed to its own end
    run(TRIAL, None)
    assert folder.is_done(TRIAL)
    assert answers.submitted == 0
    run, _ = following(*[silent] * 1000)  # what a job wrote while the controller was silent stays
    run(TRIAL, None)
    assert folder.is_done(TRIAL)


def test_a_job_that_is_lost_is_a_failed_trial(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder
) -> None:
    run, _ = following("RUNNING", *["NODE_FAIL"] * 1000)
    run(TRIAL, None)
    end = folder.end_of(TRIAL)
    assert end is not None
    assert (end.exit_code, end.was_interrupted) == (1, False)
    assert end.reason is not None
    assert "Slurm's job 17 ended without a word: NODE_FAIL on node1" in end.reason


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("BadConstraints", "no nodes are as launcher.extra_args"),
        ("DependencyNeverSatisfied", "name another job, or leave it out"),
        ("launch failed requeued held", "its node could not start it, and Slurm holds it"),
    ],
)
def test_a_job_that_can_never_run_is_a_failed_trial_and_taken_back(
    following: Callable[..., tuple[RunInSlurm, Slurm]],
    folder: SweepFolder,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    advice: str,
) -> None:
    monkeypatch.setattr(client, "HOPELESS_FOR_S", 0.0)
    run, answers = following("PENDING: Priority", f"PENDING: {reason}")
    run(TRIAL, None)
    end = folder.end_of(TRIAL)
    assert end is not None
    assert (end.exit_code, end.seconds, end.was_interrupted) == (2, 0.0, False)
    assert end.reason is not None
    assert end.reason.startswith(f"Slurm's job 17 can never run ({reason}), and was taken back: ")
    assert advice in end.reason
    assert answers.cancelled == ["scancel 17"]


def test_what_the_turns_took_before_slurm_held_the_job_still_counts(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save() -> str:
        stopped(folder)
        return "COMPLETING"

    monkeypatch.setattr(client, "HOPELESS_FOR_S", 0.0)
    run, _ = following("RUNNING", save, "PENDING: launch failed requeued held")
    run(TRIAL, None)
    end = folder.end_of(TRIAL)
    assert end is not None
    assert (end.exit_code, end.seconds) == (2, 9.0)


def test_a_reason_that_passes_takes_no_trial_back(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder
) -> None:
    def end() -> str:
        write_trial_end(TrialEnd(exit_code=0, seconds=1.0, was_interrupted=False), folder.end_file(TRIAL))
        return "COMPLETED"

    run, answers = following("PENDING: BadConstraints", "RUNNING", end)
    run(TRIAL, None)
    assert answers.cancelled == []
    assert folder.is_done(TRIAL)


def test_a_waiting_job_is_taken_back_and_counts_as_not_started(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder
) -> None:
    run, answers = following("PENDING", *["CANCELLED"] * 1000)
    run.stopping.request()
    run(TRIAL, None)
    assert answers.cancelled == ["scancel 17"]
    assert folder.end_of(TRIAL) is None


def test_a_running_job_is_asked_by_file_and_cancelled_at_the_third_request(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder
) -> None:
    asked: list[str] = []
    stop_file = folder.path / "trial-002.stop"

    def again() -> str:
        asked.append(stop_file.read_text() if stop_file.exists() else "")
        run.stopping.request()
        return "RUNNING"

    def end() -> str:
        asked.append(stop_file.read_text())
        write_trial_end(TrialEnd(exit_code=6, seconds=1.0, was_interrupted=True), folder.end_file(TRIAL))
        return "CANCELLED"

    run, answers = following(again, again, again, end)
    run(TRIAL, None)
    assert asked == ["", "1", "2", "3"]
    assert answers.cancelled == ["scancel 17"]


def test_a_pruned_job_is_told_so(following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder) -> None:
    def end() -> str:
        assert (folder.path / "trial-002.stop").read_text() == "1"
        write_trial_end(TrialEnd(exit_code=6, seconds=1.0, was_interrupted=True), folder.end_file(TRIAL))
        return "COMPLETED"

    run, _ = following("RUNNING", end)
    run(TRIAL, lambda: "at step 3, loss 9 is worse")
    found = folder.end_of(TRIAL)
    assert found is not None
    assert (found.was_pruned, found.reason) == (True, "at step 3, loss 9 is worse")


def test_a_job_that_still_runs_is_found_again_and_not_submitted_twice(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder
) -> None:
    (folder.path / "trial-002.slurm.json").write_text('{"job_id": "12"}')

    def end() -> str:
        write_trial_end(TrialEnd(exit_code=0, seconds=1.0, was_interrupted=False), folder.end_file(TRIAL))
        return "COMPLETED"

    run, answers = following("RUNNING", "RUNNING", end)
    run(TRIAL, None)
    assert answers.submitted == 0
    run, answers = following("COMPLETED", "RUNNING", end)  # gone: it is submitted again
    run(TRIAL, None)
    assert answers.submitted == 1


def test_a_job_that_was_asked_to_stop_is_waited_for_before_it_is_submitted_again(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder
) -> None:
    (folder.path / "trial-002.slurm.json").write_text('{"job_id": "12"}')
    (folder.path / "trial-002.stop").write_text("1")

    def end() -> str:
        write_trial_end(TrialEnd(exit_code=0, seconds=1.0, was_interrupted=False), folder.end_file(TRIAL))
        return "COMPLETED"

    run, answers = following("RUNNING", "RUNNING", "COMPLETING", "CANCELLED", end)
    run(TRIAL, None)
    assert answers.submitted == 1


def stopped(folder: SweepFolder, exit_code: int = 6) -> None:
    write_trial_end(TrialEnd(exit_code=exit_code, seconds=9.0, was_interrupted=False), folder.end_file(TRIAL))


@pytest.mark.parametrize("exit_code", [6, 1])  # it saved, or was killed while it started
def test_a_trial_that_slurm_requeues_is_followed_to_the_end_of_its_last_turn(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder, exit_code: int
) -> None:
    def save() -> str:
        stopped(folder, exit_code)
        return "COMPLETING"

    def begin() -> str:
        folder.begin(TRIAL)  # as the job itself does
        return "RUNNING"

    def end() -> str:
        write_trial_end(TrialEnd(exit_code=0, seconds=20.0, was_interrupted=False), folder.end_file(TRIAL))
        return "COMPLETED"

    run, answers = following("RUNNING", save, "PENDING", "RUNNING", begin, end)
    run(TRIAL, None)
    assert folder.end_of(TRIAL) == TrialEnd(exit_code=0, seconds=20.0, was_interrupted=False)
    assert answers.cancelled == []


def test_a_requeued_job_is_found_again_and_its_earlier_end_is_not_its_own(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder
) -> None:
    (folder.path / "trial-002.slurm.json").write_text('{"job_id": "12"}')
    stopped(folder)

    def end() -> str:
        write_trial_end(TrialEnd(exit_code=0, seconds=20.0, was_interrupted=False), folder.end_file(TRIAL))
        return "COMPLETED"

    run, answers = following("PENDING", "PENDING", "RUNNING", end)
    run(TRIAL, None)
    assert folder.is_done(TRIAL)
    assert answers.submitted == 0


def test_a_trial_that_was_asked_to_stop_has_ended_while_slurm_still_cleans_up(
    following: Callable[..., tuple[RunInSlurm, Slurm]], folder: SweepFolder
) -> None:
    def save() -> str:
        stopped(folder)
        return "COMPLETING"

    run, _ = following("RUNNING", save)
    run.stopping.request()
    run(TRIAL, None)
    end = folder.end_of(TRIAL)
    assert end is not None
    assert end.exit_code == 6


def test_what_a_stopped_trial_took_counts_when_it_is_submitted_again(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[TrialJob] = []

    def submit(_self: _Executor, job: TrialJob) -> SimpleNamespace:
        jobs.append(job)
        return SimpleNamespace(job_id=17)

    monkeypatch.setattr(_Executor, "submit", submit)
    stopped(folder)
    in_slurm(folder)._submit(TRIAL, config())
    assert [job.earlier_s for job in jobs] == [9.0]
    assert folder.end_of(TRIAL) is None
