"""Tunebook as its users run it: real commands in the checkout, in processes of their own or in forked ones.

Files run side by side (`make test-system`), but for those whose tests share what they work on: `scope_of` says which.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tunebook.record.manifest import read_manifest
from tunebook.record.metrics import is_training_line, read_metrics

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

HERE = Path(__file__).parent
# What make and pytest would hand on to the make that is tested; threads are left to the user's default, and so is that
# a module is compiled once and not by each of hundreds of commands.
NOT_INHERITED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "RECIPE", "OMP_NUM_THREADS",
                 "PYTHONDONTWRITEBYTECODE")  # fmt: skip


COMPILED_WITHIN_S = 1200  # by a machine that does much else, in 120 to 220
TRAINED_WITHIN_S = 900  # DeepSpeed compiles a small operator when it is first used, in minutes on a busy machine
# Runs that the tests of several files look at, compare with or resume: the fixtures below.
NUM_STEPS = 20
FIRST_STEPS = f"training.max_steps={NUM_STEPS}"
ON_TWO_RANKS = ("hardware=cpu", "hardware.gpus_per_node=2")
TWO_RANKS = ("parallelism=ddp", *ON_TWO_RANKS)
BIT_FOR_BIT = (FIRST_STEPS, "training.deterministic=true", "training.resume=never")
SAVED = (*BIT_FOR_BIT, "packing=isolated", "training.save_every_steps=5")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # whose sums have one order, so that equal ranks compute the same bits
# The tests of these files evaluate, report and verify one run of the quickstart.
ON_THE_QUICKSTARTS_RUN = ("test_chat.py", "test_evidence.py", "test_quickstart.py", "test_readme.py")
# Those of these files share nothing, so each goes to whichever process is free.
SHARE_NOTHING = ("test_sweep.py", "test_evaluation.py", "test_two_ranks.py")
# What takes minutes begins first, and what takes seconds fills the gaps at the end.
LONGEST_FIRST = ("docker", "quickstart", "test_slurm.py", "test_ray.py", "test_sweep.py",
                 "test_checkpoints.py", "test_same_loss.py", "test_code.py", "test_two_ranks.py", "test_evaluation.py",
                 "test_golden.py")  # fmt: skip


def scope_of(name: str) -> str:
    """Which tests run one after the other, in one process: those of an engine, on one run, and of most files."""
    file = name.partition("::")[0]
    if file.startswith("tests/system/docker/") and not file.endswith("/test_locks_online.py"):  # needs no engine
        return "docker"
    if Path(file).name in SHARE_NOTHING:
        return name
    return "quickstart" if Path(file).name in ON_THE_QUICKSTARTS_RUN else file


def turn_of(scope: str) -> int:
    """When a scope begins, among the others."""
    name = Path(scope.partition("::")[0]).name
    return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Deal the tests out to xdist's processes by their scope, in the order of `pytest_collection_modifyitems`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return ByScope(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a system test; the longest scope comes first, among equals that of most tests."""
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker("system")
    if len(ours) == len(items):
        sizes = Counter(scope_of(item.nodeid) for item in items)
        items.sort(key=lambda item: (turn_of(scope_of(item.nodeid)), -sizes[scope_of(item.nodeid)]))


@pytest.fixture(scope="session", autouse=True)
def operators_compiled_once() -> Iterator[None]:
    """Let every command find this environment's programs first, as `tunebook train` lets its ranks.

    DeepSpeed's operators would be compiled once more by another `ninja`, which cannot read what this one noted. And
    whoever compiled them and was killed has left a lock, for which everybody after it would wait without end.
    """
    for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("lock"):
        with suppress(FileNotFoundError):
            if time.time() - lock.stat().st_mtime > COMPILED_WITHIN_S:
                lock.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        yield


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

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 300) -> None:
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


