"""docker/install_lock.sh: what pip is asked to install, in which order, and the errors."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
# An environment's python: it logs its arguments, and answers that torch is the CPU build.
RECORDING_PYTHON = """#!/bin/sh
printf '%s DS_BUILD_OPS=%s\\n' "$*" "$DS_BUILD_OPS" >> "$LOG"
case "$1" in -c) exit "${TORCH_IS_CPU_BUILD:-1}" ;; esac
"""


def run_script(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts in a folder that is not the checkout."""
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What an image build copies first: a generation's locks, the build lock and the script."""

    def copy(name: str) -> None:
        (tmp_path / "docker" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOCKER / name, tmp_path / "docker" / name)

    copy("install_lock.sh")
    copy("requirements-build.lock")
    for folder in ("cpu", "hopper"):
        for lock in (DOCKER / folder).glob("*.lock"):
            copy(f"{folder}/{lock.name}")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(RECORDING_PYTHON)
    python.chmod(0o755)
    return tmp_path


def install(folder: Path, generation: str, **environment: str) -> list[str]:
    """Run install_lock.sh and return the calls of the environment's python, whose common arguments are checked."""
    log = folder / "log"
    words = [str(folder / "docker" / "install_lock.sh"), generation, "venv"]
    done = run_script(words, folder, LOG=str(log), **environment)
    assert done.returncode == 0, done.stderr
    asked = []
    for line in log.read_text().splitlines():
        if line.startswith("-m pip install "):
            assert "--no-deps --no-build-isolation --require-hashes -r " in line
            assert line.endswith(" DS_BUILD_OPS=0")
            line = "install " + line.split("/docker/")[1].split()[0]
        asked.append(line)
    return asked


@pytest.mark.parametrize(
    ("generation", "is_cpu_build", "locks"),
    [
        ("hopper", "1", ["hopper/requirements.lock"]),
        ("cpu", "1", ["cpu/requirements-torch-cpu.lock", "cpu/requirements.lock"]),
        ("cpu", "0", ["cpu/requirements-torch-cpu.lock", "cpu/requirements.lock", "cpu/requirements-cuda.lock"]),
    ],
)
def test_the_build_tools_come_first_then_the_locks(
    copied: Path, generation: str, is_cpu_build: str, locks: list[str]
) -> None:
    """On a CPU torch's CPU build is tried first, and a CUDA build gets its libraries."""
    asked = install(copied, generation, TORCH_IS_CPU_BUILD=is_cpu_build)
    installs = [line.removeprefix("install ") for line in asked if line.startswith("install ")]
    assert installs == ["requirements-build.lock", *locks]
    assert asked[-1].startswith("-m pip check")


# A pip that runs the file $TORCH when it is asked for torch's CPU build.
PIP_OF_TORCH = """#!/bin/sh
printf '%s DS_BUILD_OPS=%s\\n' "$*" "$DS_BUILD_OPS" >> "$LOG"
case "$*" in
  -c*) exit 1 ;;
  *requirements-torch-cpu*) trap 'echo "ERROR: Operation cancelled by user"; exit 1' INT; . "$TORCH" ;;
esac
"""


def start_on_cpu(copied: Path, torch: str) -> subprocess.Popen[str]:
    """Start install_lock.sh as a terminal does; `torch` is what pip runs for torch's CPU build."""
    (copied / "venv" / "bin" / "python").write_text(PIP_OF_TORCH)
    (copied / "torch").write_text(torch)
    return subprocess.Popen(
        [copied / "docker" / "install_lock.sh", "cpu", "venv"], cwd=copied, text=True, start_new_session=True,
        env={**os.environ, "LOG": str(copied / "log"), "TORCH": str(copied / "torch")}, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code", "shown", "ended"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", 1, "", 0),
        ("ERROR: Operation cancelled by user", 7, "ERROR: Operation cancelled by user\n", 7),
    ],
)
def test_without_torchs_cpu_build_the_registrys_is_installed_unless_pip_was_interrupted(
    copied: Path, error: str, code: int, shown: str, ended: int
) -> None:
    done = start_on_cpu(copied, f"echo '{error}'; exit {code}")
    assert (done.communicate(timeout=60)[1], done.returncode) == (shown, ended)
    assert ("cpu/requirements.lock" in (copied / "log").read_text()) is (ended == 0)
