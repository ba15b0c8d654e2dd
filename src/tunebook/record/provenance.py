"""The provenance of a run, for the manifest: code, packages and machine.

A fact that cannot be determined is null, with the reason. Nothing here raises, since a run must not fail without `git`.
(An image with a damaged description is refused earlier.) Nothing identifies the machine or its user.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebook.config.book import BOOK_PREFIX, book_root
from tunebook.config.choices import Generation
from tunebook.config.unsafe_text import is_secret_name, without_secrets
from tunebook.facts.generations import GENERATIONS
from tunebook.files import sha256_file, sha256_text
from tunebook.hardware.image import Image, read_image
from tunebook.hardware.links import links_text, read_links
from tunebook.record.locks import (
    LOCKED_PYTHON,
    PACKAGES,
    PYTHON_NAME,
    generation_versions,
    installed_versions,
    lock_differences,
    optional_versions,
)

IMAGE_DIGEST_VARIABLE = "TUNEBOOK_IMAGE_DIGEST"  # set where a published image is used: it cannot know its own digest
# Variables by which libraries compute in another format, at another speed or in other memory, where somebody set them.
_VARIABLES = (
    "NCCL_", "GLOO_", "PYTORCH_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_", "MKL_", "KMP_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE",
    "TORCH_ALLOW_TF32_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TRITON_", "FLASH_ATTENTION_", "DS_",
)  # fmt: skip
_CODE_FOLDERS = ("src", "hydra_configs", "recipes", "docker")  # untracked files elsewhere do not affect a run


def describe_code(checkout: Path) -> dict[str, Any]:
    """The code's commit and a hash of later changes, from the image or the checkout; `reason` if one is null."""
    if image := read_image():
        if image.git_commit is None:
            return _code(reason="the image was built without a git checkout")
        return _code(image.git_commit, image.git_diff_sha256)
    if shutil.which("git") is None:
        return _code(reason="git is not installed")
    top = _git(checkout, "rev-parse", "--show-toplevel")
    # An installed book may be inside another repository, whose commits do not describe it.
    if top.returncode != 0 or Path(os.fsdecode(top.stdout).rstrip("\n")) != checkout.resolve():
        return _code(reason="the book is not a git checkout")
    head = _git(checkout, "rev-parse", "--verify", "--quiet", "HEAD")
    if head.returncode != 0:
        return _code(reason="the checkout has no commit yet")
    return _code(head.stdout.decode().strip(), _hash_difference(checkout))


def _code(commit: str | None = None, difference: str | None = None, reason: str | None = None) -> dict[str, Any]:
    is_clean = None if commit is None else difference is None
    return {"git_commit": commit, "git_diff_sha256": difference, "is_clean": is_clean, "reason": reason}


def describe_environment(generation: str) -> dict[str, Any]:
    """Image, lock, Python, package versions and the environment variables of libraries.

    `generation` selects the lock. `lock_sha256` is null if an installed package differs from the lock.
    """
    image = read_image()
    installed = installed_versions()
    lock = _describe_lock(generation, image, installed)
    kept = ("generation", "sources_sha256", "torch", "cuda", "attention", "base_image")
    return {
        "image_digest": os.environ.get(IMAGE_DIGEST_VARIABLE) or None,
        "image": {name: getattr(image, name) for name in kept} if image else None,
        "lock_sha256": lock["sha256"] if lock["differences"] == {} else None,
        "lock": lock,
        "installed_sha256": sha256_text("\n".join(sorted(f"{name}=={installed[name]}" for name in installed))),
        "python": platform.python_version(),
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "variables": {
            name: shorten_paths(without_secrets(text))
            for name, text in sorted(os.environ.items())
            # Where a cache is changes no result, and torch sets TORCHINDUCTOR_CACHE_DIR itself when it compiles.
            if name.startswith(_VARIABLES) and not name.endswith("_CACHE_DIR") and not is_secret_name(name)
        },
    }


def _describe_lock(generation: str, image: Image | None, installed: Mapping[str, str]) -> dict[str, Any]:
    """The lock of the image, or else of the generation, and the packages that differ; `reason` if that is unknown."""
    facts = GENERATIONS.get(Generation.__members__.get(generation, Generation.auto))
    docker = book_root() / "docker"
    folder = docker / (image.generation if image else facts.image.name if facts else generation)
    file = folder / "requirements.lock"
    lock: dict[str, Any] = {"name": folder.name, "sha256": None, "differences": None, "reason": None}
    if image is not None:
        lock["sha256"] = image.lock_sha256
    elif file.is_file():
        lock["sha256"] = sha256_file(file)
    else:
        return lock | {"reason": f"there is no docker/{folder.name}/requirements.lock in the book"}
    locked = image.packages if image else generation_versions(folder, installed)
    differences = lock_differences(locked, installed, optional_versions(docker, folder))
    if not (version := platform.python_version()).startswith(f"{LOCKED_PYTHON}."):
        differences[PYTHON_NAME] = {"installed": version, "locked": LOCKED_PYTHON}
    return lock | {"differences": differences}


def describe_hardware(nccl: str | None) -> dict[str, Any]:
    """GPUs, driver, NCCL, topology, CPUs and memory of this machine, and a hash of its name."""
    from tunebook.hardware.detect import detect_machine

    machine, machine_id = detect_machine(), Path("/etc/machine-id")
    secret = machine_id.read_text() if machine_id.is_file() else ""
    return {
        "gpus": [
            {"name": gpu.name, "memory_gib": gpu.memory_gib, "generation": gpu.generation.name} for gpu in machine.gpus
        ],
        "driver": machine.driver,
        "nccl": nccl,
        "topology": links_text(read_links(machine.gpus)) or None,
        "cpus": machine.num_cpus,
        "memory_gib": machine.host_memory_gib,
        # It tells machines apart without naming them.
        "host": sha256_text(f"{secret.strip()}:{socket.gethostname()}")[:16],
    }


def describe_command(arguments: list[str]) -> list[str]:
    """The command line with the program's base name and shortened paths, without secrets."""
    program, *rest = arguments
    name = "tunebook" if Path(program).name == "__main__.py" else Path(program).name
    return [name, *(shorten_paths(without_secrets(word)) for word in rest)]


def shorten_paths(text: str) -> str:
    """A text with `book:` for the book's folder and `~` for the home folder, which often contains the user's name."""
    home = str(Path.home())
    text = text.replace(f"{book_root()}/", BOOK_PREFIX)
    # Only whole path components: /root must not shorten /rootless.
    return re.sub(rf"{re.escape(home)}(?=/|$)", "~", text) if home != "/" else text


def _git(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    # In a container the mounted checkout belongs to another user. git refuses that without safe.directory.
    command = ["git", "-c", f"safe.directory={checkout.resolve()}", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, check=False)


def _hash_difference(checkout: Path) -> str | None:
    changed = _git(checkout, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--no-color").stdout
    listing = _git(checkout, "ls-files", "--others", "--exclude-standard", "-z", "--", *_CODE_FOLDERS).stdout
    added = sorted(os.fsdecode(name) for name in listing.split(b"\0") if name)
    if not changed and not added:
        return None
    digest = hashlib.sha256(changed)
    for name in added:
        file = checkout / name
        content = sha256_file(file) if file.is_file() else "not a file"
        digest.update(f"\0{name}\0{content}".encode(errors="surrogateescape"))
    return digest.hexdigest()
