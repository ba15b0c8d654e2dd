"""What a sweep's Slurm job runs, on its node: submitit brings the object there and calls it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from submitit.helpers import DelayedSubmission

from tunebook.checkpoint.newest import newest_checkpoint
from tunebook.errors import TunebookError
from tunebook.launch.slurm.client import patient_job_state
from tunebook.sweep.stopping import Stopping
from tunebook.sweep.trial_process import TrialEnd, read_trial_end, run_trial, wait_until_free, write_trial_end


@dataclass(kw_only=True)
class TrialJob:
    """One trial, and how it hears from the sweep: by a file, since Slurm's signals reach every process of the job."""

    command: list[str]
    run_folder: Path
    end_file: Path
    output: Path
    stop_file: Path  # holds how often the trial was asked to stop
    num_ranks: int
    is_requeued: bool
    earlier_s: float = 0.0  # of the turns before this one
    _stopping: Stopping = field(default_factory=Stopping, repr=False)
    _before: Path | None = None  # the newest checkpoint when this turn began
    _begun: float | None = None

    def __call__(self) -> int:
        """Train; the exit code, which is also in the end file."""
        self._stopping = Stopping()
        self._before = newest_checkpoint(self.run_folder)
        self._begun = time.monotonic()
        self._forget_end()
        wait_until_free(self.run_folder)
        end = run_trial(
            self.command, self._stopping, output=self.output, environment=self._environment(), watch=self._listen
        )
        write_trial_end(end.after(self.earlier_s), self.end_file)
        return end.exit_code

    def _forget_end(self) -> None:
        """Take away the end of a turn after which Slurm gave the job another: of one that it requeued by SIGTERM."""
        if (end := read_trial_end(self.end_file)) is not None:
            self.earlier_s = max(self.earlier_s, end.seconds)
            self.end_file.unlink(missing_ok=True)

    def checkpoint(self) -> DelayedSubmission | None:
        """Let the trial save before Slurm takes the job away; None, so no other turn, where it came no further.

        submitit calls this from a signal's handler, while the call above waits.
        """
        self._stopping.request()
        wait_until_free(self.run_folder)
        has_progress = newest_checkpoint(self.run_folder) not in (None, self._before)
        seconds = round(self.earlier_s + (time.monotonic() - self._begun if self._begun is not None else 0.0), 1)
        if (why := self._why_not_requeued(has_progress=has_progress)) is not None:
            reason = f"Slurm took the job away, and {why}"
            end = TrialEnd(exit_code=6, seconds=seconds, was_interrupted=False, reason=reason)
            write_trial_end(end, self.end_file)
            return None
        return DelayedSubmission(replace(self, earlier_s=seconds, _stopping=Stopping(), _before=None, _begun=None))

    def _why_not_requeued(self, *, has_progress: bool) -> str | None:
        """Why there is no other turn; None where there is, for which a silent controller has been waited for.

        submitit asks it once, and a job that it does not answer then ends for good.
        """
        if not self.is_requeued or not has_progress:
            why = "launcher.requeue=false" if has_progress else "it saved nothing in this turn"
            return f"{why}, so it was not requeued; launcher.time_limit says how long"
        try:
            patient_job_state(os.environ["SLURM_JOB_ID"], print)
        except TunebookError as error:
            return f"it was not requeued: {error.message}"
        return None

    def _listen(self) -> None:
        asked = int(self.stop_file.read_text() or 0) if self.stop_file.is_file() else 0
        while self._stopping.num_requests < asked:
            self._stopping.request()

    def _environment(self) -> dict[str, str]:
        """As many threads as the job has cores: without Slurm's cgroups a process sees all of the node's."""
        environment = dict(os.environ)
        cores = int(environment.get("SLURM_CPUS_PER_TASK") or environment.get("SLURM_CPUS_ON_NODE") or 1)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.num_ranks)))
        return environment
