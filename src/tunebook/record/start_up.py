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
_LONGEST_S = 24 * 3600.0  # an age above this is not plausible for a process that asks for it at its start


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
    """The start time of this process in seconds since 1970; now if the system does not tell (Linux does)."""
    now = time.time()
    try:
        # The program's name is in parentheses and may contain parentheses and blanks. The 22nd field is the start.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - age if 0 <= age < _LONGEST_S else now


def note_launch(folder: Path, clock: StartClock) -> None:
    """Write the launcher's phases and the present time as the start of the ranks. Replaces an earlier attempt's."""
    launched = datetime.now(UTC).isoformat(timespec="milliseconds")
    found = {"launched": launched, "launcher": _rounded(clock.phases), "rank": {}, "first_step_s": None}
    add_to_manifest(folder, {START_UP_KEY: found})


def note_first_step(folder: Path, clock: StartClock) -> None:
    """Write the phases of rank 0, whose first step has just ended, and the total."""
    noted: dict[str, Any] = manifest_or_empty(folder).get(START_UP_KEY) or {}
    launched, launcher, phases = noted.get("launched"), noted.get("launcher", {}), clock.phases
    if launched is not None:
        waited = clock.begun - datetime.fromisoformat(launched).timestamp()
        phases = {"launch": max(0.0, waited)} | phases
    total = sum(launcher.values()) + sum(phases.values())
    found = {"launched": launched, "launcher": launcher, "rank": _rounded(phases), "first_step_s": round(total, 3)}
    add_to_manifest(folder, {START_UP_KEY: found})


def _rounded(phases: dict[str, float]) -> dict[str, float]:
    return {phase: round(seconds, 3) for phase, seconds in phases.items()}
