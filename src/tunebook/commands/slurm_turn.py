"""One turn of a Slurm job, on its first node: run a run folder until it ends or Slurm wants the nodes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.commands.attempt import Attempt
from tunebook.config.schema import SlurmConfig
from tunebook.errors import StoppedError, TunebookError
from tunebook.launch.local import load_shared_config
from tunebook.launch.resume import is_trained
from tunebook.launch.slurm import JobState, job_state, patiently, requeue
from tunebook.record.manifest import RunState, read_manifest, update_manifest
from tunebook.record.provenance import describe_hardware
from tunebook.record.run_folder import clear_outcomes, working_in
from tunebook.terminal import print_text

_LOCK_WITHIN_S = 60.0  # the submitting process still locks the folder for a moment
_WARNED_EARLIER_S = 60 + 30  # Slurm may signal up to a minute early (`man sbatch`), plus a margin for its clock
_BY_SLURM = "SIGUSR1"  # the signal that the job script requests from Slurm before it takes the job away


def carry_out_turn(folder: Path, stop_requests: Sequence[signal.Signals] = ()) -> int:
    """Run one turn of the job; return the run's exit code. No step has handled `stop_requests` yet."""
    console = Console(width=160)
    try:
        config = load_shared_config(folder)
        assert isinstance(config.launcher, SlurmConfig)
        with working_in(folder, _LOCK_WITHIN_S) as lock:
            _begin(folder, is_done=is_trained(folder, config))
            before = newest_checkpoint(folder)
            attempt = Attempt(config=config, folder=folder, lock=lock, console=console, stop_requests=stop_requests)
            try:
                code = attempt.carry_out()
            except TunebookError as error:
                print_text(f"error: {error.message}", console)
                code = error.exit_code
            has_progress = newest_checkpoint(folder) != before or is_trained(folder, config)
        if code == StoppedError.exit_code and attempt.stopped_by == _BY_SLURM and config.launcher.requeue:
            _requeue(config.launcher, console, has_progress=has_progress)
    except TunebookError as error:
        print_text(f"error: {error.message}", console)
        return error.exit_code
    return code


def _begin(folder: Path, *, is_done: bool) -> None:
    """Record the start of this turn: where it runs, and how earlier turns ended."""
    manifest = read_manifest(folder)
    facts: dict[str, Any] = {
        "hardware": describe_hardware(None),
        "slurm": {
            "job_id": os.environ["SLURM_JOB_ID"],
            "nodes": os.environ.get("SLURM_JOB_NODELIST"),
            "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        },
    }
    status = manifest["status"]
    if status["state"] != RunState.running.name:
        facts["earlier_attempts"] = [*manifest["earlier_attempts"], status]
        started = datetime.now(UTC).isoformat(timespec="seconds")
        running = {"state": RunState.running.name, "exit_code": None, "reason": None, "started": started}
        facts["status"] = running | {"ended": None, "seconds": None}
    update_manifest(folder, facts)
    if not is_done:
        clear_outcomes(folder)


def _requeue(settings: SlurmConfig, console: Console, *, has_progress: bool) -> None:
    """Request another turn, unless this one used its full time without progress, as the next one would.

    A turn that was preempted early is requeued anyway, since the next may be longer.
    """
    job_id = os.environ["SLURM_JOB_ID"]

    def say(text: str) -> None:
        print_text(f"job {job_id}: {text}", console)

    if not has_progress and _is_used_up(settings, patiently(lambda: job_state(job_id), say)):
        say("not requeued: this turn saved nothing; a longer launcher.time_limit is needed")
        return
    requeue(job_id, say)


def _is_used_up(settings: SlurmConfig, state: JobState | None) -> bool:
    """Whether Slurm wants the nodes back because of the time limit."""
    if state is None or state.limit_s is None:
        return False
    return state.limit_s - state.run_s <= settings.stop_timeout_s + _WARNED_EARLIER_S
