"""The locks match their `.in` files, each other and generation.env, which matches the facts."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DOCKER = Path(__file__).resolve().parents[2] / "docker"
LOCKS = sorted(str(path.relative_to(DOCKER)) for path in DOCKER.rglob("*.lock"))
FOLDERS = sorted(path.parent.name for path in DOCKER.glob("*/generation.env"))
# Which locks an `.in` file is turned into, where it is not the one of the same name.
TURNED_INTO = {"cpu/requirements.in": ("cpu/requirements.lock", "cpu/requirements-cuda.lock")}
SOURCES = sorted(str(path.relative_to(DOCKER)) for path in DOCKER.rglob("*.in"))
PARTS = {"requirements-common.in", "requirements-gpu.in"}  # named by other `.in` files, no lock of their own


def read_requirements(path: Path) -> dict[str, Requirement]:
    """The requirements of an `.in` or lock file by canonical name, hashes and comments left out; `-r` is followed."""
    found: dict[str, Requirement] = {}
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            found |= read_requirements(path.parent / line.split()[1])
        elif re.match(r"\w", line):
            requirement = Requirement(re.split(r"\s+(?:\\|#|--hash)", line)[0])
            found[canonicalize_name(requirement.name)] = requirement
    return found


def pinned(requirement: Requirement) -> str:
    """The version that a requirement pins."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", f"{requirement} is not pinned"
    return specifier.version


def versions(name: str) -> dict[str, str]:
    """Package name -> version of one `.in` or lock file."""
    return {package: pinned(requirement) for package, requirement in read_requirements(DOCKER / name).items()}


def facts_of(folder: str) -> dict[str, str]:
    """The keys and values of a generation.env."""
    words = shlex.split((DOCKER / folder / "generation.env").read_text(), comments=True)
    return dict(word.split("=", 1) for word in words)


SPEC = importlib.util.spec_from_file_location("make_locks", DOCKER / "make_locks.py")
make_locks = importlib.util.module_from_spec(SPEC)
sys.modules["make_locks"] = make_locks  # dataclasses look their module up
SPEC.loader.exec_module(make_locks)


# --- each lock


@pytest.mark.parametrize("source", sorted(set(SOURCES) - PARTS))
def test_a_lock_holds_what_its_in_file_asks_for(source: str) -> None:
    required = versions(source)
    assert required
    locked: dict[str, str] = {}
    for lock in TURNED_INTO.get(source, (source.replace(".in", ".lock"),)):
        locked |= versions(lock)
    assert {name: locked.get(name, "is not in the lock: make lock") for name in required} == required


