"""Run Slurm's commands with timeouts, turn their errors into advice, and write job scripts.

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
from tunebook.config.override_text import as_typed
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.config.unsafe_text import require_printable
from tunebook.errors import RequestError, TunebookError, did_you_mean

_Answer = TypeVar("_Answer")

# Timeout for an unresponsive controller; Slurm's own commands retry for minutes.
CLIENT_TIMEOUT_S = 60.0
SILENT_WITHIN_S = 600.0  # for a controller that is restarting or busy; jobs continue without it
SILENT_POLL_S = 2.0
HOPELESS_FOR_S = 30.0  # a reason may pass: nodes that come back, a limit that somebody lifts
# Pending reasons, as `scontrol show job` prints them, that waiting never resolves, and what to change.
_HOPELESS = {
    "DependencyNeverSatisfied": "what launcher.extra_args has it wait for (--dependency) has failed or is not there; "
    "name another job, or leave it out",
    "BadConstraints": "no nodes are as launcher.extra_args, launcher.partition and hardware ask for; look with: sinfo "
    "-N -o '%N %P %c %G %f %T'",
    "launch_failed_requeued_held": "its node could not start it, and Slurm holds it; look at that node with: sinfo -N "
    "-l, and name others in launcher.extra_args (--exclude=NODE)",
}
_FIELD = re.compile(r"(?:^| )(\w+)=(.*?)(?= [A-Za-z/:]+=|\s*$)")  # a reason may contain blanks
_OUT_OF_REACH = (  # scontrol reports "unexpected message" if it gets no reply to a change of a job
    *("unable to contact slurm controller", "socket timed out", "establish a configuration source"),
    "unexpected message received",
)
_TOO_MUCH = ("node configuration", "node count", "generic resource", "processors requested", "required node")
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip

_HEAD = "#!/usr/bin/env bash"
_SPECIAL = re.compile(r"""[\s#"'\\]""")  # to sbatch these end a word, start a comment or quotation, or escape


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of a job, from `scontrol show job`."""

    name: str  # PENDING, RUNNING, COMPLETED ...
    reason: str  # why it is pending, or has ended
    nodes: str  # on which it runs
    exit_code: int
    signal: int
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
        raise TunebookError(
            f"{words[0]} did not answer within {CLIENT_TIMEOUT_S:g} s: Slurm's controller is not reachable; look with: "
            "scontrol ping",
            problem_id="slurm-out-of-reach",
        ) from error


def check_job(config: RunConfig) -> None:
    """Let Slurm check the job's options before anything is prepared. Raises: RequestError with what to change."""
    settings = config.launcher
    assert isinstance(settings, SlurmConfig)
    answer = slurm("sbatch", "--test-only", *option_words(config), input_text="#!/bin/sh\ntrue\n")
    if answer.returncode == 0:
        return
    raise refusal(answer.stderr, config)


def submit_script(script: Path, config: RunConfig) -> str:
    """Submit a job script to Slurm; return the job ID. Raises: RequestError if Slurm refuses it."""
    answer = slurm(*submit_command(script))
    if answer.returncode != 0:
        raise refusal(answer.stderr, config)
    return answer.stdout.strip().partition(";")[0]


def refusal(said: str, config: RunConfig) -> TunebookError:
    """Return the error for a job that sbatch refuses."""
    why = "; ".join(re.sub(r"^(sbatch|allocation failure): (error: )?", "", line) for line in said.strip().splitlines())
    lowered = said.lower()
    if any(words in lowered for words in _OUT_OF_REACH):
        message = f"Slurm's controller is not reachable ({why}); look with: scontrol ping"
        return TunebookError(message, problem_id="slurm-out-of-reach")
    return RequestError(f"Slurm refuses the job: {why}. {_what_to_change(lowered, config)}", problem_id="slurm-refused")


def _what_to_change(said: str, config: RunConfig) -> str:
    """Return advice for a Slurm error, matched by its lower-case text (slurm_errno.c)."""
    settings, hardware = config.launcher, config.hardware
    assert isinstance(settings, SlurmConfig)
    if "policy" in said:
        return (
            "That is a limit on your jobs, their sizes or times: wait until some have ended (squeue --me), or ask for "
            "less; of a sweep fewer trials at a time, with --jobs=1"
        )
    if "account" in said:
        account = as_typed(settings.account)
        return f"launcher.account={account}: name an account that may use the partition, or null for your default"
    if "partition" in said:
        return _other_partition(settings.partition, is_known="not available" in said)
    if "invalid node name" in said:
        known = _listed("%N", "--Node")
        return "a host in launcher.extra_args is no node of this cluster" + (f": {', '.join(known)}" if known else "")
    if any(words in said for words in _TOO_MUCH):
        return (
            f"no {hardware.num_nodes} nodes of the partition have what is asked for; lower hardware.num_nodes, "
            "hardware.gpus_per_node or launcher.cpus_per_task, or name another launcher.partition; what nodes have: "
            "sinfo -N -o '%N %P %c %G %T'"
        )
    return "look at the cluster with: sinfo; sacctmgr show assoc user=$USER"


def _other_partition(name: str | None, *, is_known: bool) -> str:
    """Return advice for a partition that does not exist, or that takes no jobs for now (`is_known`)."""
    states = sorted({(partition, state) for partition, _, state in (line.partition("=") for line in _listed("%R=%a"))})
    usable = [partition for partition, state in states if state == "up" and partition != name]
    guess = "" if is_known or name is None else did_you_mean(name, [partition for partition, _ in states])
    asked = "The cluster's default partition" if name is None else f"launcher.partition={name}"
    now = (
        f"{asked} takes no such job now: type the same again later, or name another."
        if is_known
        else f"{asked}:{guess}"
    )
    if usable:
        return f"{now} Partitions that are up: {', '.join(f'launcher.partition={each}' for each in usable)}"
    return f"{now} " + ("No other partition is up; look with: sinfo" if states else "sinfo lists them")


def _listed(what: str, *options: str) -> list[str]:
    """Return one column of sinfo, sorted and unique; empty if the controller is silent, since it is only a hint."""
    try:
        answer = slurm("sinfo", "--noheader", *options, f"--format={what}")
    except TunebookError as error:
        if error.problem_id != "slurm-out-of-reach":
            raise
        return []
    return sorted(set(answer.stdout.split())) if answer.returncode == 0 else []


def node_names() -> list[str]:
    """Return the names of this job's nodes, in Slurm's order."""
    answer = slurm("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", ""))
    return answer.stdout.split() if answer.returncode == 0 else []


