"""What the evaluation and the runner hand each other: one file per program, one per outcome, one heartbeat.

    HANDOVER/jobs/ID.json       written by the evaluation; read by a worker, which moves it to claimed/ first
    HANDOVER/claimed/N.ID.json  worker N is at it
    HANDOVER/results/ID.json    written by the worker; removed by the evaluation once it is read
    HANDOVER/runner.json        the runner's heartbeat

Each file is written under another name and renamed, so that nobody reads half of one. Neither side trusts what it
finds: a runner that was taken over could put a link in place of a file or folder, a pipe that never ends, or a file
that fills the memory. Links are not followed, only regular files are read, and no more of them than a limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
RUNNER_FILE = "runner.json"
BEAT_S = 1.0  # how often the runner says that it is alive
MAX_JOB_BYTES = 64 << 20  # tests with many cases take a few MiB
MAX_RESULT_BYTES = 1 << 20  # what a verdict keeps of messages and output is below 0.1 MiB
# What the runner consists of: the image of the sandbox must hold the same as the checkout.
RUNNER_MODULES = ("jobs", "child", "limits", "walls", "judge", "runner")


class Status(StrEnum):
    """What became of one program. Only `passed` counts; `broken` says that the sandbox itself failed."""

    passed = "passed"
    failed = "failed"  # a wrong answer, an exception, or an end before its test
    timed_out = "timed_out"
    memory = "memory"
    disk = "disk"
    output = "output"
    crashed = "crashed"  # ended by a signal of its own doing
    left_processes = "left_processes"  # its test passed, but it went on in the background
    broken = "broken"


@dataclass(frozen=True, kw_only=True)
class Program:
    """One sample: the program, and the test that is executed after it with the program's names at hand."""

    id: str
    source: str
    test: str
    time_limit_s: float = 3.0  # as in the harness' own code_eval


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one program, and why."""

    id: str
    status: Status
    message: str
    last_lines: list[str] = field(default_factory=list)  # of what the program printed
    seconds: float = 0.0

    @property
    def is_passed(self) -> bool:
        """Whether the program counts as right."""
        return self.status is Status.passed


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The runner's heartbeat: what it is, and when it last said so (seconds since 1970)."""

    time: float
    version: str
    wall: str
    num_workers: int


def runner_version() -> str:
    """A hash over the sources of the runner's side: the evaluation refuses a runner of other sources."""
    digest = hashlib.sha256()
    for name in RUNNER_MODULES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


