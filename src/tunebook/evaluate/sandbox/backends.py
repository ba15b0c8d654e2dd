"""Where an evaluation's programs are executed: the `sandbox` service, bubblewrap, or, if confirmed, unprotected.

The service is found by its hand-over folder. The two others are a runner of our own, started for one evaluation and
ended with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tunebook
from tunebook.errors import RequestError
from tunebook.evaluate.sandbox.jobs import BEAT_S, Beat, Handover, runner_version
from tunebook.evaluate.sandbox.walls import BUBBLEWRAP, NONE

HANDOVER_VARIABLE = "TUNEBOOK_HANDOVER"
SERVICE_HANDOVER = Path("/handover")  # where compose.yaml mounts it
RUNNER_LOG = "runner.log"
START_SERVICE = "docker compose up -d --build sandbox"
DEAD_AFTER_S = 10 * BEAT_S
START_WITHIN_S = 30.0
QUOTED_BYTES = 1000  # of a runner's log, in a message


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A runner at work."""

    name: str  # service, bubblewrap or unsafe
    handover: Handover
    beat: Beat
    confirm_run_unsafe_code: bool

    def how_to_see_why(self) -> str:
        """What to look at when it fails: the service's log, or what our own runner printed."""
        if self.name == "service":
            return f"see `docker compose logs sandbox`, start it again with `{START_SERVICE}` and evaluate again"
        return f"its runner said: {_end_of(self.handover.folder / RUNNER_LOG) or 'nothing'}; evaluate again"

    def record(self) -> dict[str, Any]:
        """What an evaluation records of how its programs were executed."""
        return {
            "backend": self.name,
            "wall": self.beat.wall,
            "runner_version": self.beat.version,
            "confirm_run_unsafe_code": self.confirm_run_unsafe_code,
        }


@contextmanager
def open_backend(*, handover: Path | None = None, confirm_run_unsafe_code: bool = False) -> Iterator[Backend]:
    """The safest backend there is. Raises: RequestError with what is missing for each, and what to type.

    `handover` is the service's folder, if it is not the usual one. `confirm_run_unsafe_code` is used only where nothing
    else works.
    """
    folder = handover or Path(os.environ.get(HANDOVER_VARIABLE) or SERVICE_HANDOVER)
    service = _service(folder, confirm_run_unsafe_code)
    if isinstance(service, Backend):
        yield service
        return
    reasons = [service]
    walls = {"bubblewrap": BUBBLEWRAP} | ({"unsafe": NONE} if confirm_run_unsafe_code else {})
    for name, wall in walls.items():
        with tempfile.TemporaryDirectory(prefix="tunebook-handover-") as own:
            started = _start_runner(Path(own), wall)
            if isinstance(started, str):
                reasons.append(started)
                continue
            process, beat = started
            try:
                yield Backend(
                    name=name, handover=Handover(Path(own)), beat=beat, confirm_run_unsafe_code=confirm_run_unsafe_code
                )
            finally:
                _end(process)
            return
    why = "".join(f"\n  {reason}" for reason in reasons)
    raise RequestError(
        "programs that a model wrote are not executed, because nothing here would keep them from your files and the "
        f"network:{why}\nStart the service with `{START_SERVICE}`, or install bubblewrap with `apt install "
        "bubblewrap`. Only if you trust every sample: --confirm_run_unsafe_code, in a training "
        "evaluation.confirm_run_unsafe_code=true",
        problem_id="sandbox-missing",
    )


def _service(folder: Path, confirm_run_unsafe_code: bool) -> Backend | str:
    """The service behind a folder, or why there is none. Raises: RequestError for one that cannot be used."""
    handover = Handover(folder)
    try:
        beat = handover.read_beat()
    except ValueError as error:
        raise RequestError(
            f"{folder} does not hold what a runner writes ({error}); give the service an empty folder: "
            f"docker compose down sandbox; docker volume ls --filter name=handover; {START_SERVICE}",
            problem_id="sandbox-damaged",
        ) from error
    if beat is None:
        return f"the `sandbox` service does not run: there is no heartbeat in {folder}"
    if not is_alive(beat):
        return f"the `sandbox` service of {folder} was last alive {time.time() - beat.time:.0f} s ago"
    if beat.version != runner_version():
        raise RequestError(
            f"the `sandbox` service runs other code ({beat.version[:12]}) than this evaluation ({runner_version()[:12]}"
            f"), so its results may mean something else; build it again: {START_SERVICE}",
            problem_id="sandbox-version",
        )
    for needed in (handover.jobs, handover.results):
        if not os.access(needed, os.R_OK | os.W_OK | os.X_OK):
            raise RequestError(
                f"{needed} is not writable for uid {os.getuid()} with the groups "
                f"{sorted({os.getgid(), *os.getgroups()})}, so no program can be handed to the `sandbox` service; run "
                "the evaluation as compose.yaml does, with `docker compose run --rm eval`, or give its group the "
                "folder: chmod 2770",
                problem_id="sandbox-handover",
            )
    return Backend(name="service", handover=handover, beat=beat, confirm_run_unsafe_code=confirm_run_unsafe_code)


def is_alive(beat: Beat) -> bool:
    """Whether a heartbeat is new enough."""
    return time.time() - beat.time < DEAD_AFTER_S


def _start_runner(folder: Path, wall: str) -> tuple[subprocess.Popen[bytes], Beat] | str:
    """A runner of our own behind a wall, or why it does not start."""
    python = find_python()
    if python is None:
        return f"{wall}: there is no Python of 3.11 or newer that every user may execute, as programs are; install one"
    command = [str(python), "-S", "-B", "-m", "tunebook.evaluate.sandbox.runner", "--handover", str(folder)]
    sources = Path(tunebook.__file__).parent.parent
    environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(sources)}
    log = folder / RUNNER_LOG
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--wall", wall, "--workers", str(len(os.sched_getaffinity(0)))],
            env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
        )  # fmt: skip
    end = time.monotonic() + START_WITHIN_S
    while process.poll() is None and time.monotonic() < end:
        beat = Handover(folder).read_beat()
        if beat is not None:
            return process, beat
        time.sleep(0.02)
    _end(process)
    return f"{wall}: {_end_of(log).removeprefix('sandbox: ') or 'its runner did not start'}"


def _end_of(log: Path) -> str:
    """The last that a runner printed; nothing of a log that is not there or is a link, which no runner makes."""
    try:
        with os.fdopen(os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - QUOTED_BYTES))
            return stream.read(QUOTED_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def find_python() -> Path | None:
    """A Python for programs. Where root gives each of them a uid of its own, those must be able to execute it."""
    candidates = [Path(sys.executable).resolve(), Path("/usr/bin/python3"), Path("/usr/local/bin/python3")]
    if os.geteuid() != 0:
        return candidates[0]
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in filter(Path.exists, candidates):
        is_open = all(folder.stat().st_mode & 0o001 for folder in [python, *python.parents])
        if is_open and subprocess.run([python, "-I", "-S", "-c", check], check=False).returncode == 0:
            return python
    return None
