"""Run the trials of a sweep as Slurm jobs through submitit: submitted from here, followed, and found again.

submitit writes the batch script, brings the trial to the node and requeues it. Its own way of following a job is not
used: it asks sacct, which only answers where Slurm keeps accounts, and raises when a job is lost. Its limit of five
minutes is left out of the script; the job's options are those of launcher=slurm.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from tunebook.checkpoint.candidates import same_command
from tunebook.config.control_characters import require_printable
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.errors import RequestError, TunebookError
from tunebook.files import atomic_write_json, atomic_write_text, read_json
from tunebook.launch.slurm.client import (
    HopelessWait,
    JobState,
    patient_job_state,
    refusal,
    slurm,
    take_back_hopeless,
)
from tunebook.launch.slurm.script import option_lines, option_words, output_pattern
from tunebook.sweep.folder import SweepFolder, is_final
from tunebook.sweep.launching import CommandOf
from tunebook.sweep.slurm_job import TrialJob
from tunebook.sweep.stopping import Stopping
from tunebook.sweep.trial_process import TrialEnd, Watch, write_trial_end
from tunebook.sweep.trials import Trial

_POLL_S = 2.0
_RECORD_WITHIN_S = 20.0  # for a network file system to show what the job has written
_NO_LIMIT_MINUTES = 10**7  # what submitit counts with where the limit is the partition's
_OF_SUBMITIT = ("open-mode", "signal")  # of its options, those that stay
_LOGS = {"output": "out", "error": "err"}  # as submitit names them: by job and task
_NOT_NOW = 1  # the exit code of a trial that Slurm does not take for now: the same command tries again
_PASSES = (  # of Slurm's errors, in lower case: a partition or nodes that are down, limits on jobs, a busy controller
    *("partition not available", "required node not available", "policy", "temporarily un"),
    *("qosmax", "qosgrp", "assocmax", "assocgrp", "maxsubmit"),
)


class _RefusedError(Exception):
    """Slurm refuses a trial's job, for now or for good: as the exit code says."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(kw_only=True)