def patient_job_state(job_id: str, say: Callable[[str], None] = lambda text: None) -> JobState | None:
    """Return a job's state, and wait for a controller that is silent for a while: jobs continue without it.

    `say` is called once if it has to wait. Raises: TunebookError if the controller is silent for `SILENT_WITHIN_S`.
    """
    return _patiently(lambda: job_state(job_id), say)


def patient_requeue(job_id: str, say: Callable[[str], None] = lambda text: None) -> str | None:
    """Requeue a job, waiting for the controller like `patient_job_state`; return Slurm's refusal, else None.

    Raises: TunebookError if the controller is silent for `SILENT_WITHIN_S`.
    """
    return _patiently(lambda: _requeue(job_id), say)


def _requeue(job_id: str) -> str | None:
    answer = slurm("scontrol", "requeue", job_id)
    said = answer.stderr.strip()
    if answer.returncode != 0 and any(words in said.lower() for words in _OUT_OF_REACH):
        raise TunebookError(f"scontrol requeue {job_id}: {said}", problem_id="slurm-out-of-reach")
    return said if answer.returncode != 0 else None


def _patiently(ask: Callable[[], _Answer], say: Callable[[str], None]) -> _Answer:
    begun = time.monotonic()
    has_said = False
    while True:
        try:
            return ask()
        except TunebookError as error:
            if error.problem_id != "slurm-out-of-reach" or time.monotonic() - begun > SILENT_WITHIN_S:
                raise
            if not has_said:
                say(f"Slurm's controller does not answer; waiting for it for up to {SILENT_WITHIN_S:g} s")
                has_said = True
        time.sleep(SILENT_POLL_S)


