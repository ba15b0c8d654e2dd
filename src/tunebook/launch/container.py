"""Run a node's part of a Slurm job in a container: through srun's pyxis plugin, or plain `docker run`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tunebook.config.book import book_root, is_in_book, is_task_file, resolve_path
from tunebook.config.choices import ContainerRuntime, Generation
from tunebook.config.launchers import SlurmConfig
from tunebook.config.schema import RunConfig
from tunebook.data.prepared import PREPARED_FILE
from tunebook.files import CACHE_VARIABLE, cache_root
from tunebook.processes import ENDS_WITH_INPUT
from tunebook.record.manifest import read_manifest, update_manifest
from tunebook.record.provenance import describe_code, describe_environment
from tunebook.train.environment import handed_on

# Variables of the task that a Docker container gets; pyxis passes all of them.
_OF_THE_TASK = ("SLURM_NODEID", "SLURM_JOB_ID")
# Variables that name a folder which a rank reads.
_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "TUNEBOOK_HOME", CACHE_VARIABLE)
USE_IMAGE_SOURCES_VARIABLE = "TUNEBOOK_USE_IMAGE_SOURCES"  # "1": run the sources in the image


def is_contained(config: RunConfig) -> bool:
    """Whether Tunebook starts containers for a run's ranks."""
    return isinstance(config.launcher, SlurmConfig) and config.launcher.container_image is not None


def in_container(config: RunConfig, folder: Path, command: list[str]) -> list[str]:
    """Wrap a Python command to run in the image of `launcher.container_image`; unchanged if no image is named."""
    settings = config.launcher
    if not isinstance(settings, SlurmConfig) or settings.container_image is None:
        return command
    inside = [settings.container_python, *command[1:]]
    mounts = container_mounts(config, folder)
    # Inside, ~ is another home, relative paths start elsewhere, and the image may set its own caches.
    folders = [f"{name}={place}" for name, place in _named_folders().items()]
    if settings.container_runtime is ContainerRuntime.pyxis:
        places = ",".join(f"{place}:{place}" for place in mounts)
        options = {"image": settings.container_image, "mounts": places, "workdir": Path.cwd()}
        named = ["env", *folders] if folders else []
        return [*(f"--container-{name}={value}" for name, value in options.items()), *named, *inside]
    gpus = ["--gpus", "all", "--ulimit", "memlock=-1"]  # page-locked memory, for the network
    volumes = [option for place in mounts for option in ("--volume", f"{place}:{place}")]
    named = sorted(name for name in handed_on(os.environ) if name not in _FOLDERS)
    passed = [option for name in (*named, *folders, *_OF_THE_TASK) for option in ("--env", name)]
    # Host network and shared memory: NCCL and gloo then connect as without a container.
    return [
        *["docker", "run", "--rm", "--network", "host", "--ipc", "host"],
        *([] if config.hardware.generation is Generation.cpu else gpus),
        *["--interactive", "--env", f"{ENDS_WITH_INPUT}=1"],
        *["--user", f"{os.getuid()}:{os.getgid()}", "--workdir", str(Path.cwd()), *volumes, *passed],
        *["--entrypoint", inside[0], settings.container_image, *inside[1:]],
    ]


def container_mounts(config: RunConfig, folder: Path) -> list[str]:
    """Return the folders that a run needs, mounted at the same paths: its own, data, images, model, user's choice.

    Also those of a named checkpoint and of task files, and those that variables passed to the container name.
    """
    from tunebook.checkpoint.choose import resume_folder  # takes half a second to import

    settings = config.launcher
    assert isinstance(settings, SlurmConfig)
    places = [str(Path.cwd()), str(folder), *settings.container_mounts]
    prepared = folder / PREPARED_FILE
    if prepared.is_file():
        data = Path(json.loads(prepared.read_text())["folder"])
        images = json.loads((data / PREPARED_FILE).read_text())["image_folders"]
        places += [str(data), *images]  # the ranks read the files of images
    if config.model.path is not None:
        places.append(str(resolve_path(config.model.path)))
    tasks = [task for task in config.evaluation.tasks if is_task_file(task) and not is_in_book(task)]
    for source in (resume_folder(config), *(resolve_path(task).parent for task in tasks)):
        if source is not None and source.is_dir() and not any(source.is_relative_to(place) for place in places):
            places.append(str(source))
    return list(dict.fromkeys([*places, *_named_folders().values()]))


def _named_folders() -> dict[str, str]:
    """Return existing folders by the variable that names them; Docker would create missing ones as root.

    The two caches are always named: otherwise the container would look for them in its own home folder.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    chosen = {"HF_HOME": caches / "huggingface", CACHE_VARIABLE: cache_root()}
    chosen |= {name: Path(os.environ[name]) for name in _FOLDERS if os.environ.get(name)}
    folders = {name: chosen[name].expanduser().absolute() for name in _FOLDERS if name in chosen}
    return {name: str(folder) for name, folder in folders.items() if folder.is_dir()}


def runs_image_sources() -> bool:
    """Whether the user allows other code in the container than on this machine."""
    return os.environ.get(USE_IMAGE_SOURCES_VARIABLE) == "1"


def record_container(config: RunConfig, folder: Path) -> None:
    """Replace facts of the host in the manifest by those of the container that this process runs in."""
    settings = config.launcher
    assert isinstance(settings, SlurmConfig)
    known = read_manifest(folder)["environment"]  # an image's own Tunebook may say more
    inside = describe_environment(config.hardware.generation.name)
    environment = {name: value for name, value in inside.items() if name in known}
    _, _, last = (settings.container_image or "").rpartition("@")  # a user's name before it may contain one, too
    digest = last if last.startswith("sha256:") else environment.get("image_digest")
    facts = {"environment": environment | {"image_digest": digest}}
    if runs_image_sources():  # else it is the code that was found on the host, with its commit
        facts["code"] = describe_code(book_root())
    update_manifest(folder, facts)
