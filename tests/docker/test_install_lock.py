"""Setting up an environment: what is asked of pip in which order, and what is said where that cannot work."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
# Stands in for an environment's python: writes down what it is called with, and says that torch is the CPU build.
RECORDING_PYTHON = """#!/bin/sh
printf '%s DS_BUILD_OPS=%s\\n' "$*" "$DS_BUILD_OPS" >> "$LOG"
case "$1" in -c) exit "${TORCH_IS_CPU_BUILD:-1}" ;; esac
"""


def run_script(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts in a folder that is not the checkout."""
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )


def set_up(folder: Path, python: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run setup_venv.sh with another Python."""
    return run_script([str(DOCKER / "setup_venv.sh"), *(words or ("run",))], folder, PYTHON=python)


def fake_python(folder: Path, script: str) -> str:
    """An executable that stands in for a machine's Python."""
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


# --- install_lock.sh


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What an image's build copies before it installs: one generation's locks, the build lock and the script."""

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
    """Run install_lock.sh and return what it asked of the environment's python, checked for what all of it shares."""
    log = folder / "log"
    words = [str(folder / "docker" / "install_lock.sh"), generation, "venv"]
    done = run_script(words, folder, LOG=str(log), **environment)
    assert (done.returncode, done.stderr) == (0, "")
    asked = []
    for line in log.read_text().splitlines():
        if line.startswith("-m pip install "):
            assert "--no-deps --no-build-isolation --require-hashes -r " in line
            assert line.endswith(" DS_BUILD_OPS=0")
            line = "install " + line.split("/docker/")[1].split()[0]
        asked.append(line)
    return asked


def test_a_gpu_generation_is_what_builds_packages_then_its_lock(copied: Path) -> None:
    asked = install(copied, "hopper")
    assert [line for line in asked if line.startswith("install ")] == [
        "install requirements-build.lock",
        "install hopper/requirements.lock",
    ]
    assert asked[-1].startswith("-m pip check")


def test_on_a_cpu_torchs_cpu_build_comes_first(copied: Path) -> None:
    asked = [line for line in install(copied, "cpu") if line.startswith("install ")]
    assert asked == [
        "install requirements-build.lock",
        "install cpu/requirements-torch-cpu.lock",
        "install cpu/requirements.lock",
    ]


def test_a_cuda_build_of_torch_on_a_cpu_gets_its_libraries_too(copied: Path) -> None:
    asked = [line for line in install(copied, "cpu", TORCH_IS_CPU_BUILD="0") if line.startswith("install ")]
    assert asked[-2:] == ["install cpu/requirements.lock", "install cpu/requirements-cuda.lock"]


# Stands in for pip where torch's CPU build is asked for; the file $TORCH decides what comes of that.
PIP_OF_TORCH = """#!/bin/sh
printf '%s DS_BUILD_OPS=%s\\n' "$*" "$DS_BUILD_OPS" >> "$LOG"
case "$*" in
  -c*) exit 1 ;;
  *requirements-torch-cpu*) trap 'echo "ERROR: Operation cancelled by user"; exit 1' INT; . "$TORCH" ;;
esac
"""


def start_on_cpu(copied: Path, torch: str) -> subprocess.Popen[str]:
    """Start install_lock.sh as a terminal would, with what pip does where torch's CPU build is asked for."""
    (copied / "venv" / "bin" / "python").write_text(PIP_OF_TORCH)
    (copied / "torch").write_text(torch)
    return subprocess.Popen(
        [copied / "docker" / "install_lock.sh", "cpu", "venv"], cwd=copied, text=True, start_new_session=True,
        env={**os.environ, "LOG": str(copied / "log"), "TORCH": str(copied / "torch")}, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_that_torchs_cpu_build_is_not_on_offer_is_no_error(copied: Path) -> None:
    done = start_on_cpu(copied, "echo 'ERROR: No matching distribution found for torch==2.13.0+cpu'; exit 1")
    assert (done.communicate(timeout=60)[1], done.returncode) == ("", 0)
    assert "cpu/requirements.lock" in (copied / "log").read_text()


def test_another_build_of_that_version_is_told_and_no_error(copied: Path) -> None:
    done = start_on_cpu(copied, "echo 'ERROR: THESE PACKAGES DO NOT MATCH THE HASHES'; exit 1")
    assert (done.communicate(timeout=60)[1], done.returncode) == ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n", 0)
    assert "cpu/requirements.lock" in (copied / "log").read_text()


def test_a_pip_that_was_interrupted_ends_the_set_up_before_the_large_build_is_fetched(copied: Path) -> None:
    done = start_on_cpu(copied, "echo 'ERROR: Operation cancelled by user'; exit 7")
    assert (done.communicate(timeout=60)[1], done.returncode) == ("ERROR: Operation cancelled by user\n", 7)
    assert "cpu/requirements.lock" not in (copied / "log").read_text()


def test_ctrl_c_ends_the_set_up_although_pip_catches_it(copied: Path) -> None:
    running = copied / "running"
    done = start_on_cpu(copied, f"touch {running}; for wait in $(seq 200); do sleep 0.05; done")
    end = time.monotonic() + 30
    while not running.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    os.killpg(done.pid, signal.SIGINT)
    done.communicate(timeout=60)
    assert done.returncode == 128 + signal.SIGINT
    assert "cpu/requirements.lock" not in (copied / "log").read_text()


def test_an_unknown_generation_is_answered_with_those_there_are(tmp_path: Path) -> None:
    done = run_script([str(DOCKER / "install_lock.sh"), "turing", "venv"], tmp_path)
    assert done.returncode == 1
    assert "No lock for the GPU generation 'turing': choose one of: ampere blackwell cpu hopper volta." in done.stderr
    assert "turing (T4) is served by volta, ada (RTX 40, L4, L40) by ampere." in done.stderr


def test_a_folder_that_is_no_environment_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    done = run_script([str(DOCKER / "install_lock.sh"), "cpu", "nowhere"], tmp_path)
    assert done.returncode == 1
    assert (
        "nowhere is no virtual environment with a pip of its own. Make it first: python3 -m venv nowhere" in done.stderr
    )


def test_wrong_words_are_answered_with_the_usage(tmp_path: Path) -> None:
    done = run_script([str(DOCKER / "install_lock.sh"), "cpu"], tmp_path)
    assert (done.returncode, "usage: install_lock.sh GENERATION VENV" in done.stderr) == (1, True)
    done = set_up(tmp_path, "python3", "everything")
    assert (done.returncode, "usage: setup_venv.sh run|dev [GENERATION]" in done.stderr) == (1, True)


# --- setup_venv.sh


@pytest.fixture
def machine_python(tmp_path: Path) -> str:
    """A machine's Python whose `-m venv` makes an environment that only writes down what it is asked."""
    (tmp_path / "recording").write_text(RECORDING_PYTHON)
    make = f'for last; do :; done; rm -rf "$last"; mkdir -p "$last/bin"; cp {tmp_path}/recording "$last/bin/python"'
    script = f'{make}; chmod +x "$last/bin/python"; echo made >> {tmp_path}/made'
    return fake_python(tmp_path, f'case "$1" in -m) {script} ;; --version) echo Python 3.11.2 ;; esac')


def test_a_gpu_generation_can_be_set_up_and_flash_attn_is_said_to_be_missing(
    tmp_path: Path, machine_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    done = set_up(tmp_path, machine_python, "dev", "hopper")
    assert done.returncode == 0, done.stderr
    assert "flash-attn 2 is not in .venv: it is compiled in the image (make image GPU=hopper)." in done.stdout
    assert "here, attention=auto takes torch's own kernel for packed rows" in done.stdout
    assert "flash-attn 4 is here, a beta: attention=varlen_attention_4" in done.stdout
    installs = [line.split()[-2] for line in (tmp_path / "log").read_text().splitlines() if " install " in line]
    assert [word.removeprefix(f"{DOCKER}/") for word in installs] == [
        "requirements-build.lock", "hopper/requirements.lock", "requirements-dev.lock", ".",
    ]  # fmt: skip
    assert (tmp_path / ".venv" / ".generation").read_text() == "hopper\n"
    assert not (tmp_path / ".venv" / ".unfinished").exists()
    on_ampere = set_up(tmp_path, machine_python, "run", "ampere").stdout
    assert "flash-attn 2 is not in .venv" in on_ampere
    assert "flash-attn 4" not in on_ampere
    assert "flash-attn" not in set_up(tmp_path, machine_python, "run", "volta").stdout


def test_an_environment_is_kept_for_its_own_generation_and_made_anew_for_another(
    tmp_path: Path, machine_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip takes torch's CPU build, once it is there, for the CUDA build that another generation's lock asks for."""
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    made = tmp_path / "made"
    for generation, times in (("cpu", 1), ("cpu", 1), ("hopper", 2), ("hopper", 2), ("cpu", 3)):
        assert set_up(tmp_path, machine_python, "run", generation).returncode == 0
        assert len(made.read_text().split()) == times
    (tmp_path / ".venv" / ".unfinished").touch()
    assert set_up(tmp_path, machine_python, "run").returncode == 0
    assert len(made.read_text().split()) == 4


def test_setup_names_what_to_install_where_there_is_no_python(tmp_path: Path) -> None:
    done = set_up(tmp_path, "no-such-python")
    assert done.returncode == 1
    assert "No 'no-such-python' here: Tunebook needs Python 3.11 or newer." in done.stderr
    assert "apt install python3 python3-venv" in done.stderr


def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    old = fake_python(tmp_path, 'if [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi')
    done = set_up(tmp_path, old)
    assert done.returncode == 1
    assert "is Python 3.9.2: Tunebook needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_setup_without_ensurepip_names_the_package_and_leaves_no_folder(tmp_path: Path) -> None:
    """Debian's Python without python3-venv makes .venv/bin/python and only then says that it cannot go on."""
    fails = "mkdir -p .venv/bin && ln -s /bin/true .venv/bin/python3 && echo 'ensurepip is not available' && exit 1"
    half = fake_python(tmp_path, f'case "$1" in -m) {fails} ;; --version) echo Python 3.11.2 ;; esac')
    done = set_up(tmp_path, half)
    assert done.returncode == 1
    assert "ensurepip is not available" in done.stderr
    assert "apt install python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()
    assert not (tmp_path / ".venv.log").exists()
