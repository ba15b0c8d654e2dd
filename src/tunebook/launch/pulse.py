"""Find stalled ranks: each rank writes its progress every few seconds, and the launcher reads it.

A rank that is stopped (SIGSTOP), or waits for a disk that does not respond, reports nothing and does not fail. The
other ranks wait for it in a collective until launcher.timeout_s; then gloo raises in them, and NCCL aborts them.
Neither names the missing rank. The launcher compares the ranks by the time at which it saw each one progress. So it
needs no clock of another machine, and a job that is suspended as a whole is not a stall.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from tunebook.config.schema import LauncherConfig
from tunebook.errors import TunebookError
from tunebook.launch.logs import LOG_FOLDER, failed_by_themselves, last_text, rank_log, where
from tunebook.record.run_folder import outcome_file
from tunebook.record.start_up import StartClock

_SHORTEST_S, _LONGEST_S = 1.0, 15.0  # between two pulses: often enough for the timeout, rare enough for a shared disk
_PULSES_PER_TIMEOUT = 8
# A step is reported soon after its end, within limits: all ranks together write at most this many files per second.
_SHORTEST_GAP_S, _PULSES_PER_S = 0.25, 32
_FILES_LATE_S = 60.0  # how late a network file system may show a file's new content
_LATER_S = 30.0  # past the libraries' own timeout, whose errors say more
_TIMED_OUT = re.compile(r"Timed out waiting|operation timeout|[Tt]imeout\(ms\)|timed out", re.ASCII)  # gloo, NCCL
_NUM_PLACE_PARTS = 3  # of a source file's path, in messages


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """Progress of one rank."""

    rank: int
    host: str
    process: int
    step: int | None  # the last finished step; None before the first
    phase: str | None  # the last finished start-up phase
    doing: str  # what its main thread executes: function and place
    blocked_s: float  # how long its main thread has been in an uninterruptible wait

    @property
    def progress(self) -> tuple[int | None, str | None]:
        """The values that change when the rank makes progress."""
        return self.step, self.phase

    @property
    def reported(self) -> str:
        """The last reported progress, as text."""
        if self.step is not None:
            return f"step {self.step}"
        return f"the end of its phase '{self.phase}'" if self.phase else "its start"


def pulse_file(folder: Path, rank: int) -> Path:
    """The file to which a rank writes its progress."""
    return folder / LOG_FOLDER / f"pulse-{rank}.json"


def interval_s(launcher: LauncherConfig) -> float:
    """Seconds between two pulses."""
    return min(_LONGEST_S, max(_SHORTEST_S, _patience_s(launcher) / _PULSES_PER_TIMEOUT))


def _patience_s(launcher: LauncherConfig) -> float:
    """The shortest time that ranks wait for each other."""
    return min(launcher.timeout_s, launcher.start_timeout_s)


class PulseWriter(threading.Thread):
    """Writes this rank's pulse until the process ends; it stops while the whole process is stopped."""

    def __init__(self, folder: Path, rank: int, num_ranks: int, clock: StartClock, launcher: LauncherConfig) -> None:
        super().__init__(name="pulse", daemon=True)
        self._file = pulse_file(folder, rank)
        self._rank, self._clock = rank, clock
        self._interval_s = interval_s(launcher)
        self._gap_s = max(_SHORTEST_GAP_S, num_ranks / _PULSES_PER_S)
        self._blocked_since: float | None = None

    def run(self) -> None:
        """Write pulses forever; ignore a full or hanging disk, which the training reports."""
        while True:
            pulse = self.pulse()
            with suppress(OSError):
                new_file = self._file.with_suffix(".new")  # not flushed: only the newest one counts
                new_file.write_text(json.dumps(asdict(pulse)), encoding="utf-8")
                new_file.replace(self._file)
            next_at = time.monotonic() + self._interval_s
            time.sleep(self._gap_s)
            while self._clock.step == pulse.step and (left_s := next_at - time.monotonic()) > 0:
                time.sleep(min(self._gap_s, left_s))

    def pulse(self) -> Pulse:
        """Return the current progress of this rank."""
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        return Pulse(
            rank=self._rank,
            host=socket.gethostname(),
            process=os.getpid(),
            step=self._clock.step,
            phase=next(iter([*self._clock.phases][-1:]), None),
            doing=_place(main),
            blocked_s=self._blocked_s(),
        )

    def _blocked_s(self) -> float:
        state = ""
        with suppress(OSError):  # main thread: its ID is the process ID; the name before `)` may have blanks
            state = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "D":
            self._blocked_since = None
            return 0.0
        now = time.monotonic()
        self._blocked_since = now if self._blocked_since is None else self._blocked_since
        return round(now - self._blocked_since, 1)


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "no Python code"
    file = "/".join(Path(frame.f_code.co_filename).parts[-_NUM_PLACE_PARTS:])
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"


