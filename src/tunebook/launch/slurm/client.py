"""Run Slurm's commands with timeouts, and write job scripts.

Shared by runs and by the trials of a sweep. `man sbatch` describes the options.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.config.unsafe_text import require_printable
from tunebook.errors import RequestError, TunebookError

_Answer = TypeVar("_Answer")

CLIENT_TIMEOUT_S = 60.0  # Slurm's own commands retry for minutes
SILENT_WITHIN_S = 600.0  # for a controller that is restarting or busy; jobs continue without it
SILENT_POLL_S = 10.0
_FIELD = re.compile(r"(?:^| )(\w+)=(.*?)(?= [A-Za-z/:]+=|\s*$)")  # a reason may contain blanks
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
    run_s: int = 0  # of this turn
    limit_s: int | None = None  # of a turn; None: unlimited

    @property
    def has_ended(self) -> bool:
        """Whether it will not run any more."""
        return self.name in _ENDED

    def text(self) -> str:
        """The state as text for a terminal."""
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"{self.name}{reason}" + (f" on {self.nodes}" if self.nodes else "")


def slurm(*words: str, input_text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command. Raises: RequestError if it is missing, TunebookError if the controller does not respond."""
    if shutil.which(words[0]) is None:
        raise RequestError(
            f"launcher=slurm needs Slurm's command {words[0]}, which is not on this machine; type this on a login node "
            "of the cluster, or use launcher=local",
            problem_id="slurm-not-found",
        )
    try:
        return subprocess.run(
            words, input=input_text, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise _out_of_reach(f"{words[0]} did not answer within {CLIENT_TIMEOUT_S:g} s") from error


def check_job(config: RunConfig) -> None:
    """Let Slurm check the job's options before anything is prepared. Raises: RequestError if it refuses them."""
    _submit("sbatch", "--test-only", *option_words(config), input_text="#!/bin/sh\ntrue\n")


def submit_script(script: Path) -> str:
    """Submit a job script to Slurm; return the job ID. Raises: RequestError if Slurm refuses it."""
    return _submit(*submit_command(script)).strip().partition(";")[0]


def _submit(*words: str, input_text: str | None = None) -> str:
    """Run sbatch; return its output. Raises: RequestError with Slurm's reason, TunebookError without a controller."""
    answer = slurm(*words, input_text=input_text)
    if answer.returncode == 0:
        return answer.stdout
    why = "; ".join(answer.stderr.strip().splitlines())
    if _is_out_of_reach(why):
        raise _out_of_reach(why)
    raise RequestError(
        f"Slurm refuses the job: {why}; look at the cluster with: sinfo; sacctmgr show assoc user=$USER, and at "
        "launcher.partition, launcher.account, hardware.num_nodes",
        problem_id="slurm-refused",
    )


def requeue(job_id: str, say: Callable[[str], None]) -> None:
    """Requeue a job, waiting for a silent controller, and say whether Slurm accepted it.

    A job that ends without a requeue has ended for good.
    """
    try:
        patiently(lambda: _requeue(job_id), say)
    except TunebookError as error:
        say(f"not requeued: {error.message}")
    else:
        say("requeued: it resumes in this folder")


def _requeue(job_id: str) -> None:
    answer = slurm("scontrol", "requeue", job_id)
    why = answer.stderr.strip()
    if answer.returncode != 0:
        raise _out_of_reach(why) if _is_out_of_reach(why) else TunebookError(why, problem_id="slurm-refused")


def patiently(ask: Callable[[], _Answer], say: Callable[[str], None]) -> _Answer:
    """Ask Slurm, again while its controller is silent. Raises: TunebookError after `SILENT_WITHIN_S`."""
    end = time.monotonic() + SILENT_WITHIN_S
    while True:
        try:
            return ask()
        except TunebookError as error:
            if error.problem_id != "slurm-out-of-reach" or time.monotonic() > end:
                raise
            say(f"{error.message}; trying again in {SILENT_POLL_S:g} s")
        time.sleep(SILENT_POLL_S)


def _is_out_of_reach(said: str) -> bool:
    return any(words in said.lower() for words in _OUT_OF_REACH)


def _out_of_reach(why: str) -> TunebookError:
    message = f"Slurm's controller is not reachable ({why}); look with: scontrol ping"
    return TunebookError(message, problem_id="slurm-out-of-reach")


def job_state(job_id: str) -> JobState | None:
    """Return a job's state; None once Slurm has forgotten it (some minutes after its end)."""
    answer = slurm("scontrol", "--oneliner", "show", "job", job_id)
    if answer.returncode != 0:
        if "invalid job id" in answer.stderr.lower():
            return None
        raise _out_of_reach(answer.stderr.strip())
    values = dict(_FIELD.findall(answer.stdout))
    nodes = values.get("NodeList", "")
    return JobState(
        name=values["JobState"],
        reason=values.get("Reason", ""),
        nodes="" if nodes == "(null)" else nodes,
        run_s=slurm_seconds(values.get("RunTime", "")) or 0,
        limit_s=slurm_seconds(values.get("TimeLimit", "")),  # UNLIMITED is no number
    )


def node_names() -> list[str]:
    """Return the names of this job's nodes, in Slurm's order."""
    answer = slurm("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", ""))
    return answer.stdout.split() if answer.returncode == 0 else []


