"""Trials as Slurm jobs, seen from their overrides: which choose the job's options, and which the trial inside gets."""

from __future__ import annotations

import re
from pathlib import Path

from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.errors import RequestError

_PLACEHOLDER = re.compile(r"%[jtaA]")
_KEPT_IN_JOB = ("launcher.timeout_s", "launcher.start_timeout_s", "launcher.stop_timeout_s")


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Words of a sweep whose trials are Slurm jobs: for the job's options, and for the trial inside it.

    Raises: RequestError for another launcher, or several values of its keys.
    """
    for word in words:
        key, _, value = word.partition("=")
        if key == "launcher" and value != "slurm":
            raise RequestError(
                f"--launcher=slurm and {word} ask for two launchers; a trial always runs launcher=local inside its "
                f"job: leave {word} out",
                problem_id="sweep-option",
            )
    for_job = ["launcher=slurm", *(word for word in words if not word.startswith("launcher="))]
    inside = [word for word in words if not _is_launchers(word) or word.partition("=")[0] in _KEPT_IN_JOB]
    return for_job, [*inside, "launcher=local"]


def check_jobs(config: RunConfig) -> None:
    """Whether trials of a configuration can be Slurm jobs. Raises: RequestError with what to type."""
    assert isinstance(config.launcher, SlurmConfig)
    if config.hardware.num_nodes > 1 or config.launcher.container_image is not None:
        what = f"hardware.num_nodes={config.hardware.num_nodes}"
        if config.launcher.container_image is not None:
            what = f"launcher.container_image={config.launcher.container_image}"
        raise RequestError(
            f"{what}: with --launcher=slurm a trial is one process on one node, outside of containers; let each trial "
            "submit its own job instead: --launcher=joblib --jobs=2 launcher=slurm launcher.wait=true",
            problem_id="sweep-option",
        )
    _check_outputs(Path(config.outputs).expanduser().absolute())


def _check_outputs(outputs: Path) -> None:
    """Refuse what submitit replaces in the path of its own files by the number of a job. Raises: RequestError."""
    if found := _PLACEHOLDER.search(str(outputs)):
        raise RequestError(
            f"outputs={outputs}: submitit, which brings trials to their nodes, puts a job's number in the place of "
            f"{found[0]}; write elsewhere: outputs=/a/folder/of/yours",
            problem_id="sweep-option",
        )


def _is_launchers(word: str) -> bool:
    return word.startswith(("launcher=", "launcher."))
