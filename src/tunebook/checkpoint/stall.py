"""For how long training has stood still for a save: while it is written, and while somebody waits for its end."""

from __future__ import annotations

import time


class Stall:
    """How long training has stood still for a save, from when this is made; read by the thread that completes it."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._before_s = 0.0
        self._since: float | None = self._began  # None while training goes on

    @property
    def age_s(self) -> float:
        """Since the save began."""
        return time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        """That training has stood still, up to now."""
        since = self._since
        return self._before_s + (time.perf_counter() - since if since is not None else 0.0)

    def stop(self) -> None:
        """Training goes on. To be called before the thread is started that reads."""
        self._before_s, self._since = self.seconds, None

    def go_on(self) -> None:
        """Training stands still again, for good."""
        self._since = time.perf_counter()
