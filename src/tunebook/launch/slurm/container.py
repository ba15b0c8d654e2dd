"""Run a node's part of a Slurm job in a container: through pyxis, which srun enters it by, or plain `docker run`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tunebook.config.book import resolve_path
from tunebook.config.cache import CACHE_VARIABLE
from tunebook.config.choices import ContainerRuntime, Generation
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.launch.calling import TOKEN_VARIABLE
from tunebook.launch.local import handed_on
from tunebook.record.files import PREPARED_FILE

# What a container of Docker's gets of the task's environment; pyxis passes all of it.
_OF_THE_TASK = (TOKEN_VARIABLE, "SLURM_NODEID", "SLURM_JOB_ID")
# Variables that name a folder which a rank reads.
_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "TUNEBOOK_HOME", CACHE_VARIABLE)


def is_contained(config: RunConfig) -> bool:
    """Whether a run's ranks work in containers that Tunebook starts."""
    return isinstance(config.launcher, SlurmConfig) and config.launcher.container_image is not None


def in_container(config: RunConfig, folder: Path, command: list[str]) -> list[str]:
    """A Python command as it runs in the image of `launcher.container_image`; unchanged where none is named."""
    settings = config.launcher
    if not isinstance(settings, SlurmConfig) or settings.container_image is None:
        return command
    inside = [settings.container_python, *command[1:]]
    mounts = container_mounts(config, folder)
    if settings.container_runtime is ContainerRuntime.pyxis:
        places = ",".join(f"{place}:{place}" for place in mounts)
        options = {"image": settings.container_image, "mounts": places, "workdir": Path.cwd()}
        return [*(f"--container-{name}={value}" for name, value in options.items()), *inside]
    volumes = [word for place in mounts for word in ("--volume", f"{place}:{place}")]
    # A ~ would be another home inside, and a relative folder one of another place.
    folders = [f"{name}={place}" for name, place in _named_folders().items()]
    named = sorted(name for name in handed_on(os.environ) if name not in _FOLDERS)
    passed = [word for name in (*named, *folders, *_OF_THE_TASK) for word in ("--env", name)]
    is_on_gpu = config.hardware.generation is not Generation.cpu
    gpus = ["--gpus", "all", "--ulimit", "memlock=-1"] if is_on_gpu else []  # page-locked memory, for the network
    # The host's network and shared memory: NCCL and gloo find each other as they would without a container.
    return [
        *["docker", "run", "--rm", "--network", "host", "--ipc", "host", *gpus],
        *["--user", f"{os.getuid()}:{os.getgid()}", "--workdir", str(Path.cwd()), *volumes, *passed],
        *["--entrypoint", inside[0], settings.container_image, *inside[1:]],
    ]


def container_mounts(config: RunConfig, folder: Path) -> list[str]:
    """The folders that a run needs, at the same paths inside: its own, its data, its model's, and the user's choice.

    And those that variables name, which reach the container too: it would look for them in vain.
    """
    settings = config.launcher
    assert isinstance(settings, SlurmConfig)
    places = [str(Path.cwd()), str(folder), *settings.container_mounts]
    prepared = folder / PREPARED_FILE
    if prepared.is_file():
        places.append(json.loads(prepared.read_text())["folder"])
    if config.model.path is not None:
        places.append(str(resolve_path(config.model.path)))
    return list(dict.fromkeys([*places, *_named_folders().values()]))


def _named_folders() -> dict[str, str]:
    """The folders, by the variable that names them, which are there; Docker would make the others, as root."""
    set_here = {name: os.environ[name] for name in _FOLDERS if os.environ.get(name)}
    folders = {name: Path(value).expanduser().absolute() for name, value in set_here.items()}
    return {name: str(folder) for name, folder in folders.items() if folder.is_dir()}
