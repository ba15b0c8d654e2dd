"""docker/venv.sh: .venv is set up from the locks, and not changed while a command runs from it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

TRAIN = ("run", "train", "quickstart")
H200 = "0, GPU-a7c27df2-65ec-f664-608d-90a3b6b32cae, 9.0, 580.159.04, NVIDIA H200\n"
# A training runs until it is told to end; any other command prints its arguments.
TUNEBOOK = """#!/bin/sh
case "$*" in "train quickstart long") ;; *) echo "<$*>"; exit 0 ;; esac
echo $$ > "$FAKE/training"
until [ -e "$FAKE/end" ]; do sleep 0.05; done
"""
# `-m venv --clear .venv` empties the folder, and pip logs what it is to install.
PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv --clear .venv")
    rm -rf .venv; mkdir -p .venv/bin; echo cleared >> "$FAKE/changes"
    cp "$FAKE/tunebook" .venv/bin/tunebook; cp "$0" .venv/bin/python ;;
  *"pip install"*) echo installed >> "$FAKE/changes"; echo "$*" >> "$FAKE/pip" ;;
  --version) echo Python 3.11.2 ;;
esac
"""


@pytest.fixture
def venv(machine):
    """A machine whose .venv has hopper's packages, with a Python that can make another one."""
    machine.venv("hopper")
    (machine.folder / "bin" / "cp").symlink_to(str(shutil.which("cp")))
    (machine.fake / "tunebook").write_text(TUNEBOOK)
    (machine.fake / "tunebook").chmod(0o755)
    machine.install("python3", PYTHON)
    for source, target in (("fake/tunebook", "tunebook"), ("bin/python3", "python")):
        shutil.copy(machine.folder / source, machine.checkout / ".venv" / "bin" / target)
    return machine


def changes(machine) -> list[str]:
    """What was done to .venv."""
    file = machine.fake / "changes"
    return sorted(set(file.read_text().split())) if file.exists() else []


def age(machine) -> None:
    """Let the locks be newer than .venv, as after `git pull`."""
    long_ago = time.time() - 3600
    os.utime(machine.checkout / ".venv" / ".ready-run", (long_ago, long_ago))


@contextmanager
def training(machine) -> Iterator[subprocess.Popen]:
    """A training that runs from .venv, started on a machine with a GPU; the commands after it see no GPU."""
    machine.gpus(H200)
    process = machine.start(*TRAIN, "long", WHERE="local", until="training")
    try:
        machine.gpus("", code=0)
        yield process
    finally:
        (machine.fake / "end").touch()
        process.communicate(timeout=30)


# --- setting up


def test_a_set_up_installs_the_locks_once(venv):
    age(venv)
    done = venv.command("docker/venv.sh", "setup", "dev", "hopper")
    assert done.returncode == 0, done.stderr
    installs = [line.split()[-1] for line in (venv.fake / "pip").read_text().splitlines()]
    assert [name.removeprefix(f"{venv.checkout}/docker/") for name in installs] == [
        "requirements-build.lock", "hopper/requirements.lock", "requirements-dev.lock", ".",
    ]  # fmt: skip
    assert not (venv.checkout / ".venv" / ".unfinished").exists()
    (venv.fake / "pip").unlink()
    again = venv.command("docker/venv.sh", "setup", "dev")  # it keeps its generation
    assert (again.returncode, again.stderr, (venv.fake / "pip").exists()) == (0, "", False)


def test_a_run_sets_it_up_for_its_gpus_with_the_given_python(venv):
    venv.install("python3.12", PYTHON.replace("cleared", "cleared by python3.12"))
    venv.gpus(H200)
    shutil.rmtree(venv.checkout / ".venv")
    for expected in (["by", "cleared", "installed", "python3.12"], []):
        (venv.fake / "changes").unlink(missing_ok=True)
        done = venv.command("make", "train", "WHERE=local", "PYTHON=python3.12")
        assert (done.returncode, done.stdout) == (0, "<train quickstart>\n"), done.stderr
        assert changes(venv) == expected
    assert (venv.checkout / ".venv" / ".generation").read_text() == "hopper\n"


# --- what waits for a command that runs


def test_changed_locks_and_removal_wait(venv, refused):
    with training(venv):
        age(venv)
        venv.gpus(H200)
        refused(venv.front(*TRAIN, WHERE="local"))
        refused(venv.command("make", "setup"))
        refused(venv.command("make", "clean-venv"))
        assert changes(venv) == []
    assert venv.front(*TRAIN, WHERE="local").returncode == 0
    assert changes(venv) == ["installed"]
    assert venv.command("make", "clean-venv").returncode == 0
    assert not (venv.checkout / ".venv").exists()


def test_a_training_keeps_the_lock_if_its_parent_is_killed(venv, refused):
    """The lock is the open file, which a process inherits."""
    venv.gpus(H200)
    lives_on = '#!/bin/sh\n( until [ -e "$FAKE/end" ]; do sleep 0.05; done ) &\necho $! > "$FAKE/training"\nwait\n'
    (venv.checkout / ".venv" / "bin" / "tunebook").write_text(lives_on)
    with training(venv) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        refused(venv.command("make", "clean-venv"))
    venv.wait_until(lambda: venv.command("make", "clean-venv").returncode == 0)


def test_nothing_starts_while_it_is_set_up(venv, refused):
    venv.gpus(H200)
    holding = subprocess.Popen(["flock", "-x", venv.checkout / ".venv.lock", "sh", "-c", "echo held; read line"],
                               text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holding.stdout.readline() == "held\n"
    refused(venv.front(*TRAIN, WHERE="local"))
    holding.communicate("\n", timeout=30)
    assert venv.front(*TRAIN, WHERE="local").returncode == 0


# --- what leaves it as it is


def test_without_a_gpu_here_the_packages_that_are_there_are_taken(venv, refused):
    """As on the node of a cluster that submits jobs."""
    for command in ("plan quickstart", "report", "train mine --dry-run"):
        done = venv.front("run", *command.split())
        assert (done.returncode, done.stdout) == (0, f"<{command}>\n"), done.stderr
        assert "in .venv with the packages of docker/hopper: " in done.stderr
    refused(venv.front(*TRAIN, WHERE="local", GPU="cpu"))  # packages of another generation are not replaced unasked
    venv.gpus(H200.replace("9.0", "8.0"))
    refused(venv.front(*TRAIN, WHERE="local"))
    assert changes(venv) == []
