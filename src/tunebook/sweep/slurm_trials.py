"""Run the trials of a sweep as Slurm jobs: submit and follow them; a later sweep finds jobs that still exist.

A trial's job script has the same options as with launcher=slurm. It runs `sweep.slurm_job` on one node.
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from tunebook.checkpoint.choose import same_command
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.errors import RequestError, TunebookError
from tunebook.files import atomic_write_json, atomic_write_text, read_json
from tunebook.slurm import (
    HopelessWait,
    JobState,
    option_words,
    output_pattern,
    patient_job_state,
    script_text,
    slurm,
    submit_script,
    take_back_hopeless,
)
from tunebook.sweep.launching import Runner
from tunebook.sweep.slurm_job import TrialJob
from tunebook.sweep.trial_process import TrialEnd, Watch, begin_trial, write_trial_end
from tunebook.sweep.trials import Trial

_POLL_S = 2.0
_RECORD_WITHIN_S = 20.0  # for a network file system to show the job's files
_NOT_NOW = 1  # exit code of a trial that Slurm does not take for now: the same command retries it
_PASSES = (  # temporary Slurm errors, in lower case: partition or nodes down, job limits, a busy controller
    *("partition not available", "required node not available", "policy", "temporarily un"),
    *("qosmax", "qosgrp", "assocmax", "assocgrp", "maxsubmit"),
)
_KEPT_IN_JOB = ("launcher.timeout_s", "launcher.start_timeout_s", "launcher.stop_timeout_s")


def split_overrides(overrides: list[str]) -> tuple[list[str], list[str]]:
    """Split the overrides of a sweep with Slurm jobs into the job's options and the overrides of the trial inside it.

    Raises: RequestError for another launcher, or several values of its keys.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "launcher" and value != "slurm":
            raise RequestError(
                f"--launcher=slurm and {override} ask for two launchers; a trial always runs launcher=local inside its "
                f"job: leave {override} out",
                problem_id="sweep-option",
            )
    for_job = ["launcher=slurm", *(each for each in overrides if not each.startswith("launcher="))]
    inside = [
        each
        for each in overrides
        if not each.startswith(("launcher=", "launcher.")) or each.partition("=")[0] in _KEPT_IN_JOB
    ]
    return for_job, [*inside, "launcher=local"]


def check_jobs(config: RunConfig) -> None:
    """Check that trials of a configuration can be Slurm jobs. Raises: RequestError with what to type."""
    assert isinstance(config.launcher, SlurmConfig)
    if config.hardware.num_nodes > 1 or config.launcher.container_image is not None:
        what = f"hardware.num_nodes={config.hardware.num_nodes}"
        if config.launcher.container_image is not None:
            what = f"launcher.container_image={config.launcher.container_image}"
        raise RequestError(
            f"{what}: with --launcher=slurm a trial is one process on one node, outside of containers; let each trial "
            "submit its own job instead: --launcher=joblib --jobs=2 launcher=slurm launcher.wait=true",
            problem_id="sweep-option",
        )