def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that xdist's processes have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def inherited(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of every command; data is prepared once for all of xdist's processes."""
    kept = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    path = f"{project_root / '.venv' / 'bin'}:{kept['PATH']}"
    return kept | {"TUNEBOOK_CACHE": str(of_all_workers(tmp_path_factory) / "prepared"), "PATH": path}


@pytest.fixture(scope="session")
def start(
    project_root: Path, inherited: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Running]]:
    """Start a command: `start(words, cwd=..., KEY=value...)`."""
    folder = tmp_path_factory.mktemp("system")
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

    def to_its_end(words: list[str], timeout_s: float = 300, **settings: object) -> Ended:
        return start(words, **settings).wait(timeout_s)

    return to_its_end


@pytest.fixture(scope="session")
def run_forked(inherited: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ended]]:
    """Run a `tunebook` command, or a program on several ranks, to its end in forked processes: see forked.py."""
    folder, num_requests = tmp_path_factory.mktemp("forked"), 0
    with subprocess.Popen(
        [sys.executable, str(HERE / "forked.py")], env=inherited | ONE_THREAD | {"DS_ACCELERATOR": "cpu"}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None

        def to_its_end(words: list[str], ranks: int = 0, **environment: str) -> Ended:
            nonlocal num_requests
            num_requests += 1
            log = folder / f"request-{num_requests}.log"
            log.touch()
            request = {"words": words, "ranks": ranks, "environment": inherited | environment, "log": str(log)}
            print(json.dumps(request), file=server.stdin, flush=True)
            if not select.select([server.stdout], [], [], TRAINED_WITHIN_S)[0]:
                os.killpg(server.pid, signal.SIGKILL)
                pytest.fail(f"not ended after {TRAINED_WITHIN_S} s:\n{log.read_text(errors='replace')}")
            return Ended(exit_code=int(server.stdout.readline()), output=log.read_text(errors="replace"))

        yield to_its_end


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


@pytest.fixture(scope="session")
def train_once(run_forked: Callable[..., Ended], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Train the quickstart's first steps: `train_once("parallelism=ddp", ..., OMP_NUM_THREADS="1")`.

    Equal requests, from any of xdist's processes, share one run. No test may change it: copy the folder first.
    """
    shared = of_all_workers(tmp_path_factory) / "trained"
    shared.mkdir(exist_ok=True)

    def train(*overrides: str, **environment: str) -> Run:
        outputs = shared / sha256(repr((overrides, environment)).encode()).hexdigest()[:16]
        with outputs.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = outputs.with_suffix(".done")
            if not done.exists():
                words = ["tunebook", "train", "quickstart", "evaluation=none", *overrides, f"outputs={outputs}"]
                ended = run_forked(words, **environment)
                assert ended.exit_code == 0, ended.output
                assert "Traceback" not in ended.output
                done.touch()
        return Run(folder=(outputs / "quickstart" / "latest").resolve())

    return train


@pytest.fixture(scope="session")
def one_rank(train_once: Callable[..., Run]) -> Run:
    """`NUM_STEPS` steps of one rank: packed rows, one pass per step."""
    found = train_once(FIRST_STEPS, "parallelism=single", "hardware=cpu")
    assert len(found.losses) == NUM_STEPS
    return found


@pytest.fixture(scope="session")
def saved_by(train_once: Callable[..., Run]) -> Callable[..., Run]:
    """The same steps of two ranks with the last two of four checkpoints: `saved_by("zero2")`."""

    def train(strategy: str, *overrides: str) -> Run:
        found = train_once(*SAVED, *ON_TWO_RANKS, f"parallelism={strategy}", *overrides, **ONE_THREAD)
        assert found.checkpoints == ["checkpoint-15", "checkpoint-20"]
        return found

    return train


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """The quickstart after `make train`."""

    outputs: Path
    folder: Path
    ended: Ended
    left: frozenset[str]  # the names in the folder when it had ended: later commands add to them


@pytest.fixture(scope="session")
def quickstart(run: Callable[..., Ended], tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """`make train`, once for all tests that look at what it leaves."""
    outputs = tmp_path_factory.mktemp("outputs")
    ended = run(["make", "train", f"ARGS=outputs={outputs}"], timeout_s=900)
    assert ended.exit_code == 0, ended.output
    folder = (outputs / "quickstart" / "latest").resolve()
    left = frozenset(path.name for path in folder.iterdir())
    return Quickstart(outputs=outputs, folder=folder, ended=ended, left=left)


@pytest.fixture(scope="session")
def layouts(load_module: Callable[[Path], ModuleType], project_root: Path) -> ModuleType:
    """Runs and checkpoints as each strategy lays them out."""
    return load_module(project_root / "tests" / "checkpoint" / "export" / "layouts.py")
