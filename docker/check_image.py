"""Check an image while it is built: a failed check fails the build and names what differs.

    check_image.py packages GENERATION_FOLDER FACTS_FILE     after the locks are installed
    check_image.py image FOLDER                              after Tunebook is installed; writes FOLDER/image.json

`packages` compares torch, its architectures, the attention package and every installed version with the locks and
generation.env. It is a separate step because it takes seconds and does not depend on Tunebook's sources, except for
record/locks.py, which the build mounts. `image` compares the labels. Neither needs a GPU or a driver.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunebook.record.locks import generation_versions, installed_versions, lock_differences, locked_versions

NO_ATTENTION = "none"
ATTENTION_MODULES = {NO_ATTENTION: (), "flash-attn-2": ("flash_attn", "flash_attn_2_cuda")}  # which must import


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The installed torch."""

    version: str
    cuda: str | None
    arch_list: list[str]  # such as sm_90 or compute_120


def read_settings(file: Path) -> dict[str, str]:
    """The keys and values of a generation.env."""
    words = shlex.split(file.read_text(encoding="utf-8"), comments=True)
    return dict(word.split("=", 1) for word in words)


def expected_versions(generation: Path, installed: Mapping[str, str], attention: str) -> dict[str, str]:
    """The locked versions of what a run needs, of the build tools, and of the attention package if there is one."""
    expected = locked_versions((generation.parent / "requirements-build.lock").read_text(encoding="utf-8"))
    expected |= generation_versions(generation, installed)
    if attention != NO_ATTENTION:
        expected |= locked_versions((generation / "requirements-attention.lock").read_text(encoding="utf-8"))
    return expected


def version_problems(expected: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """Differences between the installed and the locked versions, in both directions; Tunebook itself is in no lock."""
    problems = []
    for name, found in lock_differences(expected, installed).items():
        if found["installed"] is None:
            problems.append(f"{name} {found['locked']} is locked but not installed")
        elif found["locked"] is None:
            problems.append(f"{name} {found['installed']} is installed but in no lock")
        else:
            problems.append(f"{name} {found['installed']} is installed, but {found['locked']} is locked")
    return problems


def torch_problems(settings: Mapping[str, str], torch: TorchFacts) -> list[str]:
    """Differences between torch and generation.env: version, CUDA, and the GPUs it has code for.

    Code for TORCH_CUDA_ARCH_LIST runs on all COMPUTE_CAPABILITIES, which tests/docker/test_locks.py checks.
    """
    problems = []
    if torch.version.split("+")[0] != settings["TORCH"]:
        problems.append(f"torch is {torch.version}, but generation.env says TORCH={settings['TORCH']}")
    if settings["CUDA"] and torch.cuda != settings["CUDA"]:
        problems.append(f"torch was built with CUDA {torch.cuda}, but generation.env says CUDA={settings['CUDA']}")
    has = " ".join(torch.arch_list) or "nothing"
    return problems + [
        f"torch has no code of its own for {architecture} (TORCH_CUDA_ARCH_LIST); it has {has}"
        for architecture in settings["TORCH_CUDA_ARCH_LIST"].split()
        if f"sm_{architecture.replace('.', '')}" not in torch.arch_list
    ]


def attention_problems(attention: str) -> list[str]:
    """Whether the image's attention package imports."""
    problems = []
    for module in ATTENTION_MODULES[attention]:
        try:
            importlib.import_module(module)
        except Exception as error:  # of any kind: the package cannot be used
            problems.append(f"{attention}: `import {module}` fails: {type(error).__name__}: {error}")
    return problems


def argument_problems(arguments: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Build arguments, which became labels, that differ from the image; an empty argument is not compared."""
    return [
        f"the build argument {name} is {arguments[name]}, but the image has {value}: .env is older than the files. "
        "Type: make env"
        for name, value in found.items()
        if arguments.get(name) and arguments[name] != value
    ]


def check_packages(generation: Path) -> tuple[dict[str, Any], list[str]]:
    """The facts about the installed packages, and every problem with them."""
    settings = read_settings(generation / "generation.env")
    if os.environ.get("ATTENTION") == NO_ATTENTION:  # chosen for this build
        settings["ATTENTION"] = NO_ATTENTION
    installed = installed_versions()
    expected = expected_versions(generation, installed, settings["ATTENTION"])
    torch = torch_facts()
    problems = version_problems(expected, installed) + torch_problems(settings, torch)
    problems += attention_problems(settings["ATTENTION"])
    facts = {
        "generation": settings["GENERATION"],
        "torch": settings["TORCH"],
        "cuda": settings["CUDA"] or None,
        "min_driver": int(settings["MIN_DRIVER"]) if settings["MIN_DRIVER"] else None,
        "compute_capabilities": settings["COMPUTE_CAPABILITIES"].split(),
        "arch_list": torch.arch_list,
        "attention": settings["ATTENTION"],
        "lock_sha256": sha256_file(generation / "requirements.lock"),
        "num_packages": len(installed),
        "packages": expected,
    }
    return facts | {"torch_build": asdict(torch)}, problems


def torch_facts() -> TorchFacts:
    """Read the installed torch; this works without a GPU."""
    import torch

    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # a CPU build has no such function
    return TorchFacts(version=torch.__version__, cuda=torch.version.cuda, arch_list=(flags or "").split())


def check_image(folder: Path, arguments: Mapping[str, str]) -> tuple[dict[str, object], list[str]]:
    """The content of image.json, and every problem with the labels."""
    facts = json.loads((folder / "packages.json").read_text(encoding="utf-8"))
    sources = (folder / "sources.sha256").read_text(encoding="utf-8").strip()
    found = {
        "GENERATION": facts["generation"],
        "TORCH": facts["torch"],
        "MIN_DRIVER": str(facts["min_driver"] or ""),
        "ATTENTION": facts["attention"],
        "LOCK_SHA256": facts["lock_sha256"],
        "SOURCES_SHA256": sources,
    }
    facts |= {
        "sources_sha256": sources,
        "git_commit": arguments.get("GIT_COMMIT") or None,
        "git_diff_sha256": arguments.get("GIT_DIFF_SHA256") or None,
        "base_image": arguments.get("BASE_IMAGE") or arguments.get("DEFAULT_BASE_IMAGE"),
    }
    return facts, argument_problems(arguments, found)


def sha256_file(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def main(arguments: list[str]) -> int:
    """Run one check, write its facts, and print every problem."""
    match arguments:
        case ["packages", generation, file]:
            facts, problems = check_packages(Path(generation))
            written = Path(file)
        case ["image", folder]:
            facts, problems = check_image(Path(folder), os.environ)
            written = Path(folder) / "image.json"
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        print(f"The {facts['generation']} image is not finished because of the errors above.", file=sys.stderr)
        return 1
    written.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    written.chmod(0o644)
    print(f"checked: {facts['generation']}, torch {facts['torch']}, {facts['num_packages']} packages as locked")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
