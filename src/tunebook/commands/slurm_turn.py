"""One turn of a Slurm job, on its first node: run a run folder until it ends or Slurm wants the nodes back."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from tunebook.commands.attempt import Attempt
from tunebook.config.launchers import SlurmConfig
from tunebook.errors import StoppedError, TunebookError
from tunebook.launch.local import load_shared_config
from tunebook.launch.resume import is_trained
from tunebook.launch.slurm import requeue
from tunebook.launch.supervise import StopRequests
from tunebook.record.manifest import RunState, read_manifest, update_manifest
from tunebook.record.provenance import describe_hardware
from tunebook.record.run_folder import clear_outcomes, working_in
from tunebook.terminal import print_text

_LOCK_WITHIN_S = 60.0  # the submitting process still locks the folder for a moment
_BY_SLURM = "SIGUSR1"  # the signal that the job script requests from Slurm before it takes the job away


def carry_out_turn(folder: Path, requests: StopRequests) -> int:
    """Run one turn of the job; return the run's exit code. The caller listens for `requests`."""
    console = Console(width=160)
    try:
        config = load_shared_config(folder)
        assert isinstance(config.launcher, SlurmConfig)
        with working_in(folder, _LOCK_WITHIN_S) as lock:
            _begin(folder, is_done=is_trained(folder, config))
            attempt = Attempt(config=config, folder=folder, lock=lock, console=console, requests=requests)
            try:
                code = attempt.carry_out()
            except TunebookError as error:
                print_text(f"error: {error.message}", console)
                code = error.exit_code
        if code == StoppedError.exit_code and requests.first == _BY_SLURM and config.launcher.requeue:
            _requeue(folder, console, is_done=is_trained(folder, config))
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


def _requeue(folder: Path, console: Console, *, is_done: bool) -> None:
    """Request another turn, unless three in a row saved nothing: the time limit may be too short for one save."""
    job_id = os.environ["SLURM_JOB_ID"]

    def say(text: str) -> None:
        print_text(f"job {job_id}: {text}", console)

    manifest = read_manifest(folder)
    last_turns = [*manifest["earlier_attempts"], manifest["status"]][-3:]
    if not is_done and len(last_turns) == 3 and len({turn.get("last_checkpoint") for turn in last_turns}) == 1:
        say("not requeued: three turns in a row saved nothing; a longer launcher.time_limit is needed")
        return
    requeue(job_id, say)
