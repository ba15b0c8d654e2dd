"""The locks against the package registry: they still resolve to themselves, and fit the torch wheels that are there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
GPU_FOLDERS = sorted(path.parent.name for path in DOCKER.glob("*/generation.env") if path.parent.name != "cpu")
ON_LINUX = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}
CUDA_LIBRARY = re.compile(r"nvidia-|cuda-|triton$")


# --- they resolve to themselves


def run_make_locks(checkout: Path) -> subprocess.CompletedProcess[str]:
    """Run make_locks.py of a checkout."""
    words = [sys.executable, "docker/make_locks.py"]
    return subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=False, timeout=900)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of docker/ that may be changed; it uses the checkout's resolver."""
    shutil.copytree(DOCKER, tmp_path / "docker")
    (tmp_path / "src").symlink_to(ROOT / "src")  # the facts of generation.env
    (ROOT / ".cache" / "locks").mkdir(parents=True, exist_ok=True)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "locks").symlink_to(ROOT / ".cache" / "locks")
    return tmp_path


@pytest.mark.slow  # a minute of asking the registry; tests/docker/test_locks.py looks at the locks themselves
def test_every_lock_is_what_its_in_file_resolves_to_also_after_a_change_by_hand(copied: Path) -> None:
    lock = copied / "docker" / "volta" / "requirements.lock"
    before = lock.read_text()
    lock.write_text(before.replace("\nnvidia-cudnn-cu12==9.10.2.21 ", "\nnvidia-cudnn-cu12==9.11.0.98 "))
    assert lock.read_text() != before
    done = run_make_locks(copied)
    assert done.returncode == 0, done.stderr
    made = {path.relative_to(copied): path.read_text() for path in (copied / "docker").rglob("*.lock")}
    assert made == {path.relative_to(ROOT): path.read_text() for path in DOCKER.rglob("*.lock")}


def test_pins_that_cannot_stand_together_are_named_with_their_file(copied: Path) -> None:
    with (copied / "docker" / "cpu" / "requirements.in").open("a") as stream:
        stream.write("fsspec==2021.4.0\n")
    done = run_make_locks(copied)
    assert done.returncode == 1
    assert "fsspec==2021.4.0" in done.stderr
    assert "docker/cpu/requirements.in cannot be resolved (above)" in done.stderr


# --- they fit torch's wheels


def pip_report(*requirements: str) -> dict[str, Any]:
    """pip's account of what it would install, by name: the registry's wheels for this project's oldest Python.

    `===` matches the written version only, so that a CPU build (+cpu) that this machine knows of is not taken.
    """
    words = [
        sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed",
        "--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_28_x86_64",
        "--platform=manylinux2014_x86_64", "--target=unused", "--report=-", *requirements,
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return {item["metadata"]["name"]: item for item in json.loads(done.stdout)["install"]}


def read_lock(folder: str) -> tuple[str, dict[str, str]]:
    """A generation's lock as text, and its versions by package."""
    text = (DOCKER / folder / "requirements.lock").read_text()
    return text, dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, flags=re.M))


def required(metadata: dict[str, Any], extras: set[str]) -> list[Requirement]:
    """What a wheel asks for on Linux x86-64 with some of its extras."""
    found = []
    for text in metadata.get("requires_dist", []):
        requirement = Requirement(text)
        environments = [{**ON_LINUX, "extra": extra} for extra in extras or {""}]
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            found.append(requirement)
    return found


@pytest.fixture(scope="module", params=GPU_FOLDERS)
def folder(request: pytest.FixtureRequest) -> str:
    """A generation with a GPU."""
    return str(request.param)


@pytest.fixture(scope="module")
def torch_wheel(folder: str) -> dict[str, Any]:
    """pip's account of the registry's build of the torch that the generation pins."""
    wheel: dict[str, Any] = pip_report(f"torch==={read_lock(folder)[1]['torch']}")["torch"]
    return wheel


def test_the_registrys_wheel_is_the_one_that_is_locked(folder: str, torch_wheel: dict[str, Any]) -> None:
    sha256 = torch_wheel["download_info"]["archive_info"]["hashes"]["sha256"]
    text = read_lock(folder)[0]
    assert re.search(rf"^torch==\S+ \\\n(?: +--hash=sha256:\w+ \\\n)*? +--hash=sha256:{sha256}\b", text, flags=re.M)


def test_the_cuda_libraries_in_the_lock_are_those_that_torch_asks_for(folder: str, torch_wheel: dict[str, Any]) -> None:
    locked = read_lock(folder)[1]
    libraries = [one for one in required(torch_wheel["metadata"], set()) if CUDA_LIBRARY.match(one.name)]
    assert len(libraries) >= 5
    for toolkit in [one for one in libraries if one.extras]:  # cuda-toolkit[cublas,...] is only a list of libraries
        item = pip_report(f"{toolkit.name}=={locked[toolkit.name]}")[toolkit.name]
        libraries += required(item["metadata"], toolkit.extras)
    assert {"nvidia-cudnn", "nvidia-nccl"} <= {one.name.rsplit("-", 1)[0] for one in libraries}
    wrong = {
        str(one): locked.get(one.name) for one in libraries if not one.specifier.contains(locked.get(one.name, "0"))
    }
    assert wrong == {}
