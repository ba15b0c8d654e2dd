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


@pytest.mark.parametrize(
    ("generation", "attention"),
    [("hopper", ["flash-attn 2", "flash-attn 4"]), ("ampere", ["flash-attn 2"]), ("volta", [])],
)
def test_a_set_up_installs_the_locks_and_names_the_attention_that_is_missing(venv, generation, attention):
    docker = venv.checkout / "docker" / generation
    if "flash-attn 2" in attention:
        (docker / "requirements-attention.lock").touch()
    if "flash-attn 4" in attention:
        (docker / "requirements.lock").write_text("flash-attn-4==4.0.0b36\n")
    age(venv)
    done = venv.command("docker/venv.sh", "setup", "dev", generation)
    assert done.returncode == 0, done.stderr
    installs = [line.split()[-1] for line in (venv.fake / "pip").read_text().splitlines()]
    assert [name.removeprefix(f"{venv.checkout}/docker/") for name in installs] == [
        "requirements-build.lock", f"{generation}/requirements.lock", "requirements-dev.lock", ".",
    ]  # fmt: skip
    named = {
        "flash-attn 2": f"flash-attn 2 is not in .venv: it is compiled in the image (make image GPU={generation}).",
        "flash-attn 4": "flash-attn 4 is here, a beta: attention=varlen_attention_4",
    }
    assert {name for name, text in named.items() if text in done.stdout} == set(attention)
    assert (venv.checkout / ".venv" / ".generation").read_text() == f"{generation}\n"
    assert not (venv.checkout / ".venv" / ".unfinished").exists()
    (venv.fake / "pip").unlink()
    again = venv.command("docker/venv.sh", "setup", "dev")  # it keeps its generation
    assert (again.returncode, again.stdout, (venv.fake / "pip").exists()) == (0, "", False)


def test_it_is_kept_for_its_own_generation_and_made_anew_for_another(venv):
    """pip takes torch's CPU build for the CUDA build that another generation's lock asks for."""
    cleared = []
    for generation in ("hopper", "cpu", "cpu", "hopper"):
        age(venv)
        assert venv.command("docker/venv.sh", "setup", "run", generation).returncode == 0
        cleared.append((venv.fake / "changes").read_text().count("cleared"))
    assert cleared == [0, 1, 1, 2]
    (venv.checkout / ".venv" / ".unfinished").touch()
    assert venv.command("docker/venv.sh", "setup", "run").returncode == 0
    assert (venv.fake / "changes").read_text().count("cleared") == 3


def test_a_run_sets_it_up_for_its_gpus_with_the_given_python(venv):
    venv.install("python3.12", PYTHON.replace("cleared", "cleared by python3.12"))
    venv.gpus(H200.replace("9.0", "8.0"))
    for expected in (["by", "cleared", "installed", "python3.12"], []):
        (venv.fake / "changes").unlink(missing_ok=True)
        done = venv.command("make", "train", "WHERE=local", "PYTHON=python3.12")
        assert (done.returncode, done.stdout) == (0, "<train quickstart>\n"), done.stderr
        assert changes(venv) == expected


def test_a_python_that_cannot_be_used(venv, refused):
    shutil.rmtree(venv.checkout / ".venv")
    setup = ("docker/venv.sh", "setup", "run")
    needed = "Tunebook needs Python 3.11 or newer."
    refused(
        venv.command(*setup, PYTHON="none"), f"No 'none' here: {needed}", "apt install python3 python3-venv", code=1
    )
    venv.install("old", '#!/bin/sh\nif [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi')
    refused(venv.command(*setup, PYTHON="old"), f"old is Python 3.9.2: {needed}", code=1)
    # Debian's Python without python3-venv makes .venv/bin/python first.
    fails = "mkdir -p .venv/bin && touch .venv/bin/python3 && echo 'ensurepip is not available' && exit 1"
    venv.install("half", f'#!/bin/sh\ncase "$1" in -m) {fails} ;; --version) echo Python 3.11.2 ;; esac')
    refused(venv.command(*setup, PYTHON="half"), "ensurepip is not available", "apt install python3-venv", code=1)
    assert [file.name for file in venv.checkout.glob(".venv*")] == [".venv.lock"]
    # Under make it is a request that cannot be served.
    refused(venv.front(*TRAIN, PYTHON="old"), needed)


def test_wrong_arguments_are_answered_with_the_usage(venv, refused):
    refused(venv.command("docker/venv.sh", "everything"), "usage: venv.sh run GENERATION", code=1)
    refused(venv.command("docker/venv.sh", "setup"), "usage: venv.sh setup run|dev [GENERATION]", code=1)


# --- what waits for a command that runs


