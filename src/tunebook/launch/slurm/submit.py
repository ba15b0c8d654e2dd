"""Submit a run's job to Slurm, and optionally follow it until it ends."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.config.unsafe_text import require_printable
from tunebook.errors import RequestError, StoppedError, TunebookError
from tunebook.files import atomic_write_text
from tunebook.launch.commands import JOB_SCRIPT, job_body, show_command
from tunebook.launch.slurm.client import (
    JobState,
    job_state,
    option_words,
    output_file,
    patiently,
    script_text,
    slurm,
    submit_command,
    submit_script,
)
from tunebook.processes import RequestCount, handling_signals
from tunebook.record.manifest import RunState, finish_manifest, read_manifest, update_manifest
from tunebook.terminal import print_text

_POLL_S = 2.0
_OWN_RECORDS_WITHIN_S = 20.0  # for a network file system to show the job's files


def job_script(config: RunConfig, folder: Path) -> str:
    """Return the script for `sbatch`: one task per node, of which the first starts everything.

    Raises: RequestError for a control character in any input.
    """
    settings = config.launcher
    assert isinstance(settings, SlurmConfig)
    for what, text in {"title": config.title, "the run folder": str(folder)}.items():
        require_printable(what, text)
    comments = [
        f"{config.title or 'A run'}: the job of {folder}",
        f"Submitted by tunebook train; again by hand: sbatch {shlex.quote(str(folder / JOB_SCRIPT))}",
        f"Slurm sends USR1 {settings.stop_timeout_s} s before the time limit, and on preemption where set to; the run",
        f"saves, and {'asks to be requeued: it then resumes in this folder' if settings.requeue else 'ends'}.",
    ]
    return script_text(comments, option_words(config, folder), job_body(folder))


def submit(config: RunConfig, folder: Path, console: Console) -> str:
    """Write the job script and submit it; return the job ID. Raises: RequestError if Slurm refuses it."""
    try:
        atomic_write_text(folder / JOB_SCRIPT, job_script(config, folder))
        show_command(submit_command(folder / JOB_SCRIPT), console)
        job_id = submit_script(folder / JOB_SCRIPT)
    except TunebookError as error:
        finish_manifest(folder, RunState.failed, error.exit_code, error.message)
        raise
    update_manifest(folder, {"slurm": {"job_id": job_id}})
    lines = [
        f"submitted as job {job_id}",
        f"  what it prints:  tail -F {shlex.quote(str(output_file(folder, job_id)))}",
        f"  how it stands:   squeue --job {job_id}",
        f"  stop and save:   scancel --batch --signal=TERM {job_id}",
        f"  take it back while it waits: scancel {job_id}",
    ]
    print_text("\n".join(lines), console)
    return job_id


def refuse_if_queued(folder: Path) -> None:
    """Refuse a run folder whose job is still pending or running. Raises: RequestError."""
    try:
        job_id = read_manifest(folder).get("slurm", {}).get("job_id")
    except TunebookError:
        return
    if job_id is None:
        return
    try:
        state = job_state(job_id)
    except TunebookError:
        return  # no Slurm here: the folder's lock must suffice
    if state is not None and not state.has_ended:
        raise RequestError(
            f"the run in {folder} is Slurm's job {job_id}, {state.text()}; wait for it, stop it (scancel {job_id}), or "
            "start another with training.resume=never",
            problem_id="run-is-running",
        )


def follow(job_id: str, folder: Path, console: Console) -> int:
    """Show a job's states and output until it has ended; return the run's exit code.

    The first stop request (Ctrl-C, SIGTERM) lets the job save and end; a later Ctrl-C cancels the job.
    """
    printed = _Tail(output_file(folder, job_id))
    last: str | None = None
    with _stopping(job_id, console):
        while True:
            state = _waited_for(job_id, console)
            printed.show(console)
            if state is not None and state.text() != last:
                last = state.text()
                print_text(f"job {job_id}: {last}", console)
            if state is None or state.has_ended or (state.name == "COMPLETING" and _is_recorded(folder)):
                break
            time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # a network file system may show the last lines late
    printed.show(console)
    return _exit_code(job_id, folder, state)


def _waited_for(job_id: str, console: Console) -> JobState | None:
    """Return the job's state, waiting for a silent controller."""
    return patiently(lambda: job_state(job_id), lambda text: print_text(f"job {job_id}: {text}", console))


def _is_recorded(folder: Path) -> bool:
    """Whether the run has ended for good, whatever Slurm still waits for; a stopped run may be requeued."""
    return read_manifest(folder)["status"]["state"] not in (RunState.running.name, RunState.stopped.name)


class _Tail:
    """Prints what is appended to a file."""

    def __init__(self, file: Path) -> None:
        self._file, self._place = file, 0

    def show(self, console: Console) -> None:
        """Print new text; keep the job's own terminal codes."""
        if not self._file.is_file():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._place)
            new = stream.read()
        self._place += len(new)
        console.file.write(new.decode(errors="replace"))
        console.file.flush()


@contextmanager
def _stopping(job_id: str, console: Console) -> Iterator[None]:
    """Forward stop requests to the job."""
    count = RequestCount()

    def ask(number: int, _frame: FrameType | None) -> None:
        turn = count.take(number)
        if turn == 0:
            return
        state = _waited_for(job_id, console) if turn == 1 else None
        is_polite = state is not None and state.name == "RUNNING"
        words = ["scancel", "--batch", "--signal=TERM", job_id] if is_polite else ["scancel", job_id]
        console.print(f"stopping: {' '.join(words)}" + (" (Ctrl-C cancels it at once)" if is_polite else ""))
        answer = slurm(*words)
        if answer.returncode != 0:
            said = f"the job was not reached: {answer.stderr.strip()}; type it again: {' '.join(words)}"
            print_text(said, console)

    with handling_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), ask, takes_ignored=True):
        yield


def _exit_code(job_id: str, folder: Path, state: JobState | None) -> int:
    """Return the exit code that the job recorded; Slurm's if there is none."""
    end = time.monotonic() + _OWN_RECORDS_WITHIN_S
    while True:
        status = read_manifest(folder)["status"]
        if status["state"] != RunState.running.name:
            return int(status["exit_code"])
        if time.monotonic() > end or (state is not None and state.name == "CANCELLED"):
            break
        time.sleep(_POLL_S)
    how = state.text() if state is not None else "gone from Slurm's list"
    if state is not None and state.name == "CANCELLED":
        reason = f"Slurm's job {job_id} was canceled before it could save"
        finish_manifest(folder, RunState.stopped, StoppedError.exit_code, reason)
        raise StoppedError(reason, problem_id="stopped")
    reason = (
        f"Slurm's job {job_id} ended without recording a reason: {how}; look at {output_file(folder, job_id)}. If that "
        "is missing, the nodes cannot see this folder or this Python; put both on a file system that all nodes share"
    )
    finish_manifest(folder, RunState.failed, 1, reason)
    raise TunebookError(reason, problem_id="slurm-job-lost")
