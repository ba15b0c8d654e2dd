"""The image checks its own claim, while it is built: a failed check fails the build and names what differs.

    check_image.py packages GENERATION_FOLDER FACTS_FILE     once the locks are installed
    check_image.py image FOLDER                              once Tunebook is; writes FOLDER/image.json

`packages` holds torch, its architectures, the attention package and every installed version against the locks and
generation.env. It is apart from `image` because it takes seconds and does not depend on Tunebook's own sources, but for
record/locks.py, which the build mounts beside it. No GPU and no driver is needed: torch says what it was compiled for
without one, flash-attn links CUDA's runtime but not the driver's library, and which GPUs its kernels are for is read
from the file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import shlex
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement

from tunebook.record.locks import (
    LOCKED_PYTHON,
    PROJECT,
    generation_versions,
    installed_versions,
    lock_differences,
    locked_versions,
    python_difference,
)

NO_ATTENTION = "none"
# Of each kind of attention package: the modules that must import, and the one of them that holds the GPU's code.
ATTENTION_MODULES = {"flash-attn-2": (("flash_attn", "flash_attn_2_cuda"), "flash_attn_2_cuda")}
_FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_FATBIN_CUBIN = 2  # the kind of an entry that holds machine code; 1 is PTX


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """What the installed torch says about itself."""

    version: str
    cuda: str | None
    arch_list: list[str]  # such as sm_90 or compute_120


def read_settings(file: Path) -> dict[str, str]:
    """The keys and values of a generation.env."""
    words = shlex.split(file.read_text(encoding="utf-8"), comments=True)
    return dict(word.split("=", 1) for word in words)


def expected_versions(generation: Path, installed: Mapping[str, str]) -> dict[str, str]:
    """What an image must hold: what a run needs, what builds packages, and the attention package where there is one."""
    expected = locked_versions((generation.parent / "requirements-build.lock").read_text(encoding="utf-8"))
    expected |= generation_versions(generation, installed)
    if (attention := generation / "requirements-attention.lock").is_file():
        expected |= locked_versions(attention.read_text(encoding="utf-8"))
    return expected


def version_problems(expected: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """Where what is installed is not what is locked, in either direction; Tunebook itself is in no lock."""
    problems = []
    for name, found in lock_differences(expected, installed).items():
        if found["installed"] is None:
            problems.append(f"{name} {found['locked']} is locked but not installed")
        elif found["locked"] is None:
            problems.append(f"{name} {found['installed']} is installed but in no lock")
        else:
            problems.append(f"{name} {found['installed']} is installed, but {found['locked']} is locked")
    return problems


def python_problems() -> list[str]:
    """Whether this Python is the one that records compare a run's interpreter with."""
    version = platform.python_version()
    return [f"Python is {version}, but the locks are for {LOCKED_PYTHON}"] if python_difference(version) else []


def runs_on(arch_list: Iterable[str], capability: str) -> bool:
    """Whether code compiled for one of these runs on a GPU: same major version, and a minor one that is not newer."""
    major, minor = (int(part) for part in capability.split("."))
    numbers = [int(name.removeprefix("sm_")) for name in arch_list if name.startswith("sm_") and name[3:].isdigit()]
    return any(divmod(number, 10)[0] == major and divmod(number, 10)[1] <= minor for number in numbers)


def torch_problems(settings: Mapping[str, str], torch: TorchFacts) -> list[str]:
    """Where torch is not what generation.env says: version, CUDA, and the GPUs it has code for."""
    problems = []
    if torch.version.split("+")[0] != settings["TORCH"]:
        problems.append(f"torch is {torch.version}, but generation.env says TORCH={settings['TORCH']}")
    if settings["CUDA"] and torch.cuda != settings["CUDA"]:
        problems.append(f"torch was built with CUDA {torch.cuda}, but generation.env says CUDA={settings['CUDA']}")
    has = " ".join(torch.arch_list) or "nothing"
    for architecture in settings["TORCH_CUDA_ARCH_LIST"].split():
        if f"sm_{architecture.replace('.', '')}" not in torch.arch_list:
            problems.append(f"torch has no code of its own for {architecture} (TORCH_CUDA_ARCH_LIST); it has {has}")
    for capability in settings["COMPUTE_CAPABILITIES"].split():
        if not runs_on(torch.arch_list, capability):
            problems.append(f"torch has no code that runs on {capability} (COMPUTE_CAPABILITIES); it has {has}")
    return problems


def gpu_architectures(library: Path) -> set[str]:
    """The GPUs that a compiled library has machine code for, such as `90`, read from its CUDA containers.

    A container: magic, version (2 bytes), length of its header (2), length of what follows (8). Then entries: kind (2),
    version (2), length of the header (4), of the code (8), four numbers that do not matter here but for the last, at
    byte 28, which is the architecture. Source: compared with what nvcc 13.0 was told to compile for.
    """
    found = set()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(_FATBIN_MAGIC)
        while start >= 0:
            _, _, header, size = struct.unpack_from("<IHHQ", data, start)
            entry, end = start + header, min(start + header + size, len(data))
            while entry + 32 <= end:
                kind, _, entry_header, code, architecture = struct.unpack_from("<HHIQ12xI", data, entry)
                if kind == _FATBIN_CUBIN:
                    found.add(str(architecture))
                entry += max(entry_header + code, 1)
            start = data.find(_FATBIN_MAGIC, start + len(_FATBIN_MAGIC))
    return found