def job_state(job_id: str) -> JobState | None:
    """Return a job's state; None once Slurm has forgotten it (some minutes after its end)."""
    answer = slurm("scontrol", "--oneliner", "show", "job", job_id)
    if answer.returncode != 0:
        if "invalid job id" in answer.stderr.lower():
            return None
        raise TunebookError(f"scontrol show job {job_id}: {answer.stderr.strip()}", problem_id="slurm-out-of-reach")
    values = dict(_FIELD.findall(answer.stdout))
    code, _, number = values.get("ExitCode", "0:0").partition(":")
    nodes = values.get("NodeList", "")
    return JobState(
        name=values["JobState"],
        reason=values.get("Reason", ""),
        nodes="" if nodes == "(null)" else nodes,
        exit_code=int(code),
        signal=int(number or 0),
        run_s=slurm_seconds(values.get("RunTime", "")) or 0,
        limit_s=slurm_seconds(values.get("TimeLimit", "")),  # UNLIMITED is no number
    )


class HopelessWait:
    """Detects a job that has been pending for some time for a reason that waiting never resolves."""

    def __init__(self) -> None:
        self._since: float | None = None

    def is_long(self, state: JobState) -> bool:
        """Whether the reason has persisted for `HOPELESS_FOR_S`; call it with every new state."""
        if _why_hopeless(state) is None:
            self._since = None
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return now - self._since >= HOPELESS_FOR_S


def take_back_hopeless(job_id: str, state: JobState) -> RequestError:
    """Cancel a job that can never run; return an error that says so and what to change."""
    try:
        answer = slurm("scancel", job_id)
        said = answer.stderr.strip() if answer.returncode != 0 else None
    except TunebookError as error:
        said = error.message
    end = "was taken back" if said is None else f"could not be taken back: {said}; type: scancel {job_id}"
    why = _why_hopeless(state)
    message = f"Slurm's job {job_id} can never run ({state.reason}), and {end}"
    # The command ends its sentence, so that it can be copied.
    return RequestError(f"{message}: {why}" if said is None else f"{message}. Why: {why}", problem_id="slurm-refused")


def _why_hopeless(state: JobState) -> str | None:
    """Say what to change if a job can never run; else None."""
    return _HOPELESS.get(state.reason.replace(" ", "_")) if state.name == "PENDING" else None


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


def job_options(config: RunConfig, folder: Path | None = None) -> dict[str, str | None]:
    """Return sbatch's options by name; None for an option without a value. Without a folder: the options of a trial."""
    settings, hardware = config.launcher, config.hardware
    assert isinstance(settings, SlurmConfig)
    options: dict[str, str | None] = {
        "--job-name": config.recipe or "tunebook",
        "--nodes": str(hardware.num_nodes),
        "--ntasks-per-node": "1",
    }
    if hardware.generation is not Generation.cpu:
        options["--gpus-per-node"] = str(hardware.gpus_per_node)
    if settings.cpus_per_task is not None:
        options["--cpus-per-task"] = str(settings.cpus_per_task)
    else:
        options |= {"--exclusive": None, "--mem": "0"}
    named = {"--partition": settings.partition, "--account": settings.account, "--time": settings.time_limit}
    options |= {name: value for name, value in named.items() if value is not None}
    if folder is not None:
        options |= {"--output": output_pattern(folder, output_file(folder, "%j").name), "--open-mode": "append"}
    options |= {f"--{'' if settings.requeue else 'no-'}requeue": None}
    options["--signal"] = f"B:USR1@{settings.stop_timeout_s}"
    return options


def option_words(config: RunConfig, folder: Path | None = None) -> list[str]:
    """Return the same options as command-line words; the user's own come last and take precedence."""
    settings = config.launcher
    assert isinstance(settings, SlurmConfig)
    words = [name if value is None else f"{name}={value}" for name, value in job_options(config, folder).items()]
    return [*words, *settings.extra_args]


def script_text(comments: list[str], options: list[str], body: str) -> str:
    """Return a job script: comments, sbatch's options, and one command that starts everything.

    Raises: RequestError for a control character in any input.
    """
    for what, text in {"the job's command": body, "the working folder": str(Path.cwd())}.items():
        require_printable(what, text)
    lines = [
        _HEAD,
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
