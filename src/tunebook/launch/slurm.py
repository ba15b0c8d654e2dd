"""Slurm: its commands with a time limit, the job script of a run, submitting it, and following it to its end.

On the user's machine: submit, follow. In the job, on its first node: `commands.slurm_turn`. It does what `tunebook
train` does elsewhere after the run folder is set up, and starts the ranks through srun. Sweeps submit arrays with the
same functions. `man sbatch` describes the options.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from tunebook.config.choices import Generation
from tunebook.config.launchers import SlurmConfig
from tunebook.config.override_text import shell_command
from tunebook.config.schema import RunConfig
from tunebook.config.unsafe_text import require_printable
from tunebook.errors import RequestError, StoppedError, TunebookError
from tunebook.files import atomic_write_text
from tunebook.launch.supervise import StopRequests
from tunebook.record.manifest import RunState, finish_manifest, manifest_or_empty, read_manifest, update_manifest
from tunebook.record.run_folder import run_name
from tunebook.terminal import print_text

_Reply = TypeVar("_Reply")

JOB_SCRIPT = "job.sh"
_SLURM_JOB = "tunebook.commands.slurm_job"
_POLL_S = 2.0
_OWN_RECORDS_WITHIN_S = 20.0  # for a network file system to show the job's files
_CLIENT_TIMEOUT_S = 60.0  # Slurm's own commands retry for minutes
_SILENT_WITHIN_S = 600.0  # for a controller that is restarting or busy; jobs continue without it
_SILENT_POLL_S = 10.0
_FIELD = re.compile(r"(?:^| )(\w+)=(.*?)(?= [A-Za-z/:]+=|\s*$)")  # a reason may contain blanks
_UNKNOWN_JOB = "invalid job id"
_OUT_OF_REACH = (  # scontrol reports "unexpected message" if it gets no reply to a change of a job
    *("unable to contact slurm controller", "socket timed out", "establish a configuration source"),
    "unexpected message received",
)
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip
_SPECIAL = re.compile(r"""[\s#"'\\]""")  # to sbatch these end a word, start a comment or quotation, or escape


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of a job, from `scontrol show job`."""

    name: str  # PENDING, RUNNING, COMPLETED ...
    reason: str  # why it is pending, or has ended
    nodes: str  # on which it runs

    @property
    def has_ended(self) -> bool:
        """Whether it will not run any more."""
        return self.name in _ENDED

    def text(self) -> str:
        """The state as text for a terminal."""
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"{self.name}{reason}" + (f" on {self.nodes}" if self.nodes else "")


def slurm(*command: str, input_text: str | None = None) -> str:
    """Run a Slurm command; return its output.

    Raises: RequestError if it is missing or Slurm refuses, TunebookError if the controller does not respond.
    """
    if shutil.which(command[0]) is None:
        raise RequestError(
            f"launcher=slurm needs Slurm's command {command[0]}, which is not on this machine; type this on a login "
            "node of the cluster, or use launcher=local",
            problem_id="slurm-not-found",
        )
    try:
        answer = subprocess.run(
            command, input=input_text, capture_output=True, text=True, timeout=_CLIENT_TIMEOUT_S, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise _out_of_reach(f"{command[0]} did not answer within {_CLIENT_TIMEOUT_S:g} s") from error
    if answer.returncode == 0:
        return answer.stdout
    reason = "; ".join(answer.stderr.strip().splitlines())
    if any(text in reason.lower() for text in _OUT_OF_REACH):
        raise _out_of_reach(reason)
    subject = "the job" if command[0] == "sbatch" else command[0]
    raise RequestError(
        f"Slurm refuses {subject}: {reason}; look at the cluster with: sinfo; sacctmgr show assoc user=$USER, and at "
        "launcher.partition, launcher.account, hardware.num_nodes",
        problem_id="slurm-refused",
    )


def _out_of_reach(reason: str) -> TunebookError:
    message = f"Slurm's controller is not reachable ({reason}); look with: scontrol ping"
    return TunebookError(message, problem_id="slurm-out-of-reach")


def is_unknown_job(error: RequestError) -> bool:
    """Whether Slurm refused because it has forgotten a job."""
    return _UNKNOWN_JOB in error.message.lower()


def patiently(call: Callable[[], _Reply], say: Callable[[str], None]) -> _Reply:
    """Call Slurm, again while its controller is silent. Raises: TunebookError after 10 minutes."""
    end = time.monotonic() + _SILENT_WITHIN_S
    while True:
        try:
            return call()
        except TunebookError as error:
            if error.problem_id != "slurm-out-of-reach" or time.monotonic() > end:
                raise
            say(f"{error.message}; trying again in {_SILENT_POLL_S:g} s")
        time.sleep(_SILENT_POLL_S)


def check_job(config: RunConfig) -> None:
    """Let Slurm check the job's options before anything is prepared. Raises: RequestError if it refuses them."""
    slurm("sbatch", "--test-only", *option_words(config), input_text="#!/bin/sh\ntrue\n")


def submit_script(script: Path) -> str:
    """Submit a job script to Slurm; return the job ID. Raises: RequestError if Slurm refuses it."""
    return slurm(*submit_command(script)).strip().partition(";")[0]


def requeue(job_id: str, say: Callable[[str], None]) -> None:
    """Requeue a job, waiting for a silent controller, and say whether Slurm accepted it.

    A job that ends without a requeue has ended for good.
    """
    try:
        patiently(lambda: slurm("scontrol", "requeue", job_id), say)
    except TunebookError as error:
        say(f"not requeued: {error.message}")
    else:
        say("requeued: it resumes in this folder")


def job_state(job_id: str) -> JobState | None:
    """Return a job's state; None once Slurm has forgotten it (some minutes after its end)."""
    try:
        values = dict(_FIELD.findall(slurm("scontrol", "--oneliner", "show", "job", job_id)))
    except RequestError as error:
        if is_unknown_job(error):
            return None
        raise
    nodes = values.get("NodeList", "")
    return JobState(name=values["JobState"], reason=values.get("Reason", ""), nodes="" if nodes == "(null)" else nodes)


def submit_command(script: Path) -> list[str]:
    """Return the command that submits a job script and prints only the job ID."""
    return ["sbatch", "--parsable", str(script)]


def output_file(folder: Path, job_id: str) -> Path:
    """Return a job's output file: one for all its turns, also for a task of an array."""
    return folder / f"slurm-{job_id}.out"


def output_pattern(folder: Path, name: str) -> str:
    """Return a file path for sbatch's options: only `name` may contain Slurm's % patterns."""
    return f"{str(folder).replace('%', '%%')}/{name}"


def option_words(config: RunConfig, folder: Path | None = None) -> list[str]:
    """Return sbatch's options as command-line words. Without a folder: the options of a trial.

    The user's own come last and take precedence.
    """
    settings, hardware = config.launcher, config.hardware
    assert isinstance(settings, SlurmConfig)
    options = [f"--job-name={run_name(config)}", f"--nodes={hardware.num_nodes}", "--ntasks-per-node=1"]
    if hardware.generation is not Generation.cpu:
        options.append(f"--gpus-per-node={hardware.gpus_per_node}")
    if settings.cpus_per_task is not None:
        options.append(f"--cpus-per-task={settings.cpus_per_task}")
    else:
        options += ["--exclusive", "--mem=0"]
    named = {"partition": settings.partition, "account": settings.account, "time": settings.time_limit}
    options += [f"--{name}={value}" for name, value in named.items() if value is not None]
    if folder is not None:
        options += [f"--output={output_pattern(folder, output_file(folder, '%j').name)}", "--open-mode=append"]
    options += ["--requeue" if settings.requeue else "--no-requeue", f"--signal=B:USR1@{settings.stop_timeout_s}"]
    return [*options, *settings.extra_args]


def script_text(comments: list[str], options: list[str], body: str) -> str:
    """Return a job script: comments, sbatch's options, and one command that starts everything.

    Raises: RequestError for a control character, which could begin another line.
    """
    lines = [
        "#!/usr/bin/env bash",
        *(f"# {comment}" for comment in comments),
        *(f"#SBATCH {_quoted(option)}" for option in options),
        "",
        "set -euo pipefail",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE  # srun no longer takes it from the job, and would use one core",
        f"cd {shlex.quote(str(Path.cwd()))}",
        body,
    ]
    for line in lines:
        require_printable("a line of the job script", line)
    return "\n".join(lines) + "\n"


def _quoted(option: str) -> str:
    """Quote an option for sbatch where needed."""
    if not _SPECIAL.search(option):
        return option
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def job_script(config: RunConfig, folder: Path) -> str:
    """Return the script for `sbatch`: one task per node, of which the first starts everything.

    Raises: RequestError for a control character in any input.
    """
    settings = config.launcher
    assert isinstance(settings, SlurmConfig)
    comments = [
        f"{config.title or 'A run'}: the job of {folder}",
        f"Submitted by tunebook train; again by hand: sbatch {shlex.quote(str(folder / JOB_SCRIPT))}",
    ]
    # `exec` makes Slurm's signals reach the launcher, not a shell.
    body = f"exec {shlex.join([sys.executable, '-m', _SLURM_JOB, str(folder)])}"
    return script_text(comments, option_words(config, folder), body)


def submit(config: RunConfig, folder: Path, console: Console) -> str:
    """Write the job script and submit it; return the job ID. Raises: RequestError if Slurm refuses it."""
    try:
        atomic_write_text(folder / JOB_SCRIPT, job_script(config, folder))
        print_text(f"launch: {shell_command(submit_command(folder / JOB_SCRIPT))}", console)
        job_id = submit_script(folder / JOB_SCRIPT)
    except TunebookError as error:
        finish_manifest(folder, RunState.failed, error.exit_code, error.message)
        raise
    update_manifest(folder, {"slurm": {"job_id": job_id}})
    lines = [
        f"submitted as job {job_id}",
        f"  output:          tail -F {shlex.quote(str(output_file(folder, job_id)))}",
        f"  state:           squeue --job {job_id}",
        f"  stop and save:   scancel --batch --signal=TERM {job_id}",
        f"  cancel while it is pending: scancel {job_id}",
    ]
    print_text("\n".join(lines), console)
    return job_id


def refuse_if_queued(folder: Path) -> None:
    """Refuse a run folder whose job is still pending or running. Raises: RequestError."""
    job_id = manifest_or_empty(folder).get("slurm", {}).get("job_id")
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

    def say(text: str) -> None:
        print_text(f"job {job_id}: {text}", console)

    place, last, requests, num_passed_on = 0, None, StopRequests(), 0
    with requests.listening():
        while True:
            state = patiently(lambda: job_state(job_id), say)
            place = _print_from(place, output_file(folder, job_id), console)
            if state is not None and state.text() != last:
                last = state.text()
                say(last)
            # A job with a dead node completes for minutes; its run has recorded how it ended.
            if state is None or state.has_ended or (state.name == "COMPLETING" and _has_ended(folder)):
                break
            if requests.num > num_passed_on:
                num_passed_on += 1
                _stop(job_id, console, saves=num_passed_on == 1 and state.name == "RUNNING")
            time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # a network file system may show the last lines late
    _print_from(place, output_file(folder, job_id), console)
    return _exit_code(job_id, folder, state)


def _stop(job_id: str, console: Console, *, saves: bool) -> None:
    """Let a job save and end, or cancel it."""
    command = ["scancel", "--batch", "--signal=TERM", job_id] if saves else ["scancel", job_id]
    console.print(f"stopping: {' '.join(command)}" + (" (Ctrl-C cancels it at once)" if saves else ""))
    try:
        slurm(*command)
    except TunebookError as error:
        print_text(f"the job was not reached: {error.message}; type it again: {' '.join(command)}", console)


def _print_from(place: int, file: Path, console: Console) -> int:
    """Print what was appended to a file, with the job's own terminal codes; return the place of its end."""
    if not file.is_file():
        return place
    with file.open("rb") as stream:
        stream.seek(place)
        new = stream.read()
    console.file.write(new.decode(errors="replace"))
    console.file.flush()
    return place + len(new)


def _has_ended(folder: Path) -> bool:
    """Whether the run has ended for good; one that was stopped may be requeued."""
    return read_manifest(folder)["status"]["state"] not in (RunState.running.name, RunState.stopped.name)


def _exit_code(job_id: str, folder: Path, state: JobState | None) -> int:
    """Return the exit code that the job recorded. Raises: StoppedError or TunebookError if it recorded none."""
    is_canceled = state is not None and state.name == "CANCELLED"
    end = time.monotonic() + (0.0 if is_canceled else _OWN_RECORDS_WITHIN_S)
    while (status := read_manifest(folder)["status"])["state"] == RunState.running.name and time.monotonic() < end:
        time.sleep(_POLL_S)
    if status["state"] != RunState.running.name:
        return int(status["exit_code"])
    if is_canceled:
        reason = f"Slurm's job {job_id} was canceled before it could save"
        finish_manifest(folder, RunState.stopped, StoppedError.exit_code, reason)
        raise StoppedError(reason, problem_id="stopped")
    how = state.text() if state is not None else "gone from Slurm's list"
    reason = (
        f"Slurm's job {job_id} ended without recording a reason: {how}; look at {output_file(folder, job_id)}. If that "
        "is missing, the nodes cannot see this folder or this Python; put both on a file system that all nodes share"
    )
    finish_manifest(folder, RunState.failed, 1, reason)
    raise TunebookError(reason, problem_id="slurm-job-lost")