class PulseWatch:
    """The launcher's view of the ranks' pulses."""

    def __init__(self, folder: Path, num_ranks: int, launcher: LauncherConfig, *, is_shared: bool = False) -> None:
        self._folder, self._num_ranks = folder, num_ranks
        self._late_s = _FILES_LATE_S if is_shared else 0.0  # for ranks on other machines that write to the folder
        self._timeout_s, self._patience_s = launcher.timeout_s, _patience_s(launcher)
        self._interval_s = interval_s(launcher)
        self._pulses: dict[int, Pulse] = {}
        self._seen: dict[int, tuple[float, float]] = {}  # by rank: when its pulse last changed, when its progress did
        self._changed: dict[int, int] = {}  # modification time, by the clock of the file system
        self._next_look = 0.0

    def look(self, now: float | None = None) -> TunebookError | None:
        """Read new pulses when due; return an error that names the ranks for which the others wait too long.

        The limit is longer than the libraries' own timeout, whose errors say more, unless a rank has already failed.
        """
        now = time.monotonic() if now is None else now
        if now < self._next_look:
            return None
        self._next_look = now + self._interval_s
        self._read(now)
        at_least_s = self._patience_s / 2 if self._ended() else self._timeout_s + _LATER_S
        return self._named(self._still(at_least_s + self._late_s))

    def cause(self, now: float | None = None) -> TunebookError | None:
        """Return an error that names the ranks for which the others waited; None if that did not cause the failure.

        Call it after ranks have failed.
        """
        self._read(time.monotonic() if now is None else now)
        still = self._still(self._patience_s / 2 + self._late_s)
        return self._named(still or self._absent())

    def _read(self, now: float) -> None:
        for rank in range(self._num_ranks):
            file = pulse_file(self._folder, rank)
            with suppress(OSError, ValueError, TypeError):  # not there yet, or from another version
                changed = file.stat().st_mtime_ns
                if changed == self._changed.get(rank):
                    continue
                pulse = Pulse(**json.loads(file.read_text(encoding="utf-8")))
                before = self._pulses.get(rank)
                is_further = before is None or before.progress != pulse.progress
                self._pulses[rank], self._changed[rank] = pulse, changed
                self._seen[rank] = (now, now if is_further else self._seen[rank][1])

    def _still(self, at_least_s: float) -> list[tuple[Pulse, str]]:
        """Ranks that have not run for `at_least_s` while others did, each with a description."""
        newest = max((seen for seen, _ in self._seen.values()), default=0.0)
        found = []
        ended = self._ended()
        for rank, pulse in sorted(self._pulses.items()):
            if rank in ended:
                continue
            age_s = newest - self._seen[rank][0]
            if age_s >= max(at_least_s, 3 * self._interval_s):
                found.append((pulse, f"has not run for {age_s:.0f} s: it was stopped (SIGSTOP), or its machine hangs"))
            elif pulse.blocked_s >= at_least_s:
                how = "has been in an uninterruptible wait (state D): a disk, a network file system or a driver hangs"
                found.append((pulse, f"{how}, for {pulse.blocked_s:.0f} s"))
        return found

    def _absent(self) -> list[tuple[Pulse, str]]:
        """Ranks that run but never reached the collective in which others timed out.

        Empty if any rank has progressed during that timeout.
        """
        if len(self._pulses) < self._num_ranks:
            return []
        newest = max(seen for seen, _ in self._seen.values())
        if newest - max(progress for _, progress in self._seen.values()) < 0.8 * self._patience_s:
            return []
        failed = self._ended() | failed_by_themselves(self._folder)
        if not any(_TIMED_OUT.search(last_text(rank_log(self._folder, rank))) for rank in failed):
            return []
        how = "runs, but did not reach the operation in which the others waited"
        return [(pulse, how) for rank, pulse in sorted(self._pulses.items()) if rank not in failed]

    def _ended(self) -> set[int]:
        """Ranks that have written their outcome."""
        return {rank for rank in range(self._num_ranks) if outcome_file(self._folder, rank).is_file()}

    def _named(self, found: list[tuple[Pulse, str]]) -> TunebookError | None:
        if not found:
            return None
        stalled = "; ".join(
            f"{where(pulse.rank, {pulse.rank: pulse.host})} (process {pulse.process}) {how}; its last report "
            f"was {pulse.reported}, then in {pulse.doing}"
            for pulse, how in found
        )
        others = f"the other ranks wait for launcher.timeout_s={self._timeout_s} s"
        return TunebookError(f"{stalled}; {others}", problem_id="rank-stalled")
