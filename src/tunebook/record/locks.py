"""Compares the installed packages with the lock files.

The result is the manifest's `environment.lock`. An image build also uses this module for its final check: it mounts
only this file and check_image.py, before Tunebook is installed. So nothing else of Tunebook is imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "tunebook"  # in no lock
PYTHON_NAME = "python"  # the interpreter among the differences; no package of the locks has this name
LOCKED_PYTHON = "3.11"  # of every image and of the locks
# Packages that can change a loss, the speed or the memory of a run.
PACKAGES = (
    "tunebook", "torch", "triton", "transformers", "tokenizers", "trl", "accelerate", "datasets", "peft", "deepspeed",
    "liger-kernel", "flash-attn", "flash-attn-4", "torchao", "bitsandbytes", "safetensors", "numpy", "lm-eval", "ray",
    "hydra-core", "omegaconf", "fla-core",
)  # fmt: skip
_CUDA_LIBRARY = re.compile(r"(nvidia-(?!ml-py)|cuda-)")
# Locks whose packages are optional: flash-attn 2 exists only in images, the others are for building, checks and Ray.
_OPTIONAL_LOCKS = tuple(f"requirements-{name}.lock" for name in ("build", "dev", "ray", "nvcc"))
_ATTENTION_LOCK = "requirements-attention.lock"

Difference = dict[str, str | None]  # `installed` and `locked`, each a version or null


def locked_versions(lock: str) -> dict[str, str]:
    """The version of each package of a lock for this Python and machine, by canonical name."""
    pins = [Requirement(line.rstrip("\\ ")) for line in lock.splitlines() if line and line[0] not in " #"]
    return {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }


def installed_versions() -> dict[str, str]:
    """The version of each installed package by canonical name; the first of several, which is the imported one.

    The copies inside setuptools are left out. Importing setuptools, as DeepSpeed does, appends their folder to
    `sys.path`.
    """
    versions: dict[str, str] = {}
    paths = [entry for entry in sys.path if Path(entry).name != "_vendor"]
    for distribution in importlib.metadata.distributions(path=paths):
        metadata = distribution.metadata  # each access parses it, which is slow
        if metadata is not None and "Name" in metadata and "Version" in metadata:
            name = canonicalize_name(metadata["Name"])
            source = "" if name == PROJECT else _local_source(distribution)
            versions.setdefault(name, metadata["Version"] + source)
    return versions


def _local_source(distribution: importlib.metadata.Distribution) -> str:
    """A suffix for the version of a package that was installed from a repository or a folder, not from a locked file.

    Source: PEP 610, direct_url.json. A wheel that was installed by its path gets no suffix.
    """
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if commit := (origin.get("vcs_info") or {}).get("commit_id"):
        return f" (commit {commit[:12]})"
    return " (from a folder)" if "dir_info" in origin else ""


def generation_versions(generation: Path, installed: Mapping[str, str]) -> dict[str, str]:
    """The locked versions that a run needs on a generation. On a CPU, torch's build decides which lock is used."""
    locks = [generation / "requirements.lock"]
    if generation.name == "cpu":
        is_cpu_build = installed.get("torch", "").endswith("+cpu")
        locks.append(generation / ("requirements-torch-cpu.lock" if is_cpu_build else "requirements-cuda.lock"))
    return _read_locks(locks)


def optional_versions(docker: Path, generation: Path) -> dict[str, str]:
    """The locked versions of optional packages."""
    return _read_locks([*(docker / name for name in _OPTIONAL_LOCKS), generation / _ATTENTION_LOCK])


def _read_locks(files: Sequence[Path]) -> dict[str, str]:
    """The packages of several locks. Later files override earlier ones; missing files are skipped."""
    versions: dict[str, str] = {}
    for file in files:
        if file.is_file():
            versions |= locked_versions(file.read_text(encoding="utf-8"))
    return versions


def lock_differences(
    locked: Mapping[str, str], installed: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> dict[str, Difference]:
    """The packages whose installed and locked versions differ, in alphabetical order.

    `optional` packages may be missing, but if installed they must have the locked version.
    """
    known = {**(optional or {}), **locked}
    return {
        name: {"installed": installed.get(name), "locked": known.get(name)}
        for name in sorted(locked.keys() | installed.keys() - {PROJECT})
        if installed.get(name) != known.get(name)
    }


def matters(name: str) -> bool:
    """True if another version of a package can change a loss, the speed or the memory of a run."""
    return name in PACKAGES or name == PYTHON_NAME or _CUDA_LIBRARY.match(name) is not None


def describe_differences(differences: Mapping[str, Mapping[str, str | None]], at_most: int | None = None) -> list[str]:
    """Differences in words, such as `torch 2.11.0 where the lock has 2.13.0`; those of `PACKAGES` first, in its order.

    After `at_most` of them the rest is `and 4 more`.
    """
    first = [name for name in (*PACKAGES, PYTHON_NAME) if name in differences]
    lines = []
    for name in [*first, *sorted(differences.keys() - first)]:
        installed, locked = differences[name]["installed"], differences[name]["locked"]
        present = f"no {name}" if installed is None else f"{name} {installed}"
        lines.append(f"{present} where the lock has {locked or 'none'}")
    num_more = len(lines) - len(lines[:at_most])
    return [*lines[:at_most], *([f"and {num_more} more"] if num_more else [])]