class RunInSlurm:
    """Run trials as jobs."""

    folder: SweepFolder
    command_of: CommandOf
    config_of: Callable[[Trial], RunConfig]  # with launcher=slurm: the job's options are in it
    stopping: Stopping
    num_trials: int
    _submitting: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, trial: Trial, watch: Watch | None) -> None:
        """Submit one, or find its job, and wait until it has ended; what Slurm does not do is how the trial ends."""
        try:
            config = self.config_of(trial)
        except RequestError as error:  # values that were proposed may break a rule together
            self._fail(trial, error.exit_code, error.message)
            return
        job_id = None
        try:
            job_id = self._find(trial) or self._submit(trial, config)
            end = self._follow(trial, job_id, watch)
        except _RefusedError as error:
            self._fail(trial, error.exit_code, str(error))
            return
        except TunebookError as error:  # a silent controller: other trials, and the job itself, may go on
            self._lose_sight(trial, job_id, error.message)
            return
        if end is not None:
            write_trial_end(end, self.folder.end_file(trial))
        how = "not started" if end is None else f"ended with exit code {end.exit_code} after {end.seconds:.0f} s"
        self._say(trial, how)

    def _fail(self, trial: Trial, exit_code: int, reason: str, how: str = "not started") -> None:
        """Write down why a trial did not become a job, or how else it ended without one."""
        end = TrialEnd(exit_code=exit_code, seconds=0.0, was_interrupted=False, reason=reason)
        write_trial_end(end, self.folder.end_file(trial))
        self._say(trial, f"{how}: {reason}")

    def _lose_sight(self, trial: Trial, job_id: str | None, reason: str) -> None:
        """Leave a trial, and the job that it may have, to the next time; one that has ended meanwhile has ended."""
        if is_final(self.folder.end_of(trial)):
            self._say(trial, f"ended, as its job wrote down; {reason}")
        elif job_id is None:
            self._fail(trial, _NOT_NOW, reason)
        else:
            again = same_command(self.config_of(trial))
            self._fail(trial, _NOT_NOW, f"{reason}; job {job_id} goes on, and {again} finds it", "left alone")

    def _find(self, trial: Trial) -> str | None:
        """The trial's job of an earlier time, if it still waits or runs."""
        file = self._job_file(trial)
        job_id = str(read_json(file)["job_id"]) if file.is_file() else None
        state = patient_job_state(job_id) if job_id is not None else None
        if job_id is None or state is None or state.has_ended:
            return None
        if self._stop_file(trial).is_file():
            self._say(trial, f"waits for job {job_id}, which was asked to stop")
            while (state := patient_job_state(job_id)) is not None and not state.has_ended:
                time.sleep(_POLL_S)
            return None
        end = self.folder.end_of(trial)
        if end is not None and (end.exit_code, end.seconds) == (_NOT_NOW, 0.0):  # written here, and not by the job
            self.folder.begin(trial)
        self._say(trial, f"{trial.title}: is job {job_id}, {state.text()}")
        return job_id

    def _submit(self, trial: Trial, config: RunConfig) -> str:
        assert isinstance(config.launcher, SlurmConfig)
        earlier_s = self.folder.begin(trial)
        self._stop_file(trial).unlink(missing_ok=True)
        run_folder = self.folder.run_folder(trial)
        job = TrialJob(
            command=self.command_of(trial, run_folder),
            run_folder=run_folder,
            end_file=self.folder.end_file(trial),
            output=self.folder.output(trial),
            stop_file=self._stop_file(trial),
            num_ranks=config.hardware.gpus_per_node or 1,
            is_requeued=config.launcher.requeue,
            earlier_s=earlier_s,
        )
        with self._submitting:
            executor = _Executor(self.folder.path / "submitit", option_words(config), config.launcher)
            try:
                job_id = str(executor.submit(job).job_id)
            except (FailedJobError, FailedSubmissionError) as error:
                said = str(error)
                refused = refusal(said, config)
                passes = any(words in said.lower() for words in _PASSES)
                raise _RefusedError(refused.message, _NOT_NOW if passes else refused.exit_code) from error
        atomic_write_json(self._job_file(trial), {"job_id": job_id})
        self._say(trial, f"{trial.title}: submitted as job {job_id}, prints to {self.folder.output(trial)}")
        return job_id

    def _follow(self, trial: Trial, job_id: str, watch: Watch | None) -> TrialEnd | None:
        """Wait for a job's end; None where it was taken back before it began."""
        asked, pruned, lost_at, hopeless = 0, None, None, HopelessWait()
        while True:
            state = patient_job_state(job_id)
            if state is not None and hopeless.is_long(state):
                return self._give_up(trial, job_id, state)
            is_over = state is None or state.has_ended
            end = self._end(trial, state, was_asked=asked > 0 or pruned is not None)
            if end is not None:
                return end if pruned is None else replace(end, was_pruned=end.exit_code == 6, reason=pruned)
            if is_over:
                lost_at = lost_at or time.monotonic()
                if asked and not self.folder.run_folder(trial).exists():
                    return None
                if time.monotonic() - lost_at > _RECORD_WITHIN_S:
                    return self._lost(trial, job_id, state.text() if state is not None else "gone from Slurm's list")
            elif self.stopping.num_requests > asked:
                asked = self.stopping.num_requests
                self._ask_to_stop(trial, job_id, asked, is_running=state is not None and state.name == "RUNNING")
            elif watch is not None and pruned is None and (pruned := watch()) is not None:
                self._ask_to_stop(trial, job_id, 1, is_running=True)
            time.sleep(_POLL_S)

    def _end(self, trial: Trial, state: JobState | None, *, was_asked: bool) -> TrialEnd | None:
        """How a trial has ended for good; None while its job may go on.

        A job that Slurm requeues (`scontrol requeue`, a node taken back) is sent SIGTERM first: its trial saves, writes
        that it was stopped, and goes on in the next turn.
        """
        if state is None or state.has_ended:
            return self.folder.end_of(trial)
        if state.name != "COMPLETING" or not self.folder.end_file(trial).is_file():
            return None
        end = self.folder.end_of(trial)
        return end if was_asked or is_final(end) else None

    def _ask_to_stop(self, trial: Trial, job_id: str, num_requests: int, *, is_running: bool) -> None:
        """Let a running trial save; take back a job that waits, or that was asked often enough."""
        atomic_write_text(self._stop_file(trial), str(num_requests))
        if not is_running or num_requests > 2:
            slurm("scancel", job_id)

    def _give_up(self, trial: Trial, job_id: str, state: JobState) -> TrialEnd:
        """Take back a job that can never run: others would wait for its place."""
        before = self.folder.end_of(trial)  # of a turn that Slurm requeued
        error = take_back_hopeless(job_id, state)
        seconds = before.seconds if before is not None else 0.0
        return TrialEnd(exit_code=error.exit_code, seconds=seconds, was_interrupted=False, reason=error.message)

    def _lost(self, trial: Trial, job_id: str, how: str) -> TrialEnd:
        logs = self.folder.path / "submitit"
        reason = f"Slurm's job {job_id} ended without a word: {how}; look at {logs}/{job_id}_0_log.err"
        interrupted = self.stopping.num_requests > 0
        return TrialEnd(exit_code=1, seconds=0.0, was_interrupted=interrupted, reason=reason)

    def _job_file(self, trial: Trial) -> Path:
        return self.folder.path / f"{trial.name}.slurm.json"

    def _stop_file(self, trial: Trial) -> Path:
        return self.folder.path / f"{trial.name}.stop"

    def _say(self, trial: Trial, text: str) -> None:
        print(f"\ntrial {trial.number + 1} of {self.num_trials}: {text}", flush=True)


