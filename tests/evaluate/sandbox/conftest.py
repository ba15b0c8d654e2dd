"""Runners for the tests: behind fresh users, which needs root, and behind whatever wall there is here."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tunebook
from tunebook.evaluate.sandbox.client import Backend, ask_service, find_python, open_backend, run_programs
from tunebook.evaluate.sandbox.protocol import Outcome, Program

SOURCES = Path(tunebook.__file__).parent.parent
# Root with nothing but what the `sandbox` service has.
SERVICE_RIGHTS = ("setpriv", "--bounding-set=-all,+setuid,+setgid,+kill", "--inh-caps=-all", "--clear-groups")
NOWHERE = Path("/nonexistent/handover")


def lacking(reason: str) -> None:
    """Skip a test for what this machine lacks; in CI, which has everything, it fails."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    """The best backend without a service; on machines without bubblewrap none that keeps anything in."""
    with open_backend(handover=NOWHERE, confirm_run_unsafe_code=True) as found:
        yield found


@pytest.fixture(scope="session")
def judge(backend: Backend) -> Callable[..., Outcome]:
    """Judge one program by one test."""

    def judged(source: str, test: str, time_limit_s: float = 10.0) -> Outcome:
        program = Program(id="sample", source=source, test=test, time_limit_s=time_limit_s)
        return run_programs([program], backend)[0]

    return judged


@pytest.fixture(scope="session")
def bubblewrap() -> Iterator[Backend]:
    """A runner behind bubblewrap."""
    if shutil.which("bwrap") is None:
        lacking("no bubblewrap on this machine: apt install bubblewrap")
    with open_backend(handover=NOWHERE) as found:
        assert found.name == "bubblewrap"
        yield found


class Service:
    """A runner with the rights of the `sandbox` service, started here, and its folders."""

    def __init__(self, folder: Path) -> None:
        self.handover = folder / "handover"
        self.slots = folder / "slots"
        self.log = folder / "log.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Backend:
        """Start it, with tokens in its environment that no program may see."""
        python = find_python()
        assert python is not None
        words = [str(python), "-S", "-B", "-m", "tunebook.evaluate.sandbox.runner", "--handover", str(self.handover)]
        environment = {
            "PATH": os.defpath,
            "PYTHONPATH": str(SOURCES),
            "HF_TOKEN": "hf_secret",
            "WANDB_API_KEY": "secret",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*SERVICE_RIGHTS, *words, "--slots", str(self.slots)], env=environment, stderr=log, cwd="/"
            )
        end = time.monotonic() + 30
        while isinstance(info := ask_service(self.handover), str):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)
        return Backend(name="service", folder=self.handover, info=info, confirm_run_unsafe_code=False)

    def stop(self) -> int:
        """Stop it as Docker does; returns its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(20)


@pytest.fixture(scope="session")
def make_service() -> Iterator[Callable[[], Service]]:
    """Make the folders of a service: two disks for programs, and a closed hand-over folder."""
    if os.geteuid() != 0:
        lacking("only root can give each program a user of its own")
    # Not in pytest's folders, which are closed to the users that the programs are.
    top = Path(tempfile.mkdtemp(prefix="tunebook-test-", dir="/tmp"))
    top.chmod(0o711)
    made: list[Service] = []
    mounted: list[Path] = []

    def make() -> Service:
        folder = top / str(len(made))
        service = Service(folder)
        for slot in (service.slots / "1", service.slots / "2"):
            slot.mkdir(parents=True)
            options = "size=67108864,nr_inodes=4096"
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "slot", str(slot)], capture_output=True, text=True
            )
            if done.returncode != 0:
                lacking(f"this machine's root may not mount: {done.stderr}")
            mounted.append(slot)
        service.handover.mkdir(mode=0o700)
        made.append(service)
        return service

    yield make
    for service in made:
        if service.process is not None and service.process.poll() is None:
            service.stop()
    for slot in mounted:
        subprocess.run(["umount", str(slot)], check=True)
    shutil.rmtree(top)


@pytest.fixture(scope="session")
def service(make_service: Callable[[], Service]) -> Service:
    """The folders of the service that most tests use."""
    return make_service()


@pytest.fixture(scope="session")
def users(service: Service) -> Backend:
    """A runner behind fresh users."""
    return service.start()
