"""Several nodes on one machine: hosts that are network namespaces, a Slurm and a Ray cluster on them, real ones.

They need root and Debian's packages. Where they cannot be made their tests are skipped, except in CI.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

NODES = ("node1", "node2")


def required(command: list[str], timeout_s: float, what: str) -> str:
    """Run what brings something up; a test without it is skipped, or fails in CI. Returns what it printed."""
    why = "only root can" if os.geteuid() != 0 else ""
    if not why:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        if ended.returncode == 0:
            return ended.stdout
        why = ended.stderr.strip()
    if os.environ.get("CI"):
        pytest.fail(f"no {what}: {why}")
    pytest.skip(f"no {what}: {why}")


@pytest.fixture(scope="session")
def hosts(project_root: Path) -> Iterator[Callable[..., list[str]]]:
    """Two hosts with addresses and names of their own: `hosts("node1", words)` is a command as if typed on one."""
    script = str(project_root / ".ci" / "hosts")
    required([script, "up"], 120, "hosts")
    yield lambda host, words: [script, "run", host, "--", *words]
    subprocess.run([script, "down"], check=True, timeout=30)


@pytest.fixture(scope="session")
def slurm(project_root: Path, hosts: Callable[..., list[str]]) -> Iterator[dict[str, str]]:
    """A cluster of the two hosts; what its commands need in their environment."""
    script = str(project_root / ".ci" / "slurm")
    required([script, "up"], 300, "Slurm")
    line = subprocess.run([script, "env"], check=True, capture_output=True, text=True).stdout
    yield {"SLURM_CONF": line.strip().partition("=")[2]}
    subprocess.run([script, "down"], check=True, timeout=60)


@pytest.fixture
def in_slurm(slurm: dict[str, str]) -> Iterator[Callable[..., str]]:
    """Run one of Slurm's commands; returns what it printed."""

    def call(*words: str) -> str:
        answer = subprocess.run(words, env=os.environ | slurm, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()

    yield call
    subprocess.run(["scancel", "--user=root"], env=os.environ | slurm, timeout=60)
    end = time.monotonic() + 40
    while call("squeue", "--noheader") and time.monotonic() < end:  # the next test needs both nodes
        time.sleep(0.5)


def at_work(place: Path) -> dict[int, str]:
    """The processes whose command names a folder, or something in it, and who runs in them."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            process = int(file.parent.name)
            if str(place) in words and process != os.getpid():
                found[process] = words
    return found


def ranks_of(folder: Path) -> dict[int, int]:
    """The processes of a run's ranks, by rank."""
    found = {}
    for process, words in at_work(folder).items():
        with suppress(OSError):
            if " -m tunebook.launch.rank " not in words or "torch.distributed.run" in words:
                continue
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            rank = next((int(word[5:]) for word in variables if word.startswith(b"RANK=")), None)
            parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
            if rank is not None and int(parent) not in found.values():  # data loaders are children with the same words
                found[rank] = process
    return found


@pytest.fixture
def leaves_nothing(tmp_path: Path) -> Iterator[Callable[[float], None]]:
    """Assert that no process of a test's runs is at work any more; after the test there is none in any case."""

    def check(within_s: float = 10) -> None:
        end = time.monotonic() + within_s
        while (left := at_work(tmp_path)) and time.monotonic() < end:
            time.sleep(0.1)
        assert left == {}

    yield check
    for process in at_work(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def one_rank(run: Callable[..., object], read_run: Callable[..., object], tmp_path: Path) -> list[float]:
    """The losses of the quickstart's first steps in one process."""
    outputs = tmp_path / "one-rank"
    ended = run(train_words(outputs, steps=6))
    assert ended.exit_code == 0, ended.output
    return read_run(outputs / "quickstart" / "latest").losses


def train_words(outputs: Path, *overrides: str, steps: int = 400) -> list[str]:
    """The quickstart without its evaluation, a few steps of it."""
    return [
        *["tunebook", "train", "quickstart", "evaluation=none", f"training.max_steps={steps}", f"outputs={outputs}"],
        *["schedule.warmup_steps=0", "packing=padded", "training.micro_batch_size=1", *overrides],
    ]


def fault(folder: Path, rank: int, program: str) -> dict[str, str]:
    """Let something go wrong in one rank as soon as it starts; what to add to the environment."""
    lines = ["import os", f"if os.environ.get('RANK') == '{rank}':", *(f"    {line}" for line in program.splitlines())]
    (folder / "sitecustomize.py").write_text("\n".join(lines))  # Python imports it by itself
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}:{inherited}" if inherited else str(folder)}