class _Executor(submitit.SlurmExecutor):
    """submitit's executor, whose scripts have the options of launcher=slurm in the place of its own defaults."""

    def __init__(self, folder: Path, options: list[str], settings: SlurmConfig) -> None:
        try:
            super().__init__(folder=folder, max_num_timeout=1000)
        except RuntimeError as error:
            raise TunebookError(f"submitit: {error}", problem_id="slurm-not-found") from error
        require_printable("the sweep's folder", folder)
        # Its own options for these would be wrong where there is a % in the folder, and a sign that sbatch reads.
        logs = [f"--{name}={output_pattern(folder, f'%j_0_log.{end}')}" for name, end in _LOGS.items()]
        self._options = [*(word for word in options if not word.startswith("--signal=")), *logs]
        self.update_parameters(
            # Its copy of the limit tells a time-out from a preemption; Slurm gets the original.
            time=_minutes(settings.time_limit),
            signal_delay_s=settings.stop_timeout_s,
            srun_args=[f"--{name}={output_pattern(folder, f'%j_%t_log.{end}')}" for name, end in _LOGS.items()],
        )

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        require_printable("the sweep's command", command)
        # Not at the other signs that Python takes for line breaks: the shell and sbatch do not.
        lines = super()._make_submission_file_text(command, uid).removesuffix("\n").split("\n")
        own = [line for line in lines if _is_kept(line)]
        place = own.index("# Parameters") + 1
        # srun no longer takes the cores from the job, and would use one.
        cores = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE"
        return "\n".join([*own[:place], *option_lines(self._options), *own[place:-1], cores, own[-1], ""])


def _is_kept(line: str) -> bool:
    option = re.match(r"#SBATCH --([a-z-]+)", line)
    return option is None or option[1] in _OF_SUBMITIT


def _minutes(limit: str | None) -> int:
    """A time limit as sbatch takes it, in minutes: 90, 90:00, 1:30:00, 2-12, 2-12:30 or 2-12:30:00."""
    if limit is None:
        return _NO_LIMIT_MINUTES
    days, _, rest = limit.rpartition("-")
    numbers = [int(part) for part in rest.split(":")] if re.fullmatch(r"\d+(:\d+)*", rest) else []
    if days.isdecimal() and numbers:
        hours, minutes, *_ = [*numbers, 0]
        return int(days) * 1440 + hours * 60 + minutes
    if not numbers or days:
        return _NO_LIMIT_MINUTES
    return numbers[0] * 60 + numbers[1] if len(numbers) == 3 else numbers[0]