@pytest.mark.parametrize("source", SOURCES)
def test_a_lock_was_made_after_its_in_file(source: str) -> None:
    """The lock names the `.in` file under each package, so an added or removed line is noticed."""
    own = [line for line in (DOCKER / source).read_text().splitlines() if re.match(r"\w", line)]
    required = {canonicalize_name(Requirement(line.split(" #")[0]).name) for line in own}
    used = 0
    for lock in LOCKS:
        blocks = make_locks.split_blocks((DOCKER / lock).read_text())
        named = {name for name, block in blocks.items() if re.search(rf"-r docker/{re.escape(source)}$", block, re.M)}
        assert named in (set(), required), f"{lock} is older than {source}: make lock"
        used += bool(named)
    assert used >= 1


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_one_version_and_a_hash_and_no_address(name: str) -> None:
    blocks = make_locks.split_blocks((DOCKER / name).read_text())
    assert len(blocks) >= 1
    without = [package for package, block in blocks.items() if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", block)]
    assert without == []
    assert set(versions(name)) == set(blocks)
    addresses = r"\w+://\S*|--(?:index|extra|find|trusted)\S*| @ |(?<=\s)/\w\S*"
    assert re.findall(addresses, (DOCKER / name).read_text()) == []


# --- the locks together


def test_all_generations_share_every_version_but_those_that_belong_to_their_torch() -> None:
    found: dict[str, dict[str, set[str]]] = {}  # package -> torch -> versions
    for name in set(LOCKS) - {"cpu/requirements-torch-cpu.lock"}:
        folder = (DOCKER / name).parent
        torch = "every" if folder == DOCKER else versions(f"{folder.name}/requirements.lock")["torch"]
        for package, version in versions(name).items():
            found.setdefault(package, {}).setdefault(torch, set()).add(version)
    two = {package: by_torch for package, by_torch in found.items() if any(len(some) > 1 for some in by_torch.values())}
    assert two == {}, "two versions beside the same torch"
    differ = {package for package, by_torch in found.items() if len(set.union(*by_torch.values())) > 1}
    assert {package for package in differ if not make_locks.CUDA_PACKAGE.match(package)} == {"torch"}


def test_torch_may_be_the_cpu_build_or_the_registrys() -> None:
    block = make_locks.split_blocks((DOCKER / "cpu" / "requirements.lock").read_text())["torch"]
    cpu_build = make_locks.split_blocks((DOCKER / "cpu" / "requirements-torch-cpu.lock").read_text())["torch"]
    cpu_hashes = re.findall(r"sha256:\w+", cpu_build)
    assert cpu_hashes
    assert make_locks.pinned_version(cpu_build) == make_locks.pinned_version(block) + "+cpu"
    hashes = re.findall(r"sha256:\w+", block)
    assert set(cpu_hashes) < set(hashes)
    assert len(hashes) == len(set(hashes))
    for folder in set(FOLDERS) - {"cpu"}:  # on a GPU the CPU build would only seem to work
        assert not set(cpu_hashes) & set(re.findall(r"sha256:\w+", (DOCKER / folder / "requirements.lock").read_text()))


# --- the generations


def test_every_generation_env_is_up_to_date() -> None:
    written = dict(make_locks.generation_settings())
    assert {path.parent.name for path in written} == set(FOLDERS)
    assert {path.parent.name for path in DOCKER.glob("*/requirements.in")} == set(FOLDERS)
    assert [str(path) for path, text in written.items() if path.read_text() != text] == [], "make lock"


@pytest.mark.parametrize("folder", FOLDERS)
def test_generation_env_matches_the_lock(folder: str) -> None:
    facts, locked = facts_of(folder), versions(f"{folder}/requirements.lock")
    assert facts["GENERATION"] == folder
    assert facts["TORCH"] == locked["torch"]
    runtime = next((locked[name] for name in locked if name.startswith("nvidia-cuda-runtime")), "")
    assert ".".join(runtime.split(".")[:2]) == facts["CUDA"]
    older = facts["OLDER_DRIVER_IMAGE"]
    assert older in ("", *FOLDERS)
    assert not older or int(facts_of(older)["MIN_DRIVER"]) < int(facts["MIN_DRIVER"])


def covered(capabilities: list[str], architectures: list[str]) -> bool:
    """Whether each capability has code of its major version that is not newer, and each architecture is of use."""

    def serves(architecture: str, capability: str) -> bool:
        ours, theirs = (tuple(map(int, text.split("."))) for text in (architecture, capability))
        return ours[0] == theirs[0] and ours[1] <= theirs[1]

    return all(
        any(serves(architecture, capability) for architecture in architectures) for capability in capabilities
    ) and all(any(serves(architecture, capability) for capability in capabilities) for architecture in architectures)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_architectures_serve_every_gpu_of_the_generation(folder: str) -> None:
    facts = facts_of(folder)
    capabilities = facts["COMPUTE_CAPABILITIES"].split()
    assert covered(capabilities, facts["TORCH_CUDA_ARCH_LIST"].split())
    has_attention = (DOCKER / folder / "requirements-attention.lock").exists()
    assert facts["ATTENTION"] == ("flash-attn-2" if has_attention else "none")
    flags = [flag for flag in facts["FLASH_ATTN_CUDA_ARCHS"].split(";") if flag]
    assert covered(capabilities if has_attention else [], [f"{flag[:-1]}.{flag[-1]}" for flag in flags])
