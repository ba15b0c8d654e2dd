"""Log files for the standard error of ranks and launchers, one each in the run folder."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tunebook.terminal import print_text

LOG_FOLDER = "logs"
_NUM_LAST_LINES = 8
_LONGEST_TAIL = 16384


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


def print_log(file: Path, folder: Path, console: Console) -> None:
    """Print the last lines of a log, if it has any."""
    if lines := last_lines(file):
        quoted = "\n".join(f"    {line}" for line in lines)
        print_text(f"the last lines of {file.relative_to(folder)}:\n{quoted}", console)