class RunInSlurm(Runner):
    """Runs trials as Slurm jobs. Their configurations, with launcher=slurm, hold the jobs' options."""

    def run(self, trial: Trial, config: RunConfig, watch: Watch | None) -> None:
        """Submit a trial, or find its job, and wait until it has ended; errors of Slurm are recorded as its end."""
        job_id = None
        try:
            job_id = self._find(trial) or self._submit(trial, config)
            end = self._follow(trial, job_id, watch)
        except TunebookError as error:  # refused, or a silent controller: other trials and the job may continue
            self._leave(trial, job_id, error)
            return
        if end is not None:
            write_trial_end(end, self.folder.end_file(trial))
        self.say(trial, "not started" if end is None else end.text)

    def _leave(self, trial: Trial, job_id: str | None, error: TunebookError) -> None:
        """Leave a trial and its job, if any, to the next sweep, unless the trial has ended for good."""
        end = self.folder.end_of(trial)
        if end is not None and end.is_final:
            self.say(trial, f"ended, as its job recorded; {error.message}")
        elif job_id is None:
            passes = any(text in error.message.lower() for text in _PASSES)
            self.fail(trial, _NOT_NOW if passes else error.exit_code, error.message)
        else:
            again = same_command(self.config_of(trial))
            reason = f"{error.message}; job {job_id} continues, and {again} finds it"
            self.fail(trial, _NOT_NOW, reason, "left alone")

    def _find(self, trial: Trial) -> str | None:
        """Return the ID of the trial's earlier job if it is still pending or running."""
        file = self._job_file(trial)
        job_id = str(read_json(file)["job_id"]) if file.is_file() else None
        state = patient_job_state(job_id) if job_id is not None else None
        if job_id is None or state is None or state.has_ended:
            return None
        if self._stop_file(trial).is_file():
            self.say(trial, f"waits for job {job_id}, which was asked to stop")
            while (state := patient_job_state(job_id)) is not None and not state.has_ended:
                time.sleep(_POLL_S)
            return None
        end = self.folder.end_of(trial)
        if end is not None and (end.exit_code, end.seconds) == (_NOT_NOW, 0.0):  # written by this sweep, not by the job
            begin_trial(self.folder.end_file(trial))
        self.say(trial, f"{trial.title}: is job {job_id}, {state.text()}")
        return job_id

    def _submit(self, trial: Trial, config: RunConfig) -> str:
        assert isinstance(config.launcher, SlurmConfig)
        earlier_s = begin_trial(self.folder.end_file(trial))
        self._stop_file(trial).unlink(missing_ok=True)
        run_folder = self.folder.run_folder(trial)
        job = TrialJob(
            command=self.command_of(trial, run_folder),
            run_folder=str(run_folder),
            end_file=str(self.folder.end_file(trial)),
            output=str(self.folder.output(trial)),
            stop_file=str(self._stop_file(trial)),
            num_ranks=config.hardware.gpus_per_node or 1,
            is_requeued=config.launcher.requeue,
            earlier_s=earlier_s,
        )
        description = self.folder.path / f"{trial.name}.job.json"
        atomic_write_json(description, asdict(job))
        script = self.folder.path / f"{trial.name}.sh"
        output = output_pattern(self.folder.path, f"{trial.name}.slurm-%j.out")
        options = [*option_words(config), f"--output={output}", "--open-mode=append"]
        # Python ignores the signal until it has a handler for it.
        body = f"trap '' USR1; exec {shlex.join([sys.executable, '-m', 'tunebook.sweep.slurm_job', str(description)])}"
        atomic_write_text(script, script_text([f"{trial.name} of {self.folder.path}"], options, body))
        job_id = submit_script(script, config)
        atomic_write_json(self._job_file(trial), {"job_id": job_id})
        self.say(trial, f"{trial.title}: submitted as job {job_id}, prints to {self.folder.output(trial)}")
        return job_id

    def _follow(self, trial: Trial, job_id: str, watch: Watch | None) -> TrialEnd | None:
        """Wait until a job has ended; return None if it was canceled before it started."""
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
        """Return how a trial has ended for good; None while its job may continue.

        A job that Slurm requeues (`scontrol requeue`, a node taken back) gets SIGTERM first. Its trial saves, records
        that it was stopped, and resumes in the next turn.
        """
        if state is None or state.has_ended:
            return self.folder.end_of(trial)
        if state.name != "COMPLETING" or not self.folder.end_file(trial).is_file():
            return None
        end = self.folder.end_of(trial)
        return end if end is not None and (was_asked or end.is_final) else None

    def _ask_to_stop(self, trial: Trial, job_id: str, num_requests: int, *, is_running: bool) -> None:
        """Let a running trial save; cancel a job that is pending, or that was asked more than twice."""
        atomic_write_text(self._stop_file(trial), str(num_requests))
        if not is_running or num_requests > 2:
            slurm("scancel", job_id)

    def _give_up(self, trial: Trial, job_id: str, state: JobState) -> TrialEnd:
        """Cancel a job that can never run: other trials would wait for its place."""
        before = self.folder.end_of(trial)  # of a turn that Slurm requeued
        error = take_back_hopeless(job_id, state)
        seconds = before.seconds if before is not None else 0.0
        return TrialEnd(exit_code=error.exit_code, seconds=seconds, was_interrupted=False, reason=error.message)

    def _lost(self, trial: Trial, job_id: str, how: str) -> TrialEnd:
        output = self.folder.path / f"{trial.name}.slurm-{job_id}.out"
        reason = f"Slurm's job {job_id} ended without recording a reason: {how}; look at {output}"
        interrupted = self.stopping.num_requests > 0
        return TrialEnd(exit_code=1, seconds=0.0, was_interrupted=interrupted, reason=reason)

    def _job_file(self, trial: Trial) -> Path:
        return self.folder.path / f"{trial.name}.slurm.json"

    def _stop_file(self, trial: Trial) -> Path:
        return self.folder.path / f"{trial.name}.stop"