class Handover:
    """The hand-over folder, seen from either side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()  # whoever named it may have named a link
        self.jobs = self.folder / "jobs"
        self.claimed = self.folder / "claimed"
        self.results = self.folder / "results"

    def make_folders(self) -> None:
        """Make the folders below, open to the owner and the group of the hand-over folder and to nobody else."""
        for folder in (self.jobs, self.claimed, self.results):
            if not folder.is_dir():
                folder.mkdir()
                folder.chmod(0o2770)

    def write_job(self, program: Program, *, expires: float) -> None:
        """Hand a program over. Nobody runs it after `expires` (seconds since 1970)."""
        write_json(self.jobs / f"{program.id}.json", {"program": asdict(program), "expires": expires})

    def claim_job(self, worker: int) -> Path | None:
        """Take a job that no other worker takes too, or None where there is none."""
        for job in sorted(self.jobs.glob("*.json")):
            with suppress(FileNotFoundError):  # another was quicker
                return job.rename(self.claimed / f"{worker}.{job.name}")
        return None

    def take_back(self) -> None:
        """Offer again what a runner before this one was at when it was stopped."""
        for claimed in self.claimed.glob("*.json"):
            claimed.rename(self.jobs / f"{job_id(claimed)}.json")

    def give_up_on(self, worker: int) -> None:
        """Report what a worker was at when it was killed as broken: the program may be the cause."""
        for claimed in self.claimed.glob(f"{worker}.*.json"):
            message = "the worker that judged it was killed, most likely by the system for want of memory"
            self.write_result(Outcome(id=job_id(claimed), status=Status.broken, message=message))
            claimed.unlink(missing_ok=True)

    def write_result(self, outcome: Outcome) -> None:
        """Hand an outcome back."""
        write_json(self.results / f"{outcome.id}.json", asdict(outcome))

    def sweep(self, older_than_s: float) -> None:
        """Remove results that nobody fetched: the evaluation that waited for them was killed."""
        for result in self.results.glob("*.json"):
            with suppress(FileNotFoundError):
                if time.time() - result.lstat().st_mtime > older_than_s:
                    result.unlink()

    def write_beat(self, beat: Beat) -> None:
        """Say that the runner is alive."""
        write_json(self.folder / RUNNER_FILE, asdict(beat))

    def read_beat(self) -> Beat | None:
        """The last heartbeat, or None where there never was one. Raises: ValueError for a file that is none."""
        try:
            return from_fields(Beat, read_object(self.folder / RUNNER_FILE))
        except FileNotFoundError:
            return None


def job_id(claimed: Path) -> str:
    """The id of a job that a worker has taken."""
    return claimed.name.partition(".")[2].removesuffix(".json")


def read_job(file: Path) -> tuple[Program, float]:
    """A program and until when it is wanted. Raises: ValueError for a file that is no job."""
    job = read_object(file, MAX_JOB_BYTES)
    return from_fields(Program, typed(job, "program", dict)), typed(job, "expires", float)


def read_result(file: Path) -> Outcome:
    """An outcome. Raises: ValueError for a file that is none, FileNotFoundError."""
    return from_fields(Outcome, read_object(file))


# By the annotations of the dataclasses above.
KINDS: dict[str, type] = {"str": str, "float": float, "int": int, "list[str]": list, "Status": str}


def from_fields(kind: type[T], found: Mapping[str, Any]) -> T:
    """A dataclass from the fields of a JSON object. Raises: ValueError where one is missing or of another type."""
    known = fields(kind)  # type: ignore[arg-type]  # typing has no public name for a dataclass
    values = {one.name: typed(found, one.name, KINDS[str(one.type)]) for one in known}
    if "status" in values:
        values["status"] = Status(values["status"])
    if not all(isinstance(line, str) for line in values.get("last_lines", [])):
        raise ValueError("`last_lines` holds something that is no text")
    return kind(**values)


def typed(found: Mapping[str, Any], key: str, kind: type) -> Any:
    """One field, which must be of a type; a whole number also serves as a float. Raises: ValueError."""
    value = found.get(key)
    if kind is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"`{key}` is {value!r:.40}, not {kind.__name__}")
    return value


def read_object(file: Path, most_bytes: int = MAX_RESULT_BYTES) -> dict[str, Any]:
    """A JSON object, from a regular file and through no link. Raises: FileNotFoundError, else ValueError."""
    try:
        # Without O_NONBLOCK a pipe that nobody writes to would be waited for.
        with _opened(file.parent, os.O_DIRECTORY) as folder, _opened(file.name, os.O_NONBLOCK, folder) as descriptor:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is no regular file")
            with open(descriptor, "rb", closefd=False) as stream:
                content = stream.read(most_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"it is a link, lies in one, or cannot be read: {error.strerror}") from error
    if len(content) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes >> 20} MiB")
    try:
        value = json.loads(content.decode())
    except RecursionError as error:
        raise ValueError("its objects are nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


@contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    """A descriptor to read from, of what is no link. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_json(file: Path, value: Any) -> None:
    """Replace a file in one step, in a folder that is no link; its group may read and write it, and nobody else."""
    temporary = f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}"  # `jobs/*.json` does not match it
    with _opened(file.parent, os.O_DIRECTORY) as folder:
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660, dir_fd=folder)
            with os.fdopen(descriptor, "w", encoding="ascii") as stream:
                os.fchmod(descriptor, 0o660)  # whatever the umask is
                json.dump(value, stream)  # ASCII, because programs may hold halves of surrogate pairs
            os.rename(temporary, file.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
