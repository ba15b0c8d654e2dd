"""The time from the command to the first optimizer step, by phase: of the launcher, then of rank 0.

The launcher writes its phases and the start time of the ranks into the manifest. Rank 0 adds its own phases after the
first step. Each phase ends where the next one begins, so that no time is missing.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunebook.record.manifest import add_to_manifest, manifest_or_empty

START_UP_KEY = "start_up"  # in the manifest
_LONGEST_S = 24 * 3600.0  # a sandbox may count from another time: no process asks for its age this late


class StartClock:
    """Seconds by phase of one process since `begun` (seconds since 1970). A repeated phase is added up."""

    def __init__(self, begun: float | None = None) -> None:
        self.begun = time.time() if begun is None else begun
        self.phases: dict[str, float] = {}
        self._last = self.begun

    def passed(self, phase: str) -> None:
        """Count the time since the previous phase for this one."""
        now = time.time()
        self.phases[phase] = self.phases.get(phase, 0.0) + max(0.0, now - self._last)
        self._last = now


def process_begun() -> float:
    """The start time of this process in seconds since 1970; now if the system does not tell it."""
    stat, age = Path("/proc/self/stat"), 0.0
    if stat.is_file():
        # The program's name is in parentheses and may contain parentheses and blanks. The 22nd field is the start.
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (age if 0 <= age < _LONGEST_S else 0.0)


def note_launch(folder: Path, clock: StartClock) -> None:
    """Write the launcher's phases and the present time as the start of the ranks. Replaces an earlier attempt's."""
    launched = datetime.now(UTC).isoformat(timespec="milliseconds")
    phases = {"launched": launched, "launcher": _rounded(clock.phases), "rank": {}, "first_step_s": None}
    add_to_manifest(folder, {START_UP_KEY: phases})


def launch_time(folder: Path) -> float:
    """The time that `note_launch` wrote, in seconds since 1970."""
    return datetime.fromisoformat(manifest_or_empty(folder)[START_UP_KEY]["launched"]).timestamp()


def note_first_step(folder: Path, clock: StartClock) -> None:
    """Write the phases of rank 0, whose first step has just ended, and the total."""
    recorded: dict[str, Any] = manifest_or_empty(folder).get(START_UP_KEY) or {}
    launched, launcher, phases = recorded.get("launched"), recorded.get("launcher", {}), clock.phases
    if launched is not None:
        waited = clock.begun - datetime.fromisoformat(launched).timestamp()
        phases = {"launch": max(0.0, waited)} | phases
    total = round(sum(launcher.values()) + sum(phases.values()), 3)
    start_up = {"launched": launched, "launcher": launcher, "rank": _rounded(phases), "first_step_s": total}
    add_to_manifest(folder, {START_UP_KEY: start_up})


def _rounded(phases: dict[str, float]) -> dict[str, float]:
    return {phase: round(seconds, 3) for phase, seconds in phases.items()}
