"""Tunebook as its users run it: real commands in processes of their own, in the checkout, writing elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tunebook.record.manifest import read_manifest
from tunebook.record.metrics import is_training_line, read_metrics

HERE = Path(__file__).parent
# What make and pytest would hand on to the make that is tested; threads are left to the user's default.
NOT_INHERITED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "RECIPE", "OMP_NUM_THREADS")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a system test."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("system")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended; its two streams as one text."""

    exit_code: int
    output: str


class Running:
    """A command at work, in a process group of its own."""

    def __init__(self, words: list[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        self._log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                words, env=environment, cwd=folder, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, timeout_s: float) -> Ended:
        """Wait for its end; a command that takes longer is killed and the test fails with what it printed."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"not ended after {timeout_s} s:\n{self.output}")
        return Ended(exit_code=self.process.returncode, output=self.output)

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 60) -> None:
        """Wait until something holds while the command is at work."""
        end = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                pytest.fail(f"it never came to that:\n{self.output}")
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Press Ctrl-C: the signal goes to every process in the terminal's foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """End it by force; what it started ends with it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")


@pytest.fixture(scope="session")
def start(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    """Start a command: `start(words, cwd=..., KEY=value...)`; data is prepared once for the session."""
    folder = tmp_path_factory.mktemp("system")
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    inherited["TUNEBOOK_CACHE"] = str(folder / "cache")
    inherited["PATH"] = f"{project_root / '.venv' / 'bin'}:{inherited['PATH']}"
    started: list[Running] = []

    def begin(words: list[str], cwd: Path = project_root, **environment: str) -> Running:
        running = Running(words, inherited | environment, cwd, folder / f"command-{len(started)}.log")
        started.append(running)
        return running

    yield begin
    for running in started:
        running.kill()


@pytest.fixture(scope="session")
def run(start: Callable[..., Running]) -> Callable[..., Ended]:
    """Run a command to its end."""

    def to_its_end(words: list[str], timeout_s: float = 120, **settings: object) -> Ended:
        return start(words, **settings).wait(timeout_s)

    return to_its_end


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder read back."""

    folder: Path

    @property
    def status(self) -> dict[str, object]:
        """How it stands, by its manifest."""
        status: dict[str, object] = read_manifest(self.folder)["status"]
        return status

    @property
    def losses(self) -> list[float]:
        """The loss of every step in order."""
        return [line["loss"] for line in read_metrics(self.folder) if is_training_line(line)]

    @property
    def checkpoints(self) -> list[str]:
        """The checkpoints' names in the order of their steps."""
        found = (self.folder / "checkpoints").glob("checkpoint-*")
        return sorted((path.name for path in found), key=lambda name: int(name.rpartition("-")[2]))


@pytest.fixture(scope="session")
def read_run() -> Callable[[Path], Run]:
    """Read a run folder."""
    return lambda folder: Run(folder=folder.resolve())


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """The quickstart after `make train`."""

    outputs: Path
    folder: Path
    ended: Ended


@pytest.fixture(scope="session")
def quickstart(run: Callable[..., Ended], tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """`make train`, once for all tests that look at what it leaves."""
    outputs = tmp_path_factory.mktemp("outputs")
    ended = run(["make", "train", f"ARGS=outputs={outputs}"], timeout_s=400)
    assert ended.exit_code == 0, ended.output
    return Quickstart(outputs=outputs, folder=(outputs / "quickstart" / "latest").resolve(), ended=ended)
