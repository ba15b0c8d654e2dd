"""The job script, rendered for people to read: a pure function of the configuration. `man sbatch` has the options."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.config.unsafe_text import control_character, require_printable
from tunebook.launch.commands import JOB_SCRIPT, job_body

_HEAD = "#!/usr/bin/env bash"
_SPECIAL = re.compile(r"""[\s#"'\\]""")  # ends a word, begins a comment or a quotation, or escapes, to sbatch


def output_file(folder: Path, job_id: str) -> Path:
    """Where a job prints: one file for all its turns, also of an array's task."""
    return folder / f"slurm-{job_id}.out"


def output_pattern(folder: Path, name: str) -> str:
    """A file that Slurm opens for a job, as its options name it: the signs after % are Slurm's in `name` alone."""
    return f"{str(folder).replace('%', '%%')}/{name}"


def unusable_sign(folder: Path) -> str | None:
    """What Slurm cannot have in the path of a file that a job prints to, in words; None where there is nothing.

    A backslash turns the signs after % off for the whole path, also that of the job's number (`man sbatch`, filename
    pattern), and options in a script end with their line.
    """
    return "a backslash" if "\\" in str(folder) else control_character(str(folder))


def job_options(config: RunConfig, folder: Path | None = None) -> dict[str, str | None]:
    """sbatch's options by name; None where an option takes no value. Without a folder: what a trial needs."""
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
    """The same as words of a command line, with the user's own at the end, which win."""
    settings = config.launcher
    assert isinstance(settings, SlurmConfig)
    words = [name if value is None else f"{name}={value}" for name, value in job_options(config, folder).items()]
    return [*words, *settings.extra_args]


def job_script(config: RunConfig, folder: Path, python: str = sys.executable) -> str:
    """The script that `sbatch` is given: one task per node, of which the first starts everything.

    Raises: RequestError for a control character in anything that it is made of.
    """
    settings = config.launcher
    assert isinstance(settings, SlurmConfig)
    for what, text in {"title": config.title, "the run folder": str(folder)}.items():
        require_printable(what, text)
    comments = [
        f"{config.title or 'A run'}: the job of {folder}",
        f"Submitted by tunebook train; again by hand: sbatch {shlex.quote(str(folder / JOB_SCRIPT))}",
        f"Slurm sends USR1 {settings.stop_timeout_s} s before the time limit, and on preemption where set to; the run",
        f"saves, and {'asks to be requeued: it then goes on in this folder' if settings.requeue else 'ends'}.",
    ]
    return script_text(comments, option_words(config, folder), job_body(folder, python))


def script_text(comments: list[str], options: list[str], body: str) -> str:
    """A job script: comments, sbatch's options, and one command that starts everything.

    Raises: RequestError for a control character in anything that it is made of.
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
    """Options as sbatch reads them from a script: what stands for something else there is between quotes.

    Raises: RequestError for a control character: no quotes keep sbatch from ending an option with its line.
    """
    for word in words:
        require_printable("an option of sbatch", word)
    return [f"#SBATCH {_quoted(word)}" for word in words]


def _quoted(word: str) -> str:
    """An option with quotes round what needs them: its value, or all of it where it is one word without a value."""
    if not _SPECIAL.search(word):
        return word
    name, equals, value = word.partition("=")
    if not equals or _SPECIAL.search(name):
        name, equals, value = "", "", word
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'
