"""Trials as Slurm jobs, with answers in the place of Slurm; tests/system/cluster has a real one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tunebook import slurm as client
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError, TunebookError
from tunebook.slurm import JobState
from tunebook.sweep import slurm_trials as module
from tunebook.sweep.folder import SweepFolder
from tunebook.sweep.slurm_trials import RunInSlurm, check_jobs, split_overrides
from tunebook.sweep.trial_process import Stopping, TrialEnd, begin_trial, write_trial_end
from tunebook.sweep.trials import Trial

TRIAL = Trial(number=2, overrides=("training.seed=0",), swept={"training.seed": "0"})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    monkeypatch.setattr(client, "SILENT_POLL_S", 0.001)
    monkeypatch.setattr(module, "_RECORD_WITHIN_S", 0.05)


def config(*words: str) -> RunConfig:
    return compose("quickstart", ["hardware=cpu", "hardware.gpus_per_node=1", "launcher=slurm", *words]).config


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


def sbatch(monkeypatch: pytest.MonkeyPatch, *, error: str = "") -> None:
    """Take every job as number 17, or refuse it."""
    code, output = (1, "") if error else (0, "17;cluster\n")
    monkeypatch.setattr(
        client, "slurm", lambda *words: subprocess.CompletedProcess(words, code, stdout=output, stderr=error)
    )


@pytest.mark.parametrize("name", ["plain", "50% #1 'q'"])
def test_the_script_has_the_launchers_options_and_runs_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = SweepFolder(path=tmp_path / name)
    folder.path.mkdir()
    sbatch(monkeypatch)
    assert in_slurm(folder)._submit(TRIAL, config("launcher.time_limit=1-0", "launcher.stop_timeout_s=300")) == "17"
    lines = (folder.path / "trial-002.sh").read_text().splitlines()
    assert {"#SBATCH --time=1-0", "#SBATCH --signal=B:USR1@300", "#SBATCH --open-mode=append"} <= set(lines)
    path = f"{folder.path}/trial-002.slurm-%j.out"
    quoted = '"' + path.replace("50%", "50%%") + '"' if name != "plain" else path
    assert f"#SBATCH --output={quoted}" in lines
    program = "import sys; print(sys.argv[1:])"
    script = (folder.path / "trial-002.sh").read_text().replace("-m tunebook.sweep.slurm_job", f"-c '{program}'")
    answer = subprocess.run(["bash", "-c", f"SLURM_CPUS_ON_NODE=1\n{script}"], capture_output=True, text=True)
    assert answer.stdout == f"{[str(folder.path / 'trial-002.job.json')]}\n"
    job = json.loads((folder.path / "trial-002.job.json").read_text())
    assert (job["command"], job["run_folder"]) == (["train"], str(folder.path / "trial-002"))
    assert json.loads((folder.path / "trial-002.slurm.json").read_text()) == {"job_id": "17"}


def test_no_sign_of_a_folder_cuts_a_line_in_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes more signs for line breaks than the shell, which would run what follows them as a command."""
    sbatch(monkeypatch)
    folder = SweepFolder(path=tmp_path / "a\u2028touch x")
    folder.path.mkdir()
    with pytest.raises(RequestError, match="U\\+2028"):
        in_slurm(folder)._submit(TRIAL, config())
    broken = config()
    broken.launcher.partition = "a\u2028b"  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="an option of sbatch="):
        in_slurm(SweepFolder(path=tmp_path))._submit(TRIAL, broken)


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
    sbatch(monkeypatch, error=said)
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
    begin_trial(folder.end_file(TRIAL))
    run(TRIAL, None)
    left = folder.end_of(TRIAL)
    assert left is not None
    assert (left.exit_code, left.reason) == (1, "no answer; job 17 continues, and the same command finds it")
    never = run.config_of(TRIAL)
    never.training.resume = "never"
    run, _ = following("RUNNING", *[silent] * 1000)
    run.config_of = lambda _: never
    begin_trial(folder.end_file(TRIAL))
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
    assert "Slurm's job 17 ended without recording a reason: NODE_FAIL on node1" in end.reason


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
        begin_trial(folder.end_file(TRIAL))  # as the job itself does
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
    sbatch(monkeypatch)
    stopped(folder)
    in_slurm(folder)._submit(TRIAL, config())
    assert json.loads((folder.path / "trial-002.job.json").read_text())["earlier_s"] == 9.0
    assert folder.end_of(TRIAL) is None


def test_the_job_gets_the_launchers_options_and_the_trial_what_concerns_its_ranks() -> None:
    words = ["launcher=slurm", "training.seed=0,1", "launcher.partition=main", "launcher.timeout_s=60"]
    for_job, inside = split_overrides(words)
    assert for_job == ["launcher=slurm", *words[1:]]
    assert inside == ["training.seed=0,1", "launcher.timeout_s=60", "launcher=local"]
    assert split_overrides(words[1:]) == (for_job, inside)  # it need not be typed
    assert split_overrides(for_job) == (for_job, inside)


@pytest.mark.parametrize("word", ["launcher=local", "launcher=ray", "launcher=slurm,local"])
def test_another_launcher_is_refused(word: str) -> None:
    with pytest.raises(RequestError, match=rf"--launcher=slurm and {word} ask for two launchers.*leave {word} out"):
        split_overrides([word])


@pytest.mark.parametrize("word", ["hardware.num_nodes=2", "launcher.container_image=x"])
def test_trials_on_several_nodes_or_in_containers_submit_their_own_jobs(word: str) -> None:
    check_jobs(config())
    with pytest.raises(RequestError, match=f"{word}: with --launcher=slurm a trial is one process on one node"):
        check_jobs(config(word))
