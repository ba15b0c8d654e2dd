"""How long a run takes to its first optimizer step, phase by phase: of the launcher, then of rank 0.

The launcher writes its phases and the time at which it starts the ranks into the manifest; rank 0 adds its own when the
first step has ended. Every phase ends where the next one begins, so that nothing goes uncounted.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunebook.record.manifest import MANIFEST_FILE, read_manifest, update_manifest

START_UP_KEY = "start_up"  # in the manifest
_LONGEST_S = 24 * 3600.0  # a process that seems older than this, as this is asked, has a start that cannot be believed


class StartClock:
    """Seconds by phase of one process, from `begun` (seconds since 1970) on; a phase that comes again is added to."""

    def __init__(self, begun: float | None = None) -> None:
        self.begun = time.time() if begun is None else begun
        self.phases: dict[str, float] = {}
        self.step: int | None = None  # the last finished optimizer step, once there are any
        self._last = self.begun

    def passed(self, phase: str) -> None:
        """All time since the phase before was this one's."""
        now = time.time()
        self.phases[phase] = self.phases.get(phase, 0.0) + max(0.0, now - self._last)
        self._last = now


def process_begun() -> float:
    """When this process was made, in seconds since 1970; now where the system does not say (Linux does)."""
    now = time.time()
    try:
        # The name of the program, in brackets, may itself hold brackets and blanks; the 22nd field is the start.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - age if 0 <= age < _LONGEST_S else now


def note_launch(folder: Path, clock: StartClock) -> None:
    """Write down the launcher's phases, and that the ranks are started now; those of an earlier attempt are gone."""
    if (folder / MANIFEST_FILE).is_file():
        launched = datetime.now(UTC).isoformat(timespec="milliseconds")
        phases = _rounded(clock.phases)
        update_manifest(
            folder, {START_UP_KEY: {"launched": launched, "launcher": phases, "rank": {}, "first_step_s": None}}
        )


def note_first_step(folder: Path, clock: StartClock) -> None:
    """Write down the phases of rank 0, whose first step has just ended, and how long all of it took."""
    if not (folder / MANIFEST_FILE).is_file():
        return
    noted: dict[str, Any] = read_manifest(folder).get(START_UP_KEY) or {}
    phases = dict(clock.phases)
    if noted:
        waited = clock.begun - datetime.fromisoformat(noted["launched"]).timestamp()
        phases = {"launch": max(0.0, waited)} | phases
    launcher = noted.get("launcher", {})
    total = sum(launcher.values()) + sum(phases.values())
    found = {"launched": noted.get("launched"), "launcher": launcher, "rank": _rounded(phases)}
    update_manifest(folder, {START_UP_KEY: found | {"first_step_s": round(total, 3)}})


def _rounded(phases: dict[str, float]) -> dict[str, float]:
    return {phase: round(seconds, 3) for phase, seconds in phases.items()}
