"""Several nodes on one machine: hosts that are network namespaces, a Slurm and a Ray cluster on them, real ones.

They need root and Debian's packages. Where they cannot be made their tests are skipped, except in CI, which runs one of
each launcher; `make test-slow ARGS="tests/system/cluster -n 3"` runs the others. Much of their time is time-outs that
pass, so files may run beside each other, but for those of one cluster.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NUM_STEPS_COMPARED = 6
IN_CI = (
    "test_two_hosts_of_two_ranks_take_the_steps_of_one_rank",
    "test_a_submitted_job_takes_the_steps_of_one_rank_and_evaluates",
    "test_ctrl_c_saves_and_ends_a_cluster_of_its_own",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that CI leaves to the nightly run."""
    for item in items:
        if HERE in item.path.parents and item.name not in IN_CI:
            item.add_marker("slow")


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


@contextmanager
def locked(name: str, how: int) -> Iterator[None]:
    """Hold a lock of this machine."""
    with Path(f"/tmp/tunebook-ci-{name}.lock").open("w") as lock:
        fcntl.flock(lock, how)
        yield


@contextmanager
def alone(script: Path, timeout_s: float, what: str) -> Iterator[None]:
    """What a script of .ci brings up, for this process while others wait."""
    with locked(script.name, fcntl.LOCK_EX):
        required([str(script), "up"], timeout_s, what)
        yield
        subprocess.run([str(script), "down"], check=True, timeout=60)


@contextmanager
def together(script: Path, timeout_s: float, what: str) -> Iterator[None]:
    """What a script of .ci brings up, for this process and others beside it; the last to leave takes it down."""
    with ExitStack() as stack:
        with locked(f"{script.name}-up", fcntl.LOCK_EX):
            required([str(script), "up"], timeout_s, what)
            stack.enter_context(locked(script.name, fcntl.LOCK_SH))
        yield
        with locked(f"{script.name}-up", fcntl.LOCK_EX), suppress(BlockingIOError):
            stack.close()
            with locked(script.name, fcntl.LOCK_EX | fcntl.LOCK_NB):
                subprocess.run([str(script), "down"], check=True, timeout=60)


@pytest.fixture(scope="session")
def hosts(project_root: Path) -> Iterator[Callable[..., list[str]]]:
    """Hosts with addresses and names of their own: `hosts("node1", words)` is a command as if typed on one."""
    script = project_root / ".ci" / "hosts"
    with together(script, 120, "hosts"):
        yield lambda host, words: [str(script), "run", host, "--", *words]


@pytest.fixture(scope="module")
def slurm(project_root: Path, hosts: Callable[..., list[str]]) -> Iterator[dict[str, str]]:
    """A cluster of the two hosts; what its commands need in their environment."""
    script = project_root / ".ci" / "slurm"
    with alone(script, 300, "Slurm"):  # a job takes whole nodes
        line = subprocess.run([script, "env"], check=True, capture_output=True, text=True).stdout
        yield {"SLURM_CONF": line.strip().partition("=")[2]}


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


@pytest.fixture(scope="session")
def one_rank(
    run_forked: Callable[..., object], read_run: Callable[..., object], tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """The losses of the quickstart's first steps in one process."""
    outputs = tmp_path_factory.mktemp("one-rank")
    ended = run_forked(train_words(outputs, steps=NUM_STEPS_COMPARED))
    assert ended.exit_code == 0, ended.output
    losses: list[float] = read_run(outputs / "quickstart" / "latest").losses
    assert len(losses) == NUM_STEPS_COMPARED
    return losses


def host_of(process: int) -> str:
    """The name of the host that a process runs on."""
    words = ["nsenter", f"--target={process}", "--uts", "hostname"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def train_words(outputs: Path, *overrides: str, steps: int = 400) -> list[str]:
    """The quickstart without its evaluation, some steps of it; a step is the same however many follow."""
    return [
        *["tunebook", "train", "quickstart", "evaluation=none", f"training.max_steps={steps}", f"outputs={outputs}"],
        *["schedule=constant", "packing=padded", "training.micro_batch_size=1", *overrides],
    ]
