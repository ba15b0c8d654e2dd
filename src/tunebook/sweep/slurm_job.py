"""`python -m tunebook.sweep.slurm_job FILE`: run one trial as a Slurm job; FILE is a `TrialJob` as JSON."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.errors import StoppedError, TunebookError
from tunebook.files import read_json
from tunebook.slurm import patient_requeue
from tunebook.sweep.trial_process import Stopping, begin_trial, run_trial, wait_until_free, write_trial_end


@dataclass(kw_only=True)
class TrialJob:
    """One trial. The sweep requests its stop through a file, which works on any node."""

    command: list[str]
    run_folder: str
    end_file: str
    output: str
    stop_file: str  # holds the number of stop requests
    num_ranks: int
    is_requeued: bool
    earlier_s: float = 0.0  # in turns before this job


def carry_out(job: TrialJob) -> int:
    """Run one turn of a trial; return its exit code, which is also in the end file.

    Slurm sends SIGUSR1 before it takes the nodes away. The trial then saves, and the job requests another turn.
    """
    stopping, signals = Stopping(), list[int]()

    def note(number: int, _frame: object) -> None:
        signals.append(number)
        if not stopping.num_requests:  # a second request would prevent saving
            stopping.request()

    signal.signal(signal.SIGUSR1, note)
    signal.signal(signal.SIGTERM, note)
    run_folder, end_file = Path(job.run_folder), Path(job.end_file)
    before = newest_checkpoint(run_folder)
    earlier_s = max(job.earlier_s, begin_trial(end_file))  # the record of an earlier turn has the seconds before it too
    wait_until_free(run_folder)
    end = run_trial(
        job.command,
        stopping,
        output=Path(job.output),
        environment=_environment(job),
        watch=lambda: _listen(Path(job.stop_file), stopping),
    )
    wait_until_free(run_folder)
    end = end.after(earlier_s)
    write_trial_end(end, end_file)
    if end.exit_code == StoppedError.exit_code and signal.SIGUSR1 in signals:
        has_progress = newest_checkpoint(run_folder) not in (None, before)
        if (why := _why_not_requeued(job, has_progress=has_progress)) is not None:
            end = replace(end, was_interrupted=False, reason=f"Slurm took the job away, and {why}")
            write_trial_end(end, end_file)
    return end.exit_code


def _why_not_requeued(job: TrialJob, *, has_progress: bool) -> str | None:
    """Request another turn; return why there is none, or None on success."""
    if not job.is_requeued or not has_progress:
        why = "launcher.requeue=false" if has_progress else "it saved nothing in this turn"
        return f"{why}, so it was not requeued; launcher.time_limit says how long"
    try:
        refused = patient_requeue(os.environ["SLURM_JOB_ID"], print)
    except TunebookError as error:
        refused = error.message
    return None if refused is None else f"it was not requeued: {refused}"


def _listen(stop_file: Path, stopping: Stopping) -> None:
    asked = int(stop_file.read_text() or 0) if stop_file.is_file() else 0
    while stopping.num_requests < asked:
        stopping.request()


def _environment(job: TrialJob) -> dict[str, str]:
    """Set one thread per core of the job: without Slurm's cgroups a process sees all cores of the node."""
    environment = dict(os.environ)
    cores = int(environment.get("SLURM_CPUS_PER_TASK") or environment.get("SLURM_CPUS_ON_NODE") or 1)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.num_ranks)))
    return environment


if __name__ == "__main__":
    sys.exit(carry_out(TrialJob(**read_json(Path(sys.argv[1])))))
