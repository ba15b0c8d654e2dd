"""What the lock files ask for, what is installed, and where the two differ.

The manifest's `environment.lock` is made from this, and so is the check at the end of an image build: the build has
no Tunebook yet and mounts this one file beside docker/check_image.py. So it imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import operator
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROJECT = "tunebook"  # in no lock
PYTHON_NAME = "python"  # the interpreter among the differences; no package of the locks has this name
LOCKED_PYTHON = "3.11"  # of every image, and what the locks are resolved for
# What can change a loss, a speed or the memory of a run.
PACKAGES = (
    "tunebook", "torch", "triton", "transformers", "tokenizers", "trl", "accelerate", "datasets", "peft", "deepspeed",
    "liger-kernel", "flash-attn", "flash-attn-4", "torchao", "bitsandbytes", "safetensors", "numpy", "lm-eval", "ray",
    "hydra-core", "omegaconf",
)  # fmt: skip
_CUDA_LIBRARY = re.compile(r"(nvidia-(?!ml-py)|cuda-)")
# Locks that a run may do without: flash-attn 2 exists in images only, the others are for building, checks and Ray.
_OPTIONAL_LOCKS = (
    "requirements-build.lock",
    "requirements-dev.lock",
    "requirements-ray.lock",
    "requirements-nvcc.lock",
)
_ATTENTION_LOCK = "requirements-attention.lock"

Difference = dict[str, str | None]  # `installed` and `locked`, each a version or null


def canonical_name(name: str) -> str:
    """A package's name as all its spellings compare: lower case, with single dashes. Source: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(lock: str) -> dict[str, str]:
    """Each package of a lock that is for this Python and machine, by its canonical name, with its version."""
    locked: dict[str, str] = {}
    for line in lock.splitlines():
        if not line or line[0] in " #":
            continue
        pin, _, marker = line.rstrip("\\ ").partition(";")
        name, _, version = pin.strip().partition("==")
        if not marker or marker_holds(marker.strip(), marker_environment()):
            locked[canonical_name(name.partition("[")[0])] = version
    return locked


def marker_environment() -> dict[str, str]:
    """What markers ask about this Python and machine. Source: PEP 508."""
    return {
        "os_name": os.name,
        "sys_platform": sys.platform,
        "platform_machine": platform.machine(),
        "platform_system": platform.system(),
        "platform_python_implementation": platform.python_implementation(),
        "python_full_version": platform.python_version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
    }


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


def marker_holds(marker: str, environment: Mapping[str, str]) -> bool:
    """Whether a line of a lock is for such an environment.

    The resolver writes `variable operator 'text'`, joined by `and` and `or`, which is also an expression of Python.
    Raises: ValueError for anything else, and for a variable that is not in the environment.
    """

    def holds(node: ast.expr) -> bool:
        match node:
            case ast.BoolOp(op=ast.And()):
                return all(map(holds, node.values))
            case ast.BoolOp():
                return any(map(holds, node.values))
            case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[ast.Constant(value=str(text))]):
                if name in environment and type(op) in _COMPARISONS:
                    is_version = name.startswith("python_")
                    found, wanted = environment[name], text
                    pair = (_numbers(found), _numbers(wanted)) if is_version else (found, wanted)
                    return _COMPARISONS[type(op)](*pair)
        raise ValueError(f"the marker '{marker}' of a lock cannot be read")

    return holds(ast.parse(marker, mode="eval").body)


