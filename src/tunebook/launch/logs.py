"""Log files for the standard error of ranks and launchers, one each in the run folder, and their parsing."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from tunebook.processes import ask

LOG_FOLDER = "logs"
_NUM_LAST_LINES = 8
_LONGEST_TAIL = 16384
_SUMMARY_WITHIN_S = 60.0
_NUM_SUMMARY_LINES = 14
# torchrun's report of the first rank to fail, the last part of its table (torch 2.10 to 2.13).
_FIRST_FAILURE = re.compile(
    r"Root Cause \(first observed failure\):.*?host\s*: (\S+).*?rank\s*: (\d+) \(local_rank: \d+\)"
    r".*?exitcode\s*: (-?\d+)",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed, as reported by torchrun."""

    rank: int
    exit_code: int  # negative: killed by that signal
    host: str

    @property
    def is_by_signal(self) -> bool:
        """Whether an outside signal killed it. SIGTERM does not count: it ends ranks after another rank's failure."""
        return self.exit_code < 0 and self.exit_code != -signal.SIGTERM

    @property
    def where(self) -> str:
        """The rank and its host."""
        return f"rank {self.rank} on {self.host}"

    @property
    def how(self) -> str:
        """The failure as text."""
        if self.exit_code >= 0:
            return f"it ended with exit code {self.exit_code}"
        hint = " (the system's usual way when memory runs out)" if self.exit_code == -signal.SIGKILL else ""
        return f"it was killed by {signal.Signals(-self.exit_code).name}{hint}"


def rank_log(folder: Path, rank: int) -> Path:
    """The log file of one rank of several."""
    return folder / LOG_FOLDER / f"rank-{rank}.log"


def torchrun_log(folder: Path, node: int) -> Path:
    """The log file of a node's torchrun."""
    return folder / LOG_FOLDER / f"torchrun-{node}.log"


def launcher_log(folder: Path) -> Path:
    """The log file of the command that starts the nodes."""
    return folder / LOG_FOLDER / "launcher.log"


def launch_logs(folder: Path) -> list[Path]:
    """The logs of what started the ranks."""
    return [*(folder / LOG_FOLDER).glob("launcher.log"), *sorted((folder / LOG_FOLDER).glob("torchrun-*.log"))]


def flight_recorder_file(folder: Path) -> Path:
    """The path of torch's records of collectives, which it writes at a time-out; torch appends the rank."""
    return folder / LOG_FOLDER / "collectives-rank-"


def make_logs(folder: Path) -> None:
    """Make the log folder, and remove logs of an earlier attempt."""
    logs = folder / LOG_FOLDER
    logs.mkdir(exist_ok=True)
    for file in logs.iterdir():
        file.unlink(missing_ok=True)


def first_failure(folder: Path) -> Failure | None:
    """Return the rank that failed first, as torchrun reports; prefer ranks killed by an outside signal over others."""
    found = []
    for file in sorted((folder / LOG_FOLDER).glob("torchrun-*.log")):
        if match := _FIRST_FAILURE.search(file.read_text(errors="replace")):
            found.append(Failure(host=match[1], rank=int(match[2]), exit_code=int(match[3])))
    return min(found, key=lambda failure: (not failure.is_by_signal, failure.exit_code < 0), default=None)


def last_text(file: Path) -> str:
    """Return the end of a log; empty if there is no log."""
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _LONGEST_TAIL))
        return stream.read().decode(errors="replace")


def last_lines(file: Path) -> list[str]:
    """Return the last non-empty lines of a log."""
    return [line for line in last_text(file).splitlines() if line.strip()][-_NUM_LAST_LINES:]


def quote_log(file: Path, folder: Path) -> str:
    """Return the last lines of a log as a paragraph; empty if there are none."""
    lines = last_lines(file)
    if not lines:
        return ""
    quoted = "\n".join(f"    {line}" for line in lines)
    return f"the last lines of {file.relative_to(folder)}:\n{quoted}"


def stuck_collective(folder: Path) -> str:
    """Return torch's summary of the collective in which ranks were missing at a time-out; empty without a record."""
    file = flight_recorder_file(folder)
    if not any(file.parent.glob(f"{file.name}*")):
        return ""
    program = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    words = [str(file.parent), "--prefix", file.name, "--allow-incomplete-ranks"]
    lines = ask([*program, *words], timeout_s=_SUMMARY_WITHIN_S).errors.splitlines()  # it logs
    return "\n".join(["torch's record of the collectives:", *(f"    {line}" for line in lines[:_NUM_SUMMARY_LINES])])