def kernel_problems(settings: Mapping[str, str], architectures: set[str]) -> list[str]:
    """Where the attention package was compiled for other GPUs than generation.env says."""
    asked = set(settings["FLASH_ATTN_CUDA_ARCHS"].split(";"))
    if architectures == asked:
        return []
    return [
        f"{settings['ATTENTION']} was compiled for {' '.join(sorted(architectures)) or 'no GPU'}, but generation.env "
        f"says FLASH_ATTN_CUDA_ARCHS={settings['FLASH_ATTN_CUDA_ARCHS']}"
    ]


def attention_problems(settings: Mapping[str, str]) -> list[str]:
    """Whether the attention package of generation.env imports, was not overwritten, and has code for its GPUs."""
    attention = settings["ATTENTION"]
    if attention == NO_ATTENTION:
        return []
    if attention not in ATTENTION_MODULES:
        return [f"generation.env says ATTENTION={attention}; known are {', '.join([NO_ATTENTION, *ATTENTION_MODULES])}"]
    modules, compiled = ATTENTION_MODULES[attention]
    problems = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever it raises, it cannot be used
            problems.append(f"{attention}: `import {module}` fails: {type(error).__name__}: {error}")
    spec = importlib.util.find_spec(compiled)
    if spec is not None and spec.origin is not None:
        problems += kernel_problems(settings, gpu_architectures(Path(spec.origin)))
    # Both bring files into the folder flash_attn, so one could be written over the other.
    return problems + [text for name in ("flash-attn", "flash-attn-4") for text in overwritten_files(name)]


def overwritten_files(name: str) -> list[str]:
    """The files of a distribution that are no longer what it installed; none where it is not installed."""
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    problems = []
    for file in files:
        path = Path(str(file.locate()))
        if file.hash is None or file.hash.mode != "sha256":
            continue  # what has no hash in RECORD is RECORD itself, and byte code
        if not path.is_file():
            problems.append(f"{name}: {file} is missing")
        elif _record_hash(path) != file.hash.value:
            problems.append(f"{name}: {file} was written over by another package")
    return problems


def said_problems(said: Mapping[str, str], found: Mapping[str, str | None]) -> list[str]:
    """Where an argument of the build, which became a label, is not what the image holds; an empty one says nothing."""
    return [
        f"the build was told {name}={said[name]}, but it is {value}: .env is older than the files. Type: make env"
        for name, value in found.items()
        if said.get(name) and said[name] != value
    ]


def check_packages(generation: Path) -> tuple[dict[str, object], list[str]]:
    """The facts about what is installed, and every problem with it."""
    settings = read_settings(generation / "generation.env")
    installed = installed_versions()
    expected = expected_versions(generation, installed)
    problems = version_problems(expected, installed) + python_problems()
    torch = torch_facts()
    problems += torch_problems(settings, torch) + attention_problems(settings) + pip_problems()
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
    """Ask the installed torch; it answers without a GPU."""
    import torch

    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # a CPU build has no such function
    return TorchFacts(version=torch.__version__, cuda=torch.version.cuda, arch_list=(flags or "").split())


def pip_problems() -> list[str]:
    """What `pip check` finds: packages whose requirements are not met."""
    command = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return [] if answer.returncode == 0 else [f"pip check: {line}" for line in answer.stdout.splitlines()]


def own_problems() -> list[str]:
    """Whether Tunebook is installed with all it requires, and has its book."""
    problems = []
    for line in importlib.metadata.requires(PROJECT) or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{PROJECT} requires {requirement}, which is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{PROJECT} requires {requirement}, but {version} is installed")
    package = importlib.util.find_spec(PROJECT)
    folders = list(package.submodule_search_locations or []) if package else []
    if not any((Path(folder) / "_book" / "recipes").is_dir() for folder in folders):
        problems.append(f"{PROJECT} is installed without its recipes")
    return problems


def check_image(folder: Path, said: Mapping[str, str]) -> tuple[dict[str, object], list[str]]:
    """What image.json says, and every problem with Tunebook's own part or with what the labels will say."""
    facts = json.loads((folder / "packages.json").read_text(encoding="utf-8"))
    sources = (folder / "sources.sha256").read_text(encoding="utf-8").strip()
    found = {
        "GENERATION": facts["generation"],
        "TORCH": facts["torch"],
        "MIN_DRIVER": str(facts["min_driver"] or ""),
        "LOCK_SHA256": facts["lock_sha256"],
        "SOURCES_SHA256": sources,
    }
    facts |= {
        "sources_sha256": sources,
        "git_commit": said.get("GIT_COMMIT") or None,
        "git_diff_sha256": said.get("GIT_DIFF_SHA256") or None,
        "base_image": said.get("BASE_IMAGE") or said.get("DEFAULT_BASE_IMAGE"),
    }
    return facts, said_problems(said, found) + own_problems()


def sha256_file(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _record_hash(file: Path) -> str:
    """The hash of a file as RECORD writes it."""
    import base64

    return base64.urlsafe_b64encode(bytes.fromhex(sha256_file(file))).rstrip(b"=").decode()


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
        print(f"The {facts['generation']} image is not finished, because of what is above.", file=sys.stderr)
        return 1
    written.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    written.chmod(0o644)
    print(f"checked: {facts['generation']}, torch {facts['torch']}, {facts['num_packages']} packages as locked")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
