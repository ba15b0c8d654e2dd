"""docker/install_lock.sh: what pip is asked to install, in which order, and the errors."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
# An environment's python: it logs its arguments, answers whether torch is the CPU build, and runs the file $TORCH when
# it is asked for torch's CPU build.
PYTHON = """#!/bin/sh
printf '%s DS_BUILD_OPS=%s\\n' "$*" "$DS_BUILD_OPS" >> "$LOG"
case "$*" in
  -c*) exit "$TORCH_IS_CPU_BUILD" ;;
  *requirements-torch-cpu*) . "$TORCH" ;;
esac
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What an image build copies first: a generation's locks, the build lock and the script."""
    locks = (*(DOCKER / "cpu").glob("*.lock"), *(DOCKER / "hopper").glob("*.lock"))
    for source in (DOCKER / "install_lock.sh", DOCKER / "requirements-build.lock", *locks):
        copy = tmp_path / "docker" / source.relative_to(DOCKER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def install(
    folder: Path, generation: str, *, torch: str = "", is_cpu_build: bool = True
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run install_lock.sh in a folder that is not the checkout; `torch` is what pip runs for torch's CPU build."""
    (folder / "torch").write_text(torch)
    variables = {"LOG": str(folder / "log"), "TORCH": str(folder / "torch")}
    done = subprocess.run(
        [folder / "docker" / "install_lock.sh", generation, "venv"], cwd=folder, capture_output=True, text=True,
        env={**os.environ, **variables, "TORCH_IS_CPU_BUILD": "01"[is_cpu_build]}, timeout=60, start_new_session=True,
    )  # fmt: skip
    return done, (folder / "log").read_text().splitlines()


@pytest.mark.parametrize(
    ("generation", "is_cpu_build", "locks"),
    [
        ("hopper", True, ["hopper/requirements.lock"]),
        ("cpu", True, ["cpu/requirements-torch-cpu.lock", "cpu/requirements.lock"]),
        ("cpu", False, ["cpu/requirements-torch-cpu.lock", "cpu/requirements.lock", "cpu/requirements-cuda.lock"]),
    ],
)
def test_the_build_tools_come_first_then_the_locks(
    copied: Path, generation: str, is_cpu_build: bool, locks: list[str]
) -> None:
    """On a CPU torch's CPU build is tried first, and a CUDA build gets its libraries."""
    done, calls = install(copied, generation, is_cpu_build=is_cpu_build)
    assert done.returncode == 0, done.stderr
    installs = [line for line in calls if line.startswith("-m pip install ")]
    assert [line.split("/docker/")[1].split()[0] for line in installs] == ["requirements-build.lock", *locks]
    assert all("--no-deps --no-build-isolation --require-hashes -r " in line for line in installs)
    assert all(line.endswith(" DS_BUILD_OPS=0") for line in installs)
    assert calls[-1].startswith("-m pip check")


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
    done, calls = install(copied, "cpu", torch=f"echo '{error}'; exit {code}")
    assert (done.stderr, done.returncode) == (shown, ended)
    assert any("cpu/requirements.lock" in line for line in calls) is (ended == 0)