def _numbers(version: str) -> tuple[int, ...]:
    """A version of Python to compare: 3.12.3 and 3.12.3+ alike, 3.12 as 3.12.0."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[:3]]
    return (*numbers, *[0] * (3 - len(numbers)))


def installed_packages() -> list[tuple[str, str]]:
    """Name and version of every distribution that this Python finds, in the order in which it looks for them.

    Without the copies that setuptools brings for itself: importing it, as DeepSpeed does, appends their folder to
    `sys.path`.
    """
    found = []
    paths = [entry for entry in sys.path if Path(entry).name != "_vendor"]
    for distribution in importlib.metadata.distributions(path=paths):
        metadata = distribution.metadata  # parsed at each access, which is most of the time this takes
        if metadata is not None and "Name" in metadata:
            name = metadata["Name"]
            version = metadata["Version"] if "Version" in metadata else "unknown"  # noqa: SIM401  (no get in its type)
            found.append((name, version if name == PROJECT else version + _local_source(distribution)))
    return found


def _local_source(distribution: importlib.metadata.Distribution) -> str:
    """What is added to the version of a package from a repository or a folder: it is not the file that was locked.

    Source: PEP 610, direct_url.json. A wheel that was named by its path is an archive, and counts by its version.
    """
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return ""
    if not isinstance(origin, dict):
        return ""
    if commit := (origin.get("vcs_info") or {}).get("commit_id"):
        return f" (commit {commit[:12]})"
    return " (from a folder)" if "dir_info" in origin else ""


def installed_versions(packages: Iterable[tuple[str, str]] | None = None) -> dict[str, str]:
    """Each installed package by its canonical name; of two versions the one that is imported, which comes first."""
    versions: dict[str, str] = {}
    for name, version in installed_packages() if packages is None else packages:
        versions.setdefault(canonical_name(name), version)
    return versions


def generation_versions(generation: Path, installed: Mapping[str, str]) -> dict[str, str]:
    """What a run needs by the locks of a generation's folder; torch's build decides which of the CPU's locks count."""
    locks = [generation / "requirements.lock"]
    if generation.name == "cpu":
        is_cpu_build = installed.get("torch", "").endswith("+cpu")
        locks.append(generation / ("requirements-torch-cpu.lock" if is_cpu_build else "requirements-cuda.lock"))
    return _read_locks(locks)


def optional_versions(docker: Path, generation: Path) -> dict[str, str]:
    """What may be installed besides and may be missing, at the versions of the locks that are for it."""
    return _read_locks([*(docker / name for name in _OPTIONAL_LOCKS), generation / _ATTENTION_LOCK])


def _read_locks(files: Sequence[Path]) -> dict[str, str]:
    """The packages of several locks; a later file wins, and a file that does not exist adds nothing."""
    versions: dict[str, str] = {}
    for file in files:
        if file.is_file():
            versions |= locked_versions(file.read_text(encoding="utf-8"))
    return versions


def lock_differences(
    locked: Mapping[str, str], installed: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> dict[str, Difference]:
    """Where what is installed is not what is locked, in either direction, by package in alphabetical order.

    `optional` packages may be missing, but what is there must have their version.
    """
    known = {**(optional or {}), **locked}
    found: dict[str, Difference] = {}
    for name in sorted(locked.keys() | installed.keys()):
        has, wants = installed.get(name), known.get(name)
        if name != PROJECT and has != wants:
            found[name] = {"installed": has, "locked": wants}
    return found


def python_difference(version: str) -> dict[str, Difference]:
    """The interpreter, where it is of another minor version than that of the locks; empty where it is not."""
    if f"{version}.".startswith(f"{LOCKED_PYTHON}."):
        return {}
    return {PYTHON_NAME: {"installed": version, "locked": LOCKED_PYTHON}}


def matters(name: str) -> bool:
    """Whether another version of a package can change a loss, a speed or the memory of a run."""
    return name in PACKAGES or name == PYTHON_NAME or _CUDA_LIBRARY.match(name) is not None


def by_importance(names: Iterable[str]) -> list[str]:
    """Names of differing packages for people: torch first, then the rest of `PACKAGES`, then by the alphabet."""
    rank = {name: number for number, name in enumerate((*PACKAGES, PYTHON_NAME))}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))


def describe_difference(name: str, difference: Mapping[str, str | None]) -> str:
    """One difference in words: `torch 2.11.0 where the lock has 2.13.0`."""
    installed, locked = difference["installed"], difference["locked"]
    has = f"no {name}" if installed is None else f"{name} {installed}"
    return f"{has} where the lock has {locked or 'none'}"


def describe_differences(differences: Mapping[str, Mapping[str, str | None]], at_most: int | None = None) -> list[str]:
    """Differences in words, the most important first; of more than `at_most` the rest as `and 4 more`."""
    names = by_importance(differences)
    shown = names if at_most is None else names[:at_most]
    lines = [describe_difference(name, differences[name]) for name in shown]
    return lines if len(shown) == len(names) else [*lines, f"and {len(names) - len(shown)} more"]
