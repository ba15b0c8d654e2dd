"""Run the command that starts the nodes of a run, and follow them by roll call until all of them have ended."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tunebook.config.schema import RunConfig
from tunebook.errors import TunebookError
from tunebook.launch.calling import TOKEN_VARIABLE
from tunebook.launch.descendants import adopting_orphans, children_of, end_children
from tunebook.launch.line import is_loopback
from tunebook.launch.local import POLL_S, ProcessEnd, Started, StopRequests, start_command
from tunebook.launch.logs import launcher_log
from tunebook.launch.roll_call import KILL_AFTER_S, RollCall, node_missing
from tunebook.launch.slurm.container import why_not_started

_LINGER_S = 10.0  # for a command that has nothing left to do
_CUT_OFF_S = 2.0  # for nodes to say that their ranks were killed; one that hangs, or is out of reach, says nothing


def new_token() -> str:
    """A word by which the launcher knows its own nodes."""
    return secrets.token_hex(16)


def own_addresses() -> list[str]:
    """How other machines may reach this one, the likeliest first; loopback last, for nodes on this machine."""
    names = [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    found = [address for name in names if name for address in _resolve(name) if not is_loopback(address)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: asks which address a packet to elsewhere would carry
        found.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _resolve(name: str) -> list[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError:
        return []


def run_on_nodes(
    command: list[str],
    environment: Mapping[str, str],
    roll: RollCall,
    config: RunConfig,
    folder: Path,
    *,
    exit_code_of: Callable[[], int],
    keep_open: Sequence[int] = (),
    find_stall: Callable[[], TunebookError | None] = lambda: None,
) -> ProcessEnd:
    """Run a command that makes nodes call `roll`, to the end of all of them; nothing of it is left then.

    `exit_code_of` reads the run's exit code from its folder, for the nodes to end with. `find_stall` is asked again and
    again for a reason why the ranks will never end: then they are killed.
    """
    launcher = config.launcher
    log = launcher_log(folder)
    requests = StopRequests(roll.stop)
    with requests.listening(), adopting_orphans():
        before = set(children_of(os.getpid()))
        roll.begin(folder, start_timeout_s=launcher.start_timeout_s, stop_timeout_s=launcher.stop_timeout_s)
        for _ in range(roll.num_members):
            roll.poll(0)  # who has been waiting in line, perhaps with other words
        if roll.failure is not None:
            roll.close(roll.failure.exit_code)
            return ProcessEnd(exit_code=roll.failure.exit_code, stopped_by=None, failure=roll.failure)
        said_before = log.stat().st_size if log.is_file() else 0
        started = start_command(command, {**environment, TOKEN_VARIABLE: roll.token}, keep_open, log=log)
        is_cut_off = False
        while not roll.is_over and requests.overdue_s < _CUT_OFF_S:
            roll.poll(POLL_S)
            if requests.overdue_s > 0 and not is_cut_off:
                roll.stop(signal.SIGKILL)
                is_cut_off = True
            if roll.is_running and roll.failure is None and (stall := find_stall()) is not None:
                roll.give_up(stall, timeout_s=_CUT_OFF_S)
            # Only the others would come, and srun would wait for them, and they for the one that is missing.
            if not roll.is_running and (error := why_not_started(config, log, said_before)) is not None:
                roll.give_up(error)
            elif started.poll() is not None and not roll.is_running:
                _ended_early(roll, command, started)
        roll.end(exit_code_of())
        _end(started, roll, requests)
        roll.close(started.process.returncode)
        end_children(exclude=before, timeout_s=_LINGER_S, is_urgent=lambda: requests.is_urgent)
    return ProcessEnd(
        exit_code=started.process.returncode,
        stopped_by=requests.first or roll.stopped_by,
        failed=roll.failed,
        failure=roll.failure,
        lost_ranks=tuple(roll.lost_ranks),
        notice=roll.notice,
    )


def _ended_early(roll: RollCall, command: list[str], started: Started) -> None:
    if roll.has_been_running:
        roll.conclude()  # the ranks have written how they ended
        return
    why = f"{Path(command[0]).name} ended (exit code {started.process.returncode}), and {roll.missing()}"
    roll.give_up(node_missing(why))


def _end(started: Started, roll: RollCall, requests: StopRequests) -> None:
    """Wait for a command whose nodes have ended; then ask it, then kill it. Nodes that call meanwhile are sent home.

    After a second request to stop it is killed at once.
    """
    patience_s = _LINGER_S if roll.failure else KILL_AFTER_S
    if roll.stopped_by is not None and not roll.has_been_running:
        started.process.terminate()  # who has not called yet hears of the stop by this
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            started.process.send_signal(number)
        end = time.monotonic() + (patience_s if number is None else _LINGER_S)
        while time.monotonic() < end and not (requests.is_urgent and number is not signal.SIGKILL):
            if started.poll() is not None:
                return
            roll.poll(POLL_S)
    with suppress(subprocess.TimeoutExpired):
        started.process.wait(POLL_S)
