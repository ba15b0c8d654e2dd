"""The .venv under a command that runs from it: nothing makes it anew, installs into it or removes it meanwhile."""

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
# Stands in for tunebook: a training is at work until it is told to end, anything else says what it was called with.
TUNEBOOK = """#!/bin/sh
case "$*" in "train quickstart long") ;; *) echo "<$*>"; exit 0 ;; esac
echo $$ > "$FAKE/training"
until [ -e "$FAKE/end" ]; do sleep 0.05; done
"""
# Stands in for a Python: `-m venv --clear .venv` empties the folder, and pip writes down that it was there.
PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv --clear .venv")
    rm -rf .venv; mkdir -p .venv/bin; echo cleared >> "$FAKE/changes"
    cp "$FAKE/tunebook" .venv/bin/tunebook; cp "$0" .venv/bin/python ;;
  *"pip install"*) echo installed >> "$FAKE/changes" ;;
  --version) echo Python 3.11.2 ;;
esac
"""


@pytest.fixture
def venv(machine):
    """A machine whose .venv has hopper's packages, with a Python that can make another one."""
    machine.venv("hopper")
    (machine.folder / "bin" / "cp").symlink_to(str(shutil.which("cp")))
    (machine.checkout / "docker" / "requirements-dev.lock").touch()
    (machine.fake / "tunebook").write_text(TUNEBOOK)
    (machine.fake / "tunebook").chmod(0o755)
    machine.install("python3", PYTHON)
    for source, target in (("fake/tunebook", "tunebook"), ("bin/python3", "python")):
        (machine.checkout / ".venv" / "bin" / target).write_text((machine.folder / source).read_text())
        (machine.checkout / ".venv" / "bin" / target).chmod(0o755)
    return machine


def changes(machine) -> list[str]:
    """What was done to .venv."""
    file = machine.fake / "changes"
    return sorted(set(file.read_text().split())) if file.exists() else []


def age(machine) -> None:
    """Change the locks after .venv was set up, as `git pull` does."""
    long_ago = time.time() - 3600
    os.utime(machine.checkout / ".venv" / ".ready-run", (long_ago, long_ago))


@contextmanager
def training(machine) -> Iterator[subprocess.Popen]:
    """A training that really runs from .venv, started by the front door on a machine with a GPU."""
    machine.gpus(H200)
    process = subprocess.Popen(
        ["docker/front.sh", *TRAIN, "long"], cwd=machine.checkout, env=machine.environment | {"WHERE": "local"},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 30
        while not (machine.fake / "training").exists():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.02)
        machine.gpus("", code=0)  # what follows is typed where no GPU is seen
        yield process
    finally:
        (machine.fake / "end").touch()
        process.communicate(timeout=30)


# --- what changes it


def test_another_generation_waits_for_what_runs_from_it(venv, refused):
    with training(venv) as process:
        done = venv.front(*TRAIN, WHERE="local", GPU="cpu")
        refused(
            done, "a command of tunebook is running from .venv (packages of docker/hopper), and it would be made anew"
            " for cpu.", "Wait for it, or use it as it is: WHERE=local GPU=hopper make ...",
            f"Its processes on this machine: {process.pid}",
        )  # fmt: skip
        assert changes(venv) == []
        assert process.poll() is None
        assert (venv.checkout / ".venv" / ".ready-run").exists()
    assert process.returncode == 0
    after = venv.front(*TRAIN, WHERE="local", GPU="cpu")
    assert (after.returncode, changes(venv)) == (0, ["cleared", "installed"]), after.stderr
    assert "in .venv with the packages of docker/cpu: WHERE=local and GPU=cpu" in after.stderr
    assert (venv.checkout / ".venv" / ".generation").read_text() == "cpu\n"


def test_changed_locks_are_not_installed_under_what_runs(venv, refused):
    with training(venv):
        age(venv)
        venv.gpus(H200)
        refused(
            venv.front(*TRAIN, WHERE="local"), "is running from .venv (packages of docker/hopper), and what it holds",
            "brought up to date with the locks", "git worktree add",
        )  # fmt: skip
        done = venv.command("make", "setup")
        refused(done, "is running from .venv", "git worktree add")
        assert changes(venv) == []
    assert venv.front(*TRAIN, WHERE="local").returncode == 0
    assert changes(venv) == ["installed"]


def test_clean_venv_waits_for_what_runs_from_it(venv, refused):
    with training(venv):
        refused(venv.command("make", "clean-venv"), "is running from .venv", "and it would be removed. Wait for it")
        assert (venv.checkout / ".venv" / "bin" / "tunebook").exists()
    assert venv.command("make", "clean-venv").returncode == 0
    assert not (venv.checkout / ".venv").exists()
    assert venv.command("make", "clean-venv").returncode == 0  # there is none


