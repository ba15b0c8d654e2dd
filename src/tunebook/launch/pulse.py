"""Which rank of several stalls: each writes every few seconds how far it is, and the launcher reads that.

A rank that is stopped (SIGSTOP), or waits for a disk that does not answer, says nothing and fails nothing. The others
wait for it in a collective until launcher.timeout_s; then gloo raises in them, and NCCL aborts them. Neither names the
rank that did not come. The launcher compares the ranks with each other, by when it saw each move last: no clock of
another machine is asked, and a job that is suspended as a whole is no stall.
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

_SHORTEST_S, _LONGEST_S = 1.0, 15.0  # between two pulses: often enough for the time-out, rare enough for a shared disk
_PULSES_PER_TIMEOUT = 8
# A step is reported soon after its end, but not more often: all ranks together write so many files a second.
_SHORTEST_GAP_S, _PULSES_PER_S = 0.25, 32
_FILES_LATE_S = 60.0  # a network file system may show a file's new content so much later
_LATER_S = 30.0  # than the libraries' own time-out, after which they say more
_TIMED_OUT = re.compile(r"Timed out waiting|operation timeout|[Tt]imeout\(ms\)|timed out", re.ASCII)  # of gloo, of NCCL
_NUM_PLACE_PARTS = 3  # of a source file's path, for people


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """How far a rank is."""

    rank: int
    host: str
    process: int
    step: int | None  # the last that it finished; None before the first
    phase: str | None  # of its start, the last that it finished
    doing: str  # what its main thread is at: function and place
    blocked_s: float  # for how long its main thread has been in an uninterruptible wait, without a break

    @property
    def progress(self) -> tuple[int | None, str | None]:
        """What changes while it gets on."""
        return self.step, self.phase

    @property
    def reported(self) -> str:
        """The last that it reported, in words."""
        if self.step is not None:
            return f"step {self.step}"
        return f"the end of its phase '{self.phase}'" if self.phase else "its start"


def pulse_file(folder: Path, rank: int) -> Path:
    """Where a rank writes how far it is."""
    return folder / LOG_FOLDER / f"pulse-{rank}.json"


def interval_s(launcher: LauncherConfig) -> float:
    """The time between two pulses."""
    return min(_LONGEST_S, max(_SHORTEST_S, _patience_s(launcher) / _PULSES_PER_TIMEOUT))


def _patience_s(launcher: LauncherConfig) -> float:
    """How long ranks wait for each other at the least."""
    return min(launcher.timeout_s, launcher.start_timeout_s)


class PulseWriter(threading.Thread):
    """Writes this rank's pulse until its process ends; it stands still when the whole process does."""

    def __init__(self, folder: Path, rank: int, num_ranks: int, clock: StartClock, launcher: LauncherConfig) -> None:
        super().__init__(name="pulse", daemon=True)
        self._file = pulse_file(folder, rank)
        self._rank, self._clock = rank, clock
        self._interval_s = interval_s(launcher)
        self._gap_s = max(_SHORTEST_GAP_S, num_ranks / _PULSES_PER_S)
        self._blocked_since: float | None = None

    def run(self) -> None:
        """Write one pulse after the other; a disk that is full or hangs is the training's to report."""
        while True:
            pulse = self.pulse()
            with suppress(OSError):
                beside = self._file.with_suffix(".new")  # not flushed: only the newest one counts
                beside.write_text(json.dumps(asdict(pulse)), encoding="utf-8")
                beside.replace(self._file)
            next_at = time.monotonic() + self._interval_s
            time.sleep(self._gap_s)
            while self._clock.step == pulse.step and (left_s := next_at - time.monotonic()) > 0:
                time.sleep(min(self._gap_s, left_s))

    def pulse(self) -> Pulse:
        """How far this rank is now."""
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
        with suppress(OSError):  # of the main thread, whose number is the process's; the name before it has blanks
            state = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "D":
            self._blocked_since = None
            return 0.0
        now = time.monotonic()
        self._blocked_since = now if self._blocked_since is None else self._blocked_since
        return round(now - self._blocked_since, 1)


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "nothing that Python knows"
    file = "/".join(Path(frame.f_code.co_filename).parts[-_NUM_PLACE_PARTS:])
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"


