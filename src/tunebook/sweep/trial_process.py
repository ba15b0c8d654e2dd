"""One trial: a child process `tunebook train` in its own run folder, whose end is a value and never an exception.

The child gets a process group of its own, so that Ctrl-C does not reach it twice: it is asked to stop once, from here,
and can save and end cleanly. It is asked by SIGTERM, because a child of a sweep in the background inherits that SIGINT
is ignored. A second Ctrl-C stops it without saving, a third kills it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tunebook.record.atomic_files import atomic_write_json, read_json
from tunebook.sweep.trials import Trial

EXIT_STOPPED = 6  # a run that was asked to stop


@dataclass(frozen=True, kw_only=True)
class TrialEnd:
    """How the process of a trial ended."""

    exit_code: int
    seconds: float
    was_interrupted: bool  # the sweep was stopped while it ran


def train_command(recipe: str | None, trial: Trial, run_folder: Path, recipes_dirs: list[Path]) -> list[str]:
    """The argument list that trains one trial."""
    command = [sys.executable, "-m", "tunebook", "train", *([recipe] if recipe else []), *trial.overrides]
    for folder in recipes_dirs:
        command += ["--recipes-dir", str(folder)]
    return [*command, "--run-folder", str(run_folder)]


def run_trial(command: list[str], end_file: Path, output: Path | None) -> None:
    """Run a trial to its end and write that down. Raises: KeyboardInterrupt when stopped, after it is written.

    `output` takes what the trial prints; None leaves it on the terminal.
    """
    started = time.monotonic()
    was_interrupted = False
    stream = None if output is None else output.open("wb")
    try:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
        try:
            process.wait()
        except KeyboardInterrupt:
            was_interrupted = True
            _stop(process)
    finally:
        if stream is not None:
            stream.close()
    exit_code = process.returncode if process.returncode >= 0 else 1  # below zero: killed by that signal
    end = TrialEnd(exit_code=exit_code, seconds=round(time.monotonic() - started, 1), was_interrupted=was_interrupted)
    atomic_write_json(end_file, asdict(end))
    if was_interrupted:
        raise KeyboardInterrupt


def read_trial_end(end_file: Path) -> TrialEnd | None:
    """How a trial ended; None when it never did, or was never started."""
    return TrialEnd(**read_json(end_file)) if end_file.is_file() else None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Hand each request to stop on to the trial: save and stop, then stop at once; after that, end it by force."""
    for _ in range(2):
        try:
            process.terminate()
            process.wait()
            return
        except KeyboardInterrupt:
            continue
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it started is asked to stop by the kernel
    process.wait()