def slurm_seconds(time_limit: str) -> int | None:
    """Return the seconds of a Slurm time.

    Forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit)
    if match is None:
        return None
    days, *parts = [int(part) if part is not None else None for part in match.groups()]
    if days is None and parts[2] is None:
        parts = [0, *parts[:2]]  # two parts end in seconds; a single part is minutes
    hours, minutes, seconds = (part or 0 for part in parts)
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


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
    words = [f"--job-name={config.recipe or 'tunebook'}", f"--nodes={hardware.num_nodes}", "--ntasks-per-node=1"]
    if hardware.generation is not Generation.cpu:
        words.append(f"--gpus-per-node={hardware.gpus_per_node}")
    if settings.cpus_per_task is not None:
        words.append(f"--cpus-per-task={settings.cpus_per_task}")
    else:
        words += ["--exclusive", "--mem=0"]
    named = {"partition": settings.partition, "account": settings.account, "time": settings.time_limit}
    words += [f"--{name}={value}" for name, value in named.items() if value is not None]
    if folder is not None:
        words += [f"--output={output_pattern(folder, output_file(folder, '%j').name)}", "--open-mode=append"]
    words += ["--requeue" if settings.requeue else "--no-requeue", f"--signal=B:USR1@{settings.stop_timeout_s}"]
    return [*words, *settings.extra_args]


def script_text(comments: list[str], options: list[str], body: str) -> str:
    """Return a job script: comments, sbatch's options, and one command that starts everything.

    Raises: RequestError for a control character in any input.
    """
    for what, text in {"the job's command": body, "the working folder": str(Path.cwd())}.items():
        require_printable(what, text)
    lines = [
        "#!/usr/bin/env bash",
        *(f"# {comment}" for comment in comments),
        *option_lines(options),
        "",
        "set -euo pipefail",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE  # srun no longer takes it from the job, and would use one core",
        f"cd {shlex.quote(str(Path.cwd()))}",
        body,
    ]
    return "\n".join(lines) + "\n"


def option_lines(words: list[str]) -> list[str]:
    """Return options as `#SBATCH` lines; special characters are quoted.

    Raises: RequestError for a control character: even in quotes, an option ends with its line.
    """
    for word in words:
        require_printable("an option of sbatch", word)
    return [f"#SBATCH {_quoted(word)}" for word in words]


def _quoted(word: str) -> str:
    """Quote an option where needed: its value, or the whole word if it has no value."""
    if not _SPECIAL.search(word):
        return word
    name, equals, value = word.partition("=")
    if not equals or _SPECIAL.search(name):
        name, equals, value = "", "", word
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'