def test_another_generation_waits(venv, refused):
    with training(venv) as process:
        done = venv.front(*TRAIN, WHERE="local", GPU="cpu")
        refused(
            done, "a command of tunebook is running from .venv (packages of docker/hopper), and it would be made again"
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


def test_changed_locks_wait(venv, refused):
    with training(venv):
        age(venv)
        venv.gpus(H200)
        refused(
            venv.front(*TRAIN, WHERE="local"), "is running from .venv (packages of docker/hopper), and its packages",
            "updated to the locks", "git worktree add",
        )  # fmt: skip
        refused(venv.command("make", "setup"), "is running from .venv", "git worktree add")
        assert changes(venv) == []
    assert venv.front(*TRAIN, WHERE="local").returncode == 0
    assert changes(venv) == ["installed"]


def test_clean_venv_waits(venv, refused):
    with training(venv):
        refused(venv.command("make", "clean-venv"), "is running from .venv", "and it would be removed. Wait for it")
        assert (venv.checkout / ".venv" / "bin" / "tunebook").exists()
    assert venv.command("make", "clean-venv").returncode == 0
    assert not (venv.checkout / ".venv").exists()
    assert venv.command("make", "clean-venv").returncode == 0  # there is none


def test_a_training_keeps_the_lock_if_its_parent_is_killed(venv, refused):
    """The lock is the open file, which a process inherits."""
    venv.gpus(H200)
    lives_on = '#!/bin/sh\n( until [ -e "$FAKE/end" ]; do sleep 0.05; done ) &\necho $! > "$FAKE/training"\nwait\n'
    (venv.checkout / ".venv" / "bin" / "tunebook").write_text(lives_on)
    with training(venv) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        refused(venv.command("make", "clean-venv"), (venv.fake / "training").read_text().strip(), "would be removed")
    venv.wait_until(lambda: venv.command("make", "clean-venv").returncode == 0)


def test_two_trainings_share_it(venv):
    with training(venv):
        venv.gpus(H200)
        done = venv.front(*TRAIN, WHERE="local")
        assert (done.returncode, done.stdout) == (0, "<train quickstart>\n")


def test_nothing_starts_while_it_is_set_up(venv, refused):
    venv.gpus(H200)
    holding = subprocess.Popen(["flock", "-x", venv.checkout / ".venv.lock", "sh", "-c", "echo held; read line"],
                               text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holding.stdout.readline() == "held\n"
    refused(venv.front(*TRAIN, WHERE="local"), "another command is setting up .venv. Wait until it is done")
    refused(venv.command("make", "clean-venv"), "another command is setting up .venv. Wait until it is done")
    holding.communicate("\n", timeout=30)
    assert venv.front(*TRAIN, WHERE="local").returncode == 0


@pytest.mark.parametrize("change", ["echo volta > .venv/.generation", "touch .venv/.unfinished", "rm -r .venv"])
def test_a_change_right_after_the_set_up_is_noticed(venv, refused, change):
    age(venv)
    venv.gpus(H200)
    touch = shutil.which("touch")  # the last change of a set-up
    change = change.replace("touch", str(touch))
    venv.install("touch", f'#!/bin/sh\n{touch} "$@"\ncase "$*" in *ready*) {change} ;; esac\n')
    refused(venv.front(*TRAIN, WHERE="local"), "another command has just changed .venv, or removed it. Type the same")


def test_without_flock_it_works(venv):
    venv.remove("flock")
    assert venv.front(*TRAIN, WHERE="local", GPU="cpu").returncode == 0
    assert changes(venv) == ["cleared", "installed"]


# --- what leaves it as it is


@pytest.mark.parametrize("variables", [{}, {"WHERE": "local"}, {"WHERE": "local", "GPU": "cpu"}], ids=str)
def test_a_command_that_changes_nothing_takes_the_packages_that_are_there(venv, variables):
    for command in ("plan quickstart", "verify", "fetch", "doctor", "report", "diff", "train mine --dry-run"):
        done = venv.front("run", *command.split(), **variables)
        assert (done.returncode, done.stdout) == (0, f"<{command}>\n"), done.stderr
        assert done.stderr == "tunebook: in .venv with the packages of docker/hopper: that is set up already\n"
    assert changes(venv) == []


def test_a_plan_runs_during_a_training_with_packages_older_than_the_locks(venv):
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
        assert "packages of docker/cpu: a command is running from it, so it is not made again for hopper" in done.stderr
        assert venv.front("run", "report", WHERE="local").stderr.endswith("docker/cpu: that is set up already\n")
    assert venv.front("run", "plan", "quickstart", WHERE="local").returncode == 0
    assert changes(venv) == ["cleared", "installed"]


def test_without_a_gpu_in_sight_it_is_not_made_anew_for_a_cpu(venv, refused):
    """On a disk that machines share, the lock of another machine may not be seen."""
    for variables in ({}, {"WHERE": "local"}, {"CUDA_VISIBLE_DEVICES": ""}):
        refused(
            venv.front("run", "train", "mine", "a.b=[1, 2]", **variables),
            ".venv has the packages of docker/hopper, for GPUs, and here: no GPU here (there is no nvidia-smi). It",
            "To make it again for a CPU: WHERE=local GPU=cpu make train ...",
            "To use it as it is, for example to submit a job: .venv/bin/tunebook train mine a.b=\\[1\\,\\ 2\\]",
        )  # fmt: skip
    assert changes(venv) == []