def test_a_training_holds_it_on_where_what_started_it_is_gone(venv, refused):
    """The lock is the open file, which a process inherits that lives on."""
    venv.gpus(H200)
    lives_on = '#!/bin/sh\n( until [ -e "$FAKE/end" ]; do sleep 0.05; done ) &\necho $! > "$FAKE/training"\nwait\n'
    (venv.checkout / ".venv" / "bin" / "tunebook").write_text(lives_on)
    with training(venv) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        refused(venv.command("make", "clean-venv"), (venv.fake / "training").read_text().strip(), "would be removed")
    end = time.monotonic() + 30
    while venv.command("make", "clean-venv").returncode:
        assert time.monotonic() < end


def test_two_trainings_share_it(venv):
    with training(venv):
        venv.gpus(H200)
        done = venv.front(*TRAIN, WHERE="local")
        assert (done.returncode, done.stdout) == (0, "<train quickstart>\n")


def test_nothing_starts_while_it_is_set_up(venv, refused):
    lock = venv.checkout / ".venv.lock"
    venv.gpus(H200)
    holding = subprocess.Popen(["flock", "-x", lock, "sh", "-c", "echo held; read line"], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holding.stdout.readline() == "held\n"
    refused(venv.front(*TRAIN, WHERE="local"), "another command is setting up .venv. Wait until it is done")
    refused(venv.command("make", "clean-venv"), "another command is setting up .venv. Wait until it is done")
    holding.communicate("\n", timeout=30)
    assert venv.front(*TRAIN, WHERE="local").returncode == 0


@pytest.mark.parametrize("change", ["echo volta > .venv/.generation", "touch .venv/.unfinished"])
def test_a_change_that_comes_first_is_noticed(venv, refused, change):
    age(venv)
    venv.gpus(H200)
    (venv.checkout / "docker" / "setup_venv.sh").write_text(f"#!/bin/sh\n{change}\n")
    done = venv.front(*TRAIN, WHERE="local")
    refused(done, "another command has just changed .venv, or removed it. Type the same again.")


def test_without_flock_it_works_as_it_can(venv):
    venv.remove("flock")
    assert venv.front(*TRAIN, WHERE="local", GPU="cpu").returncode == 0
    assert changes(venv) == ["cleared", "installed"]


# --- what leaves it as it is


@pytest.mark.parametrize(
    "words",
    [["plan", "quickstart"], ["verify"], ["fetch"], ["doctor"], ["report"], ["diff"], ["train", "mine", "--dry-run"]],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("variables", [{}, {"WHERE": "local"}, {"WHERE": "local", "GPU": "cpu"}], ids=str)
def test_what_only_looks_takes_the_packages_that_are_there(venv, words, variables):
    done = venv.front("run", *words, **variables)
    assert (done.returncode, done.stdout) == (0, f"<{' '.join(words)}>\n"), done.stderr
    assert done.stderr == "tunebook: in .venv with the packages of docker/hopper: that is set up already\n"
    assert changes(venv) == []


def test_what_only_looks_runs_beside_a_training_whatever_was_changed_since(venv):
    with training(venv):
        age(venv)
        done = venv.front("run", "plan", "quickstart", CUDA_VISIBLE_DEVICES="")
        assert (done.returncode, done.stdout, changes(venv)) == (0, "<plan quickstart>\n", [])
        assert "they stay as they are while a command is running from .venv" in done.stderr
    assert venv.front("run", "plan", "quickstart").returncode == 0
    assert changes(venv) == ["installed"]


def test_a_plan_for_the_gpus_here_gets_their_packages_once_nothing_runs(venv):
    with training(venv):
        (venv.checkout / ".venv" / ".generation").write_text("cpu\n")
        venv.gpus(H200)
        done = venv.front("run", "plan", "quickstart", WHERE="local")
        assert (done.returncode, changes(venv)) == (0, []), done.stderr
        assert "packages of docker/cpu: a command is running from it, so it is not made anew for hopper" in done.stderr
        assert venv.front("run", "report", WHERE="local").stderr.endswith("docker/cpu: that is set up already\n")
    assert venv.front("run", "plan", "quickstart", WHERE="local").returncode == 0
    assert changes(venv) == ["cleared", "installed"]


def test_that_no_gpu_is_seen_does_not_make_it_anew_for_a_cpu(venv, refused):
    """On a disk that two machines share, the other one's lock may not be seen."""
    for variables in ({}, {"WHERE": "local"}, {"CUDA_VISIBLE_DEVICES": ""}):
        refused(
            venv.front("run", "train", "mine", "a.b=[1, 2]", **variables),
            ".venv has the packages of docker/hopper, for GPUs, and here: no GPU here (there is no nvidia-smi). It",
            "To make it anew for a CPU: WHERE=local GPU=cpu make train ...",
            "To use it as it is, to submit a job for instance: .venv/bin/tunebook train mine a.b=\\[1\\,\\ 2\\]",
        )  # fmt: skip
    assert changes(venv) == []
