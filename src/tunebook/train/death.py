"""A process that ends when the one that started it is gone, so that nobody trains on unseen after a `kill -9`."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def ask_to_stop_when_parent_dies() -> None:
    """Let the kernel send this process SIGTERM, on which a rank saves and ends, when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