class PulseWatch:
    """The launcher's view of the ranks' pulses."""

    def __init__(self, folder: Path, num_ranks: int, launcher: LauncherConfig, *, is_shared: bool = False) -> None:
        self._folder, self._num_ranks = folder, num_ranks
        self._late_s = _FILES_LATE_S if is_shared else 0.0  # whether ranks of other machines write to the folder
        self._timeout_s, self._patience_s = launcher.timeout_s, _patience_s(launcher)
        self._interval_s = interval_s(launcher)
        self._pulses: dict[int, Pulse] = {}
        self._seen: dict[int, tuple[float, float]] = {}  # by rank, when its pulse changed last, and its progress
        self._changed: dict[int, int] = {}  # the file's time, as its own file system counts
        self._next_look = 0.0

    def look(self, now: float | None = None) -> TunebookError | None:
        """Read what is new, if it is time to; the error that names ranks which keep the others waiting for too long.

        Longer than the libraries' own time-out, which says more, unless a rank has failed already.
        """
        now = time.monotonic() if now is None else now
        if now < self._next_look:
            return None
        self._next_look = now + self._interval_s
        self._read(now)
        at_least_s = self._patience_s / 2 if self._ended() else self._timeout_s + _LATER_S
        return self._named(self._still(at_least_s + self._late_s))

    def cause(self, now: float | None = None) -> TunebookError | None:
        """The error that names the ranks for which the others waited in vain; None where that is not why they failed.

        To be asked when the ranks have failed.
        """
        self._read(time.monotonic() if now is None else now)
        still = self._still(self._patience_s / 2 + self._late_s)
        return self._named(still or self._absent())

    def _read(self, now: float) -> None:
        for rank in range(self._num_ranks):
            file = pulse_file(self._folder, rank)
            with suppress(OSError, ValueError, TypeError):  # not there yet, or of another version
                changed = file.stat().st_mtime_ns
                if changed == self._changed.get(rank):
                    continue
                pulse = Pulse(**json.loads(file.read_text(encoding="utf-8")))
                before = self._pulses.get(rank)
                is_further = before is None or before.progress != pulse.progress
                self._pulses[rank], self._changed[rank] = pulse, changed
                self._seen[rank] = (now, now if is_further else self._seen[rank][1])

    def _still(self, at_least_s: float) -> list[tuple[Pulse, str]]:
        """Ranks that have not run for so long while others did, and how."""
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
        """Ranks that run, and never came to what others gave up waiting in: no rank got on for the whole time-out."""
        if len(self._pulses) < self._num_ranks:
            return []
        newest = max(seen for seen, _ in self._seen.values())
        if newest - max(progress for _, progress in self._seen.values()) < 0.8 * self._patience_s:
            return []
        failed = self._ended() | failed_by_themselves(self._folder)
        if not any(_TIMED_OUT.search(last_text(rank_log(self._folder, rank))) for rank in failed):
            return []
        how = "runs, and did not come to where the others waited"
        return [(pulse, how) for rank, pulse in sorted(self._pulses.items()) if rank not in failed]

    def _ended(self) -> set[int]:
        """Ranks that have said how they ended."""
        return {rank for rank in range(self._num_ranks) if outcome_file(self._folder, rank).is_file()}

    def _named(self, found: list[tuple[Pulse, str]]) -> TunebookError | None:
        if not found:
            return None
        told = "; ".join(
            f"{where(pulse.rank, {pulse.rank: pulse.host})} (process {pulse.process}) {how}; the last that it reported "
            f"was {pulse.reported}, then in {pulse.doing}"
            for pulse, how in found
        )
        others = f"the other ranks wait for launcher.timeout_s={self._timeout_s} s"
        return TunebookError(f"{told}; {others}", problem_id="rank-stalled")
